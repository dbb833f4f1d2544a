"""How much a step of each blind program gains without its fault, by the stopwatch.

    python -m tests.zoo.blind.gains [--only NAME ...] [--repeat 3]

Both variants run in turns, without a profiler, on one thread. A run counts with the mean of its steps after the first
WARMUP, so that what comes once in several steps is in it; a variant with the median of its runs. The gain is the one of
the time that the process was given on its processors, where other programs share the machine: the programs do all
their work in one thread, so that it is the time on a quiet machine. The clock's stands beside. Writes
gains.json beside this file, where programs that are not run keep what they have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from typing import Any, Final

from tests.zoo import measure
from tests.zoo.blind.registry import GAINS, NAMES, Gain, gains

WARMUP: Final = 8


def step_ns(name: str, mended: bool) -> tuple[float, float]:
    """A step of one run, by the clock and by the processors."""
    words = [sys.executable, "-m", "tests.zoo.blind.stopwatch", name, *(["--mended"] if mended else [])]
    lengths = json.loads(measure.output_of(words, measure.REPOSITORY).splitlines()[-1])
    return statistics.mean(lengths["wall"][WARMUP:]), statistics.mean(lengths["cpu"][WARMUP:])


def measured(name: str, repeat: int) -> Gain:
    """Both variants, in turns."""
    runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(repeat):
        for mended in (False, True) if number % 2 == 0 else (True, False):
            runs[mended].append(step_ns(name, mended))
    medians = {
        (mended, clock): statistics.median(run[clock] for run in own) / 1e6
        for mended, own in runs.items()
        for clock in (0, 1)
    }
    return Gain(
        fault_ms=round(medians[False, 0], 3),
        mended_ms=round(medians[True, 0], 3),
        fault_cpu_ms=round(medians[False, 1], 3),
        mended_cpu_ms=round(medians[True, 1], 3),
        runs=repeat,
        load=round(os.getloadavg()[0], 1),
    )


def written(found: dict[str, Gain]) -> None:
    """All gains, in the programs' order."""
    kept = gains() | found
    rows = {name: dataclasses.asdict(kept[name]) for name in NAMES if name in kept}
    GAINS.write_text(json.dumps(rows, indent=1) + "\n")


def told(name: str, gain: Gain) -> str:
    """One program in a line."""
    return (
        f"{name}: {gain.fault_cpu_ms:.1f} to {gain.mended_cpu_ms:.1f} ms, gains {gain.share:.1%} of the step "
        f"({gain.clock_share:.1%} by the clock), load {gain.load}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", choices=NAMES, help="may be repeated")
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="runs of each variant (default: 3)")
    options: Any = parser.parse_args()
    for name in options.only or NAMES:
        gain = measured(name, options.repeat)
        written({name: gain})
        print(told(name, gain), flush=True)


if __name__ == "__main__":
    main()
