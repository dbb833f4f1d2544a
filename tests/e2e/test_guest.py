"""Whatever fails in stepscope, the program goes on: what it prints and returns is what it does without stepscope."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stepscope.capture
import stepscope.integrations
from stepscope.capture import guard
from stepscope.capture.applying import all_flags
from tests.guest import programs

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
    "applied": (programs.TRAINING, {**RECORD, "apply": ["garbage-at-steps", "fuse-optimizer"]}, "torch"),
    "batched": (programs.PER_TOKEN, {**RECORD, "apply": ["batched-loss"]}, "torch"),
    "tracked": (programs.TRACKED, {"trackers": True}, "torch.utils.tensorboard.writer"),
    "block": (programs.BLOCK, None, ""),
    "telemetry": (programs.TELEMETRY, None, ""),
    "agent": (programs.AGENT, None, ""),
    "framework": (programs.FRAMEWORK, None, ""),
    "lightning": (programs.LIGHTNING, None, ""),
}
ELSEWHERE = {
    "capture.energy_counters.SampledPower._run": "tests/unit/test_guard.py",
    "capture.quiet_seeds._SeedWhenImported._imported": "tests/unit/test_guard.py",
    "capture.xla_hooks.XlaHooks._seen": "tests/e2e/test_jax.py",
    "capture.xla_hooks._Calls._begins": "tests/e2e/test_jax.py",
    "capture.xla_hooks._jitted": "tests/e2e/test_jax.py",
}
"""Entries that no program here comes to, and where an error is put into them."""
KINDS = ("RuntimeError", "ENOSPC", "Panic", "EIO", "MemoryError", "EDQUOT", "RecursionError", "EROFS", "ENOENT")

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a program in a process of its own; an error of that kind comes up in the entry, if one is named."""
    root = tmp_path_factory.mktemp("guest")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {name: str(root / name) for name in ("STEPSCOPE_DATA_DIR", "TMPDIR")}
    (root / "TMPDIR").mkdir()
    for name in ("STEPSCOPE_RUN", "STEPSCOPE_RUN_OPTIONS"):
        environment.pop(name, None)
    servers: dict[str, subprocess.Popen[str]] = {}
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
        job = {"program": program, "options": options, "call": call, "entry": entry, "error": error, **changed}
        server = servers[kind]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**job, "folder": str(root / str(count))}) + "\n")
        server.stdin.flush()
        return dict(json.loads(server.stdout.readline()))

    yield answer
    for server in servers.values():
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


def entries() -> set[str]:
    """Every entry of the package, as the guard lists them when all modules are imported."""
    for package in (stepscope.capture, stepscope.integrations):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "bootstrap_path" not in module.name and not module.name.endswith("profiler_child"):
                importlib.import_module(module.name)
    return set(guard.ENTRIES)


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
    plain = run(scenario, options=None) if "stepscope" not in SCENARIOS[scenario][0] else run(scenario)
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


@pytest.mark.parametrize("flag", [flag.name for flag in all_flags()])
def test_an_error_in_a_remedy_changes_nothing(flag: str, run: Run) -> None:
    chosen = next(each for each in all_flags() if each.name == flag)
    word = flag if chosen.value is None or chosen.value.default is not None else f"{flag}={2}"
    options = {**RECORD, "apply": [word]}
    plain, applied = run("training", options=None), run("training", options=options)
    entered = [entry for entry in applied["hit"] if entry.startswith(("apply.", "capture.applying"))]
    for entry in entered:
        broken = run("training", entry, options=options)
        assert (broken["code"], broken["out"], broken["clean"]) == (plain["code"], plain["out"], broken["clean"] and [])
        assert "Traceback" not in broken["err"]
