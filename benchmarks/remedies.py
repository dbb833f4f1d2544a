"""What each remedy gains: time and memory with it and without, as ratios.

    python benchmarks/remedies.py                    all of them
    python benchmarks/remedies.py --only attention   those whose name or case holds a word
    python benchmarks/remedies.py --pages            and give the pages in docs/remedies that quote them the new figures

The two programs of a measurement run in turn, in a process of their own each, `--rounds` times; a time is the mean of
all steps of all rounds, a ratio is without over with, so that above 1 the remedy helps. Its interval is the one of
`stepscope bench`. Memory is the peak of the process (of the device with CUDA), the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from remedy_measurements import PRELUDE, Measurement

from stepscope.compare import compare_samples

MODULES: tuple[str, ...] = (
    "attention",
    "data_parallel",
    "deferred_logging",
    "graphs",
    "horizontal",
    "host_settings",
    "input_pipeline",
    "losses",
    "optimizers",
    "precision",
    "rewrites",
)
"""Modules of remedy_measurements, in the order in which they are printed."""


def one_run(program: str) -> dict[str, Any]:
    """What the program says in its last line, from a process of its own."""
    sources = Path(__file__).resolve().parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + program], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"a measured program failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def case(measurement: Measurement) -> str:
    """The cells of its row that are the same in every run."""
    return f"| `{measurement.remedy}` | {measurement.what} |"


def row(measurement: Measurement, rounds: int) -> str:
    """A line of the table, in Markdown."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    programs = {False: measurement.without, True: measurement.with_remedy}
    for number in range(rounds):
        for which in (False, True) if number % 2 == 0 else (True, False):
            runs[which].append(one_run(programs[which]))
    times = {which: [run["step_ns"] for run in found] for which, found in runs.items()}
    change = compare_samples(times[True], times[False])
    without, with_remedy = change.after_ns or 0.0, change.before_ns or float("nan")
    peaks = {which: statistics.median(run["peak_bytes"] for run in found) for which, found in runs.items()}
    interval = ""
    if change.change_low is not None and change.change_high is not None:
        interval = f" ({1 + change.change_low:.2f} to {1 + change.change_high:.2f})"
    return (
        f"{case(measurement)} {without / 1e6:.2f} | {with_remedy / 1e6:.2f} "
        f"| {without / with_remedy:.2f}{interval} | {peaks[False] / 2**20:.0f} | {peaks[True] / 2**20:.0f} "
        f"| {peaks[False] / peaks[True]:.2f} |"
    )


def write_into_pages(folder: Path, rows: dict[str, str]) -> None:
    """Put the rows, by their first cells, in the place of those that pages quote."""
    for page in folder.glob("*.md"):
        lines = page.read_text(encoding="utf-8").split("\n")
        found = [next((new for first, new in rows.items() if line.startswith(first)), line) for line in lines]
        if found != lines:
            page.write_text("\n".join(found), encoding="utf-8")


def chosen(only: str | None) -> list[Measurement]:
    """The measurements asked for that this machine can make."""
    import torch

    found: list[Measurement] = []
    for name in MODULES:
        found += import_module(f"remedy_measurements.{name}").MEASUREMENTS
    kept = [one for one in found if only is None or only in one.remedy or only in one.what]
    for one in kept:
        if one.needs == "cuda" and not torch.cuda.is_available():
            print(f"{one.remedy}, {one.what}: needs a CUDA device; left out", file=sys.stderr)
    return [one for one in kept if one.needs != "cuda" or torch.cuda.is_available()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="WORD", help="measure those whose name or case holds this word")
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="processes of each program (default: 3)")
    parser.add_argument("--pages", action="store_true", help="write the rows into the pages that quote them")
    options = parser.parse_args(arguments)
    print("| Remedy | Case | without, ms | with, ms | ratio (95 % interval) | without, MiB | with, MiB | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    rows = {}
    for measurement in chosen(options.only):
        rows[case(measurement)] = found = row(measurement, options.rounds)
        print(found, flush=True)
    if options.pages:
        write_into_pages(Path(__file__).resolve().parent.parent / "docs" / "remedies", rows)


if __name__ == "__main__":
    main()
