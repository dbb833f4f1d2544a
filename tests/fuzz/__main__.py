"""`python -m tests.fuzz`: tries damaged files of every format, and keeps small ones of those that show a fault."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.formats import FORMATS
from tests.fuzz.regressions import REGRESSIONS, kept, save, smaller
from tests.fuzz.workers import Job, Outcome, Team

MOST_OF_A_SIGNATURE = 3


def main(argv: list[str] | None = None) -> int:
    """Run, tell, and return 1 where there was any fault."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    names = [each.name for each in FORMATS]
    parser.add_argument("--seconds", metavar="N", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--inputs", metavar="N", type=int, help="at most so many inputs")
    parser.add_argument(
        "--format", metavar="F", action="append", choices=names, help=f"only this one: {', '.join(names)}"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another row of inputs (default: 0)")
    parser.add_argument(
        "--workers", metavar="N", type=int, default=os.cpu_count() or 1, help="processes (default: a core each)"
    )
    parser.add_argument("--replay", action="store_true", help="try the kept cases instead")
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, default=REGRESSIONS, help="where cases are kept that show a fault"
    )
    arguments = parser.parse_args(argv)
    chosen = arguments.format or names
    began = time.monotonic()
    jobs = replayed(chosen) if arguments.replay else counted(chosen, arguments.seed, arguments.inputs)
    if not arguments.replay:
        jobs = until(jobs, began + arguments.seconds)
    with Team(arguments.workers) as team:
        found = list(told(team.outcomes(jobs)))
        seconds = time.monotonic() - began
        report(found, seconds, arguments, team)
    return int(any(each.kind == "fault" for each in found))


def report(found: list[Outcome], seconds: float, arguments: argparse.Namespace, team: Team) -> None:
    """Print what became of the inputs, and keep a small case of each fault."""
    print(table(found))
    rate = len(found) / max(seconds, 1e-9)
    print(f"{len(found):,} inputs in {seconds:,.0f} seconds, {rate:.1f} a second, seed {arguments.seed}")
    faults = [each for each in found if each.kind == "fault"]
    for signature, several in by_signature(faults).items():
        first = min(several, key=lambda each: sum(map(len, each.case.files.values())) if each.case else 0)
        print(f"\n{signature}: {len(several)} times, first by {first.job.format} {first.job.number}\n{first.detail}")
        if not arguments.replay and first.case is not None:
            small = smaller(first, team)
            print(f"kept as {save(small, signature, arguments.keep)}")


def counted(chosen: list[str], seed: int, most: int | None) -> Iterator[Job]:
    """Inputs of all formats in turn, of costly ones in some rounds alone."""
    rounds = {each.name: each.rounds for each in FORMATS}
    jobs = (name for turn in itertools.count() for name in chosen if turn % rounds[name] == 0)
    for number, name in enumerate(itertools.islice(jobs, most)):
        yield Job(name, seed, number)


def until(jobs: Iterator[Job], end: float) -> Iterator[Job]:
    """The jobs that can begin before a time."""
    for job in jobs:
        if time.monotonic() >= end:
            return
        yield job


def replayed(chosen: list[str]) -> Iterator[Job]:
    """The kept cases, each given to the command that failed and examined in some other ways."""
    for form, _, case, command in kept():
        if form in chosen:
            yield from (Job(form, 0, turn, case, () if turn else command) for turn in range(8))


def told(found: Iterator[Outcome]) -> Iterator[Outcome]:
    """The same, with a line on a terminal of how far it is, and only a few faults of one signature with their files."""
    seen: Counter[str] = Counter()
    for number, outcome in enumerate(found, 1):
        if outcome.kind == "fault":
            seen[outcome.signature] += 1
            if seen[outcome.signature] > MOST_OF_A_SIGNATURE:
                outcome = Outcome(outcome.job, "fault", outcome.seconds, outcome.peak_bytes, outcome.signature)
        if sys.stderr.isatty() and number % 20 == 0:
            print(f"\r{number:,} inputs, {seen.total():,} faults of {len(seen)} kinds", end="", file=sys.stderr)
        yield outcome


def by_signature(faults: list[Outcome]) -> dict[str, list[Outcome]]:
    """The faults that still have their files first."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for fault in sorted(faults, key=lambda each: each.case is None):
        found[fault.signature].append(fault)
    return {name: [each for each in several if each.case] or several for name, several in found.items()}


def table(found: list[Outcome]) -> str:
    """What became of the inputs, format by format."""
    head = ("format", "inputs", "results", "refusals", "faults", "slowest", "biggest memory")
    rows = [head]
    for form in [*(each.name for each in FORMATS), "all"]:
        of_form = [each for each in found if form in (each.job.format, "all")]
        if of_form:
            kinds = Counter(each.kind for each in of_form)
            counts = [len(of_form), kinds["result"], kinds["refusal"], kinds["fault"]]
            slowest, biggest = max(each.seconds for each in of_form), max(each.peak_bytes for each in of_form)
            rows.append((form, *(f"{each:,}" for each in counts), f"{slowest:.2f} s", f"{biggest / 2**20:,.0f} MiB"))
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
