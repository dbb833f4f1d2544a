"""`stepscope run` on real programs, each in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import stepscope
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.runs import RunIndex
from tests.e2e.conftest import run_here

pytest.importorskip("torch")

MODEL = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    def train(times):
        for _ in range(times):
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
"""


@dataclass
class Ended:
    """A program that was run under stepscope."""

    code: int
    out: str
    err: str
    folder: RunFolder

    @property
    def steps(self) -> list[int]:
        return [one["steps"] for one in self.folder.recordings()]

    @property
    def sources(self) -> set[str]:
        return {one["source"] for one in self.folder.recordings()}


Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Writes a script and runs it: options and arguments as given, or another command line around it."""
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))

    def run(script: str, *options: str, program: tuple[str, ...] = ("script.py",), name: str = "it") -> Ended:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        diagnose = [] if "--diagnose" in options else ["--no-diagnose"]
        own = [option for option in options if option != "--diagnose"]
        words = [sys.executable, "-m", "stepscope", "run", "--name", name, *diagnose, *own, *program]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        return Ended(done.returncode, done.stdout, done.stderr, RunFolder(tmp_path / "data" / "runs" / name))

    return run


def with_model(script: str) -> str:
    return textwrap.dedent(MODEL) + textwrap.dedent(script)


def test_a_script_is_recorded_and_diagnosed_and_its_output_is_its_own(run: Run) -> None:
    ended = run(with_model("train(30); print('trained')"), "--diagnose", "--html", "report.html")

    assert (ended.code, ended.out) == (0, "trained\n")
    assert (ended.steps, ended.sources, len(ended.folder.traces())) == ([5], {"optimizer"}, 1)
    assert "run it: recorded 5 steps (10 to 14), seen by the optimizer" in ended.err
    assert "a step takes" in ended.err
    assert "CPUAllocator" not in ended.err
    assert (ended.folder.path.parents[2] / "report.html").stat().st_size > 1000
    listed = run_here("steps", "it", "--format", "json").json()
    assert [step["index"] for step in listed] == [10, 11, 12, 13, 14]
    manifest = ended.folder.manifest()
    assert (manifest.exit_code, manifest.command[1:]) == (0, ("script.py",))
    assert {"stepscope", "python", "torch"} <= set(manifest.versions)


WAITS_FOR_ITS_DIAGNOSIS = """
    import os, time
    train(70)
    print("trained")
    until = time.monotonic() + 120
    while not os.path.exists("report.html") and time.monotonic() < until:
        time.sleep(0.1)
    print("seen" if os.path.exists("report.html") else "not seen")
"""


def test_the_answer_comes_while_the_program_runs_and_only_once(run: Run) -> None:
    ended = run(with_model(WAITS_FOR_ITS_DIAGNOSIS), "--diagnose", "--html", "report.html")

    assert (ended.code, ended.out) == (0, "trained\nseen\n")
    assert ended.err.count("a step takes") == ended.err.count("recorded 5 steps") == 1
    assert ended.err.rstrip().endswith("run it: its diagnosis is above; stepscope diagnose it shows it again")


WHERE = """
    import json, os, sys
    print(json.dumps([sys.argv, __file__, __name__, sys.path, os.getcwd()]))
