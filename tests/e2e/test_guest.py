"""Whatever fails in stepscope, the program goes on: what it prints and returns is what it does without stepscope."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.record.apply import all_flags
from tests.guest import entries, programs, unusual

SERVER = Path(programs.__file__).parent / "server.py"
RECORD = {"steps": 2, "warmup": 2, "telemetry": False}
SCENARIOS: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "training": (programs.TRAINING, {**RECORD, "telemetry": True}, "torch"),
    "quiet": (programs.TRAINING, {**RECORD, "quiet": True, "seed": 1}, "torch"),
    "workers": (programs.WITH_WORKERS, RECORD, "torch"),
    "collected": (programs.COLLECTED, RECORD, "torch"),
    "forward": (programs.FORWARD, {**RECORD, "steps": 10}, "torch"),
    "own profiler": (programs.OWN_PROFILER, {**RECORD, "steps": 5}, "torch"),
    "forks": (programs.FORKS, {**RECORD, "telemetry": True, "quiet": True}, "torch"),
    "served": (programs.FORKS, {**RECORD, "serve": True}, "torch"),
    "bench": (programs.SCALED, {"steps": 200, "measure": True, "losses": True}, "torch"),
    "marked": (programs.MARKED, {"steps": 200, "measure": True}, ""),
    "applied": (programs.FUSED, {**RECORD, "apply": ["garbage-at-steps", "fuse-optimizer"]}, "torch"),
    "tracked": (programs.TRACKED, {"trackers": True}, "torch.utils.tensorboard.writer"),
    "block": (programs.BLOCK, None, ""),
    "telemetry": (programs.TELEMETRY, None, ""),
    "agent": (programs.AGENT, None, ""),
    "framework": (programs.FRAMEWORK, None, ""),
    "lightning": (programs.LIGHTNING, None, ""),
}
ELSEWHERE = {
    "record.apply.code_swaps.Guard.__call__": "tests/unit/test_guard.py",
    "machine.energy_counters.SampledPower._run": "tests/unit/test_guard.py",
    "machine.quiet._SeedWhenImported._imported": "tests/unit/test_guard.py",
    "record.repetition.BusyFunctions._sample": "tests/unit/test_guard.py",
    "record.bootstrap._exit_late": "tests/unit/test_guard.py",
    "remedies.compile_caches.BackgroundEviction._run_alone": "tests/unit/remedies/test_attempts.py",
    "remedies.deferred_scalars.DeferredScalars._close_at_exit": "tests/unit/remedies/test_attempts.py",
    "record.constant_calls.ConstantLook.compiles": "tests/unit/record/test_constant_calls.py",
    "record.constant_calls.ConstantLook.leave": "tests/unit/record/test_constant_calls.py",
    "record.hooks.XlaHooks._seen": "tests/e2e/test_jax.py",
    "record.hooks._Calls._begins": "tests/e2e/test_jax.py",
    "record.hooks._jitted": "tests/e2e/test_jax.py",
}
"""Entries that no program here comes to, and where an error is put into them."""
KINDS = ("RuntimeError", "ENOSPC", "Panic", "EIO", "MemoryError", "EDQUOT", "RecursionError", "EROFS", "ENOENT")

END_OF_ALL = "record.apply.patching.Applying.end"
"""Every remedy comes to it, and one of the programs tries it."""
INEXACT = ("bf16", "fp16", "tf32", "chunked-loss", "compile", "channels-last")

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a program in a process of its own; an error of that kind comes up in the entry, if one is named."""
    root = tmp_path_factory.mktemp("guest")
    tree = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    environment |= {name: str(root / name) for name in ("STEPSCOPE_DATA_DIR", "TMPDIR")}
    (root / "TMPDIR").mkdir()
    for name in ("STEPSCOPE_RUN", "STEPSCOPE_RUN_OPTIONS"):
        environment.pop(name, None)
    servers: dict[str, subprocess.Popen[str]] = {}
    known: dict[str, dict[str, Any]] = {}
    count = 0

    def answer(scenario: str, entry: str | None = None, error: str = "RuntimeError", **changed: Any) -> dict[str, Any]:
        nonlocal count
        kind = "lightning" if scenario == "lightning" else "plain"
        if kind not in servers:
            command = [sys.executable, str(SERVER), kind]
            pipe = subprocess.PIPE
            servers[kind] = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        count += 1
        program, options, call = SCENARIOS[scenario]
        job = {"program": program, "options": options, "call": call, "entry": entry, "error": error}
        job |= {"whole": entry is None, **changed}
        key = json.dumps(job)
        if key in known:
            return known[key]
        server = servers[kind]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**job, "folder": str(root / str(count))}) + "\n")
        server.stdin.flush()
        known[key] = json.loads(server.stdout.readline())
        return known[key]

    yield answer
    for server in servers.values():
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


@pytest.fixture(scope="module")
def reached(run: Run) -> dict[str, str]:
    """Entry -> a program that comes to it."""
    found: dict[str, str] = {}
    for scenario in SCENARIOS:
        for entry in run(scenario)["hit"]:
            found.setdefault(entry, scenario)
    return found


