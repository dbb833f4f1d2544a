"""Recording, timing and diagnosing a program of the zoo, each in processes of its own, as a user would."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.zoo.registry import Program

REPOSITORY: Final = Path(__file__).parents[2]
WARMUP: Final = 9
"""Steps that are not timed: about as many as pass before `stepscope run` records."""
WINDOW: Final = 5
"""Steps that are averaged: as many as `stepscope run` records, so that what comes once in five steps is in each."""
SECONDS: Final = 600
ATTEMPTS: Final = 4
DISTURBED: Final = ("host-contention",)
DISTURBANCE: Final = 0.05


class ProgramFailed(Exception):
    """A program of the zoo, or stepscope on it, ended with an error; the message is the end of what it wrote."""


def record(program: Program, twin: str, folder: Path, more: Sequence[str] = ()) -> Path:
    """Record a twin ("fault" or "clean") by `stepscope run` with its default options; returns the run's folder.

    Args:
        more: words for the program.
    """
    words = [*_command(program, f"tests.zoo.{program.name}"), f"--{twin}", *more]
    return record_words(words, f"{program.name}-{twin}", folder)


def record_words(words: Sequence[str], name: str, folder: Path, more: Sequence[str] = ()) -> Path:
    """Record what these words start by `stepscope run`, by default with its default options; returns the run's folder.

    Args:
        more: options of `stepscope run`.
    """
    shutil.rmtree(folder / name, ignore_errors=True)  # of an earlier call
    options = ["--folder", str(folder), "--name", name, "--no-diagnose", *more]
    output_of([sys.executable, "-m", "stepscope", "run", *options, *words], folder)
    return folder / name


def undisturbed(record_again: Callable[[], Path], rule: str) -> tuple[Path, list[dict[str, Any]]]:
    """A recording and what is found in it; made again where other programs disturbed it, as that finding advises.

    Args:
        rule: that the recording should show.
    """
    for _ in range(ATTEMPTS):
        run = record_again()
        found = findings(diagnosed(run))
        if rule in DISTURBED or not was_disturbed(found):
            break
    return run, found


def diagnosed(traces: Path) -> list[dict[str, Any]]:
    """The JSON reports of a run's folder or a trace: of several ranks, what is said of them together comes first."""
    words = [sys.executable, "-m", "stepscope", "diagnose", str(traces), "--json", "-", "--no-cache"]
    report = json.loads(output_of(words, traces.parent))
    if "ranks" not in report:
        return [report]
    return [{"findings": report["across_ranks"]}, *report["ranks"]]


def findings(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a report says, in its order; of several reports what they say together, the largest saving first.

    What several ranks say of one line counts once, with the largest saving; of equal savings the earlier report's.
    """
    if len(reports) == 1:
        return list(reports[0]["findings"])
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for finding in (finding for report in reports for finding in report["findings"]):
        place = finding["where"][0] if finding["where"] else {"file": "", "line": 0}
        key = (finding["rule"], place["file"], place["line"])
        if key not in found or found[key]["saving_ns_per_step"] < finding["saving_ns_per_step"]:
            found[key] = finding
    return sorted(found.values(), key=lambda finding: -finding["saving_ns_per_step"])


def was_disturbed(found: Sequence[dict[str, Any]]) -> bool:
    """Whether other programs took so much of the processor that a recording says more of them than of its own."""
    return any(finding["rule"] in DISTURBED and finding["saving_share"] > DISTURBANCE for finding in found)


def step_ns(program: Program, twin: str, more: Sequence[str] = ()) -> float:
    """What a step of a twin takes without a profiler, as `least_step_ns`; `more` are words for the program."""
    words = [*_python(program), *_command(program, "tests.zoo.timing"), program.name, f"--{twin}", *more]
    return least_step_ns(words)


def least_step_ns(words: Sequence[str]) -> float:
    """The least mean of WINDOW steps in a row; the words run `tests.zoo.timing`.

    The least, because whatever else runs on the machine only makes steps longer.
    """
    steps: list[int] = json.loads(output_of(words, REPOSITORY).splitlines()[-1])
    steady = steps[WARMUP:]
    last = max(len(steady) - WINDOW, 0)
    return min(statistics.mean(steady[begin : begin + WINDOW]) for begin in range(last + 1))


def in_turns(timings: Mapping[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Each timing so many times, in turns and every other time backwards: a change of the machine's speed meets all."""
    times: dict[str, list[float]] = {name: [] for name in timings}
    for number in range(repeat):
        for name in list(timings)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(timings[name]())
    return times


def _python(program: Program) -> list[str]:
    return [sys.executable] if program.ranks == 1 else []


def _command(program: Program, module: str) -> list[str]:
    if program.ranks == 1:
        return ["-m", module]
    torchrun = Path(sys.executable).with_name("torchrun")
    return [str(torchrun), "--standalone", "--nproc-per-node", str(program.ranks), "-m", module]


def output_of(words: Sequence[str], data: Path) -> str:
    """What a command writes to standard output, run in the repository, with stepscope's own data kept in `data`."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    own |= {"STEPSCOPE_DATA_DIR": str(data / "data"), "STEPSCOPE_CACHE_DIR": str(data / "cache")}
    done = subprocess.run(words, cwd=REPOSITORY, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise ProgramFailed(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