"""


@pytest.mark.parametrize("program", [("script.py", "--a", "--", "b"), ("-m", "script", "-x"), ("sub/../script.py",)])
def test_a_script_sees_what_plain_python_shows_it(run: Run, tmp_path: Path, program: tuple[str, ...]) -> None:
    (tmp_path / "sub").mkdir()
    ended = run(WHERE, program=program)
    plain = subprocess.run([sys.executable, *program], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert json.loads(ended.out) == json.loads(plain.stdout)


def test_the_users_own_sitecustomize_runs_too(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.own = __file__")
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "own"), before])))

    ended = run("print(own); import sitecustomize; print(sitecustomize.__file__)")
    expected = str(tmp_path / "own" / "sitecustomize.py")
    assert ended.out.splitlines() == [expected, expected]


def test_a_program_without_torch(run: Run) -> None:
    ended = run("import sys; print('hi'); sys.exit(3)")

    assert (ended.code, ended.out) == (3, "hi\n")
    assert ended.err == (
        "stepscope: run it: nothing was recorded, because neither torch nor jax was imported; "
        "recording needs one in the Python that runs the program\n"
    )


def test_a_limit_on_runs_removes_an_old_one_and_names_it(run: Run) -> None:
    old = RunFolder.create(None, None, RunManifest(command=("old.py",)))
    old.write_manifest(old.manifest().ended(1.0, 0, []))
    RunIndex().add(old)
    RunIndex().set_limit(0)

    ended = run("print('hello')")

    assert (ended.code, ended.out, old.path.exists(), ended.folder.path.exists()) == (0, "hello\n", False, True)
    assert f"removed {old.name}" in ended.err


def test_a_program_without_steps(run: Run) -> None:
    assert "torch was imported, but no step was seen" in run("import torch").err


def test_a_program_that_is_too_short(run: Run) -> None:
    ended = run(with_model("train(3)"))

    assert "the program ended after 3 steps, before the recording began; --warmup 1 begins it sooner" in ended.err


def test_a_crash_keeps_what_was_recorded(run: Run) -> None:
    ended = run(with_model("train(13); raise ValueError('boom')"))

    assert ended.code == 1
    assert "ValueError: boom" in ended.err
    assert "recorded 3 of 5 steps" in ended.err
    assert len(ended.folder.traces()) == 1


def test_os_exit_keeps_what_was_recorded(run: Run) -> None:
    ended = run(with_model("import os; train(13); os._exit(7)"))

    assert (ended.code, ended.steps) == (7, [3])


def test_exit_after_ends_the_program_cleanly(run: Run) -> None:
    script = "import atexit; atexit.register(print, 'cleaned up'); train(1000000); print('never')"
    ended = run(with_model(script), "--exit-after", "--warmup", "1", "--steps", "2")

    assert (ended.code, ended.out, ended.steps) == (0, "cleaned up\n", [2])
    assert ended.folder.recordings()[0]["first_step"] == 1


def test_counters_of_energy_that_are_missing_are_named(run: Run) -> None:
    """On a machine that has them, what they measured is told instead."""
    ended = run(with_model("train(1000000)"), "--energy", "--exit-after", "--warmup", "1", "--steps", "1")

    [left] = ended.folder.recordings()
    measured = {counter["kind"] for counter in left["energy"]["counters"]}
    assert (ended.code, measured | {each["kind"] for each in left["energy"]["missing"]}) == (0, {"gpu", "cpu", "dram"})
    assert ("energy not measured of" in ended.err) == bool(left["energy"]["missing"])
    assert all(joules > 0 for window in left["energy"]["windows"] for joules in window["joules"].values())


def test_inference_without_a_loader(run: Run) -> None:
    script = """
        with torch.no_grad():
            for _ in range(4000):
                model(torch.ones(512, 16))
    """
    ended = run(textwrap.dedent(MODEL).replace("optimizer = ", "make = lambda: ") + textwrap.dedent(script))
    assert (ended.sources, ended.steps) == ({"forward"}, [5])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_record_nothing(run: Run, start: str) -> None:
    script = f"""
        from torch.utils.data import DataLoader
        if __name__ == "__main__":
            for batch in DataLoader(list(range(60)), batch_size=2, num_workers=1, multiprocessing_context="{start}"):
                train(1)
            try:
                list(DataLoader([print], num_workers=1, collate_fn=sum, multiprocessing_context="{start}"))
            except Exception as error:
                print(error)
    """
    ended = run(with_model(script))
    assert (ended.code, ended.sources, ended.steps) == (0, {"optimizer"}, [5])
    assert "Original Traceback" in ended.out
    assert str(Path(stepscope.__file__).parent) not in ended.out


def test_gradient_accumulation_records_optimizer_steps(run: Run) -> None:
    script = """
        from torch.utils.data import DataLoader
        for number, batch in enumerate(DataLoader(torch.ones(800, 16))):
            model(batch).sum().backward()
            if number % 40 == 39:
                optimizer.step()
    """
    ended = run(with_model(script), "--warmup", "3", "--steps", "2")
    assert (ended.sources, ended.steps, len(ended.folder.traces())) == ({"optimizer"}, [2], 1)


def test_a_program_with_its_own_profiler_keeps_it(run: Run) -> None:
    script = """
        from torch.profiler import profile, schedule
        with profile(schedule=schedule(wait=2, warmup=9, active=3, repeat=1)) as profiler:
            for _ in range(40):
                train(1)
                profiler.step()
        print(sum(event.name == "Optimizer.step#SGD.step" for event in profiler.events()))
    """
    ended = run(with_model(script))

    assert (ended.code, ended.out, ended.steps) == (0, "3\n", [5])
    assert "the program uses torch.profiler itself" in ended.err


def test_two_ranks_record_the_same_steps_into_one_run(run: Run) -> None:
    script = """
        import torch.distributed as distributed
        distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        train(30)
        distributed.destroy_process_group()
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    ended = run(with_model(script), "--diagnose", program=torchrun)

    assert ended.code == 0
    recordings = ended.folder.recordings()
    assert [(one["rank"], one["world_size"], one["first_step"], one["steps"]) for one in recordings] == [
        (0, 2, 10, 5),
        (1, 2, 10, 5),
    ]
    assert "on 2 ranks" in ended.err
    assert re.search(r"^2 ranks\n +rank ", ended.err, re.MULTILINE)