def test_every_entry_is_tried(reached: dict[str, str]) -> None:
    missing = entries() - set(reached) - set(ELSEWHERE)
    assert sorted(missing) == [], "no program in tests/guest/programs.py comes to these"
    assert not set(ELSEWHERE) - entries()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_in_any_entry_changes_nothing(scenario: str, run: Run, reached: dict[str, str]) -> None:
    of_us = "stepscope" in SCENARIOS[scenario][0]
    plain = run(scenario) if of_us else run(scenario, options=None, whole=False)
    assert "Traceback" not in plain["err"]
    wrong = []
    for number, entry in enumerate(sorted(entry for entry, name in reached.items() if name == scenario)):
        kind = KINDS[number % len(KINDS)]
        broken = run(scenario, entry, kind)
        told = broken["err"].count("stepscope leaves this process")
        as_it_was = (broken["code"], broken["out"]) == (plain["code"], plain["out"])
        if not as_it_was or not told or "Traceback" in broken["err"] or broken["clean"]:
            wrong.append((entry, kind, broken["code"], broken["clean"], broken["out"][-300:], broken["err"][-2000:]))
    assert wrong == []


@pytest.mark.parametrize("name", unusual.PROGRAMS)
def test_an_unusual_program_runs_as_without_us(name: str, run: Run) -> None:
    program = unusual.PROGRAMS[name]
    plain = run("training", options=None, program=program)
    recorded = run("training", options={**RECORD, "warmup": 6, "telemetry": True}, program=program)

    assert "Traceback" not in plain["err"]
    assert recorded["out"] == plain["out"]
    assert recorded["code"] == plain["code"]
    assert "stepscope leaves" not in recorded["err"]
    assert "record.equal_values._stop_in_child" in recorded["hit"] or name != "python"


@pytest.mark.parametrize("flag", [flag.name for flag in all_flags()])
def test_an_error_in_a_remedy_changes_nothing(flag: str, run: Run) -> None:
    chosen = next(each for each in all_flags() if each.name == flag)
    word = flag if chosen.value is None or chosen.value.default is not None else f"{flag}={2}"
    options = {**RECORD, "apply": [word]}
    program = programs.COMPILED if flag == "compile" else programs.TRAINING
    plain, applied = (
        run("training", options=None, whole=False),
        run("training", options=options, program=program, whole=False),
    )
    entered = [entry for entry in applied["hit"] if entry.startswith(("apply.", "record.apply", "remedies."))]
    assert entered
    for entry in [each for each in entered if each != END_OF_ALL] or entered:
        broken = run("training", entry, options=options, program=program)
        is_exact = flag not in INEXACT  # until the error comes up, the remedy computes in its own precision
        assert broken["code"] == plain["code"]
        assert (broken["out"] if is_exact else len(broken["out"])) == (plain["out"] if is_exact else len(plain["out"]))
        assert "stepscope leaves" in broken["err"]
        assert not broken["clean"]
        assert "Traceback" not in broken["err"]


def test_a_thread_that_ends_while_it_is_recorded_takes_no_program_down(tmp_path: Path) -> None:
    """What torch's own profiler dies of: see tests/guest/torch_thread_fault.py."""
    script = tmp_path / "threaded.py"
    script.write_text(programs.THREADED)
    data = {"STEPSCOPE_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "stepscope", "run", "--no-diagnose", "--warmup", "2", "--steps", "20", str(script)]

    done = subprocess.run(command, env={**os.environ, **data}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "the thread has ended\n"
    assert "allocations were not recorded" in done.stderr
    assert "ValueError" not in done.stderr
    assert "deep enough" not in done.stderr
    assert len(list((tmp_path / "data").rglob("trace-1.json.gz"))) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_torch_alone_still_has_the_fault(tmp_path: Path) -> None:
    """Once it has not, `Recorder._choose_threads` can go."""
    import torch

    fault = SERVER.with_name("torch_thread_fault.py")
    done = subprocess.run([sys.executable, str(fault)], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode == -11) == torch.__version__.startswith("2.13")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_training_outlives_a_stepscope_that_is_killed(tmp_path: Path) -> None:
    script, said = tmp_path / "train.py", tmp_path / "said"
    script.write_text(programs.OUTLIVING)
    environment = {**os.environ, "STEPSCOPE_DATA_DIR": str(tmp_path / "data"), "SAID": str(said)}
    command = [
        sys.executable,
        "-m",
        "stepscope",
        "run",
        "--name",
        "orphan",
        "--warmup",
        "2",
        "--steps",
        "2",
        str(script),
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not said.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    (tmp_path / "killed").touch()
    while said.read_text() != "ended":
        time.sleep(0.05)

    command = [sys.executable, "-m", "stepscope", "diagnose", "orphan"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr


FULL = 120 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 kB, where one may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("what", ["full", "unwritable", "removed"])
def test_a_disk_that_cannot_be_written_ends_no_program(
    what: str, tmp_path: Path, run: Run, request: pytest.FixtureRequest
) -> None:
    place = tmp_path / "data"
    if what == "full":
        place = request.getfixturevalue("small_disk")
    elif what == "unwritable":
        place.write_text("a file where the folder should be")
    script = tmp_path / "train.py"
    program = programs.TRAINING if what != "removed" else programs.REMOVES_ITS_RUN
    script.write_text(program)
    plain = run("training", options=None, program=program)
    command = [sys.executable, "-m", "stepscope", "run", "--no-diagnose", "--warmup", "2", "--steps", "3", str(script)]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "STEPSCOPE_DATA_DIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (plain["code"], plain["out"])
    assert "Traceback" not in done.stderr
    assert what == "removed" or "nothing is recorded" in done.stderr or "nothing was recorded" in done.stderr
