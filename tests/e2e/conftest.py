"""What the end-to-end tests share: a process of stepscope, and the traces it is given."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import stepscope
from stepscope.commands import main
from tests.simulator import KinetoOptions, write_kineto
from tests.simulator.programs import PROGRAMS

PACKAGE = Path(stepscope.__file__).parent
PER_TOKEN = Path(__file__).parents[2] / "examples" / "gpt2_per_token_loss_cpu.json.gz"
BATCHED = Path(__file__).parents[1] / "fixtures" / "gpt2_batched_loss_cpu.json.gz"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a process of stepscope said, and how it ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)

    def mistake(self) -> str:
        """The one sentence on standard error that a mistake ends in."""
        assert self.code == 2, self
        assert self.out == "", self
        assert self.err.startswith("stepscope: "), self
        assert self.err.count("\n") == 1, self
        assert "Traceback" not in self.err
        return self.err


Stepscope: TypeAlias = Callable[..., Outcome]


def environment(**changes: str) -> dict[str, str]:
    """The variables for a process: this package is found, nothing of the terminal leaks in."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "TERM": "xterm-256color", **changes}


def run_stepscope(*arguments: str | Path, stdin: bytes = b"", folder: Path | None = None, **variables: str) -> Outcome:
    """Run `python -m stepscope` to its end; standard output and error are pipes."""
    process = subprocess.run(
        [sys.executable, "-m", "stepscope", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        cwd=folder,
        env=environment(**variables),
        timeout=TIMEOUT_S,
        check=False,
    )
    return Outcome(process.returncode, process.stdout.decode(), process.stderr.decode())


def run_here(*arguments: str | Path, stdin: bytes = b"", folder: Path | None = None, **variables: str) -> Outcome:
    """Run the command line's `main` in this process, with streams that are no terminal."""
    streams = {"stdin": io.BytesIO(stdin), "stdout": io.BytesIO(), "stderr": io.BytesIO()}
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in streams.items():
            patch.setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", write_through=name == "stderr"))
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        if folder is not None:
            patch.chdir(folder)
        try:
            code = main([str(word) for word in arguments])
        except SystemExit as ended:  # how argparse ends after --help
            code = int(ended.code or 0)
        sys.stdout.flush()
        return Outcome(code, streams["stdout"].getvalue().decode(), streams["stderr"].getvalue().decode())


@pytest.fixture
def run() -> Stepscope:
    """Runs stepscope in this process; test_commands starts processes for what is about them."""
    return run_here


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The trace of one of the simulator's programs, written once."""
    folder = tmp_path_factory.mktemp("simulated")

    def written(name: str) -> Path:
        path = folder / f"{name}.json.gz"
        return path if path.exists() else write_kineto(PROGRAMS[name](), path, KinetoOptions())

    return written


@pytest.fixture
def gpu(simulated: Callable[[str], Path]) -> Path:
    """A trace of four steps on a device that waits for data."""
    return simulated("input_bound_training")


def slice_event(category: str, name: str, start_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    """One complete event on the main thread; `more` goes to its args, but pid and tid."""
    places = {"pid": more.pop("pid", 1), "tid": more.pop("tid", 1)}
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": length_us, **places, "args": more}


def device_steps(
    name: str = "kernel", *, frame: str = "train.py(3): f", operator: str = "aten::mm", steps: int = 4
) -> list[dict[str, Any]]:
    """A loop in which every step launches one kernel of that name."""
    events = []
    for step in range(steps):
        at = 1000 * step
        events += [
            slice_event("user_annotation", f"ProfilerStep#{step}", at, 900),
            slice_event("python_function", frame, at + 1, 890, **{"Python id": step + 1, "Python parent id": None}),
            slice_event("cpu_op", operator, at + 100, 100, **{"External id": step + 1, "Input Dims": [[2, 2]]}),
            slice_event("cuda_runtime", "cudaLaunchKernel", at + 110, 10, correlation=step + 1),
            slice_event("kernel", name, at + 130, 200, pid=0, tid=7, device=0, stream=7, correlation=step + 1),
        ]
    return events


def write_events(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    """Write a Kineto trace of these events."""
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}))
    return path