SLEEPS = """
    import os, signal, sys, time
    def caught(number, frame):
        os.write(1, f"caught {number}\\n".encode())
        sys.exit(9)
    if len(sys.argv) > 1:
        signal.signal(getattr(signal, sys.argv[1]), caught)
    os.write(1, b"ready\\n")
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("arguments", "sent", "code", "out"),
    [
        ((), "SIGTERM", 128 + 15, ""),
        (("SIGTERM",), "SIGTERM", 9, "caught 15\n"),
        (("SIGINT",), "SIGINT", 9, "caught 2\n"),
        (("SIGUSR1",), "SIGUSR1", 9, "caught 10\n"),
    ],
)
def test_signals_are_handed_on(tmp_path: Path, arguments: tuple[str, ...], sent: str, code: int, out: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SLEEPS))
    words = [sys.executable, "-m", "stepscope", "run", "--folder", "runs", "script.py", *arguments]
    environment = {**os.environ, "STEPSCOPE_DATA_DIR": str(tmp_path / "data")}
    number = getattr(signal, sent)
    if signal.getsignal(number) == signal.SIG_IGN:  # left so by another test, and a process hands it on to its children
        signal.signal(number, signal.SIG_DFL)
    started = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.send_signal(getattr(signal, sent))
    rest, _ = started.communicate(timeout=60)

    assert (started.returncode, rest) == (code, out)


def test_what_is_typed_at_a_terminal_reaches_the_program_once(tmp_path: Path) -> None:
    import pty

    (tmp_path / "script.py").write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(100)\nexcept KeyboardInterrupt:\n"
        "    time.sleep(0.5)\n    print('once', flush=True)\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.environ["STEPSCOPE_DATA_DIR"] = str(tmp_path / "data")
        os.execv(sys.executable, [sys.executable, "-m", "stepscope", "run", "--name", "it", "script.py"])
    seen = b""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            seen += os.read(terminal, 1000)
        except OSError:  # the other end is closed
            break
        if seen.endswith(b"ready\r\n"):
            os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    os.close(terminal)

    assert (os.waitstatus_to_exitcode(status), seen.count(b"once"), b"Traceback" in seen) == (0, 1, False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "say what to run"),
        (["missing.py"], "there is no script missing.py"),
        (["no-such-program"], "there is no program no-such-program"),
        (["-m"], "-m needs the name of a module"),
        (["--stpes", "3", "x.py"], "there is no option --stpes; did you mean --steps?"),
        (["--steps", "0", "x.py"], "'0' is not a whole number from 1 on"),
        (["--html", "-", "x.py"], "standard output belongs to the program"),
        (["--name", "a/b", "true"], "is not a run's name"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "run", *words],
        cwd=tmp_path,
        env={**os.environ, "STEPSCOPE_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
