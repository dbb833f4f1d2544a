"""Scores any tool's answers about the set of labelled slow trainings.

    python benchmarks/labelled/score.py ANSWERS.json ...

An answers file is one JSON object. `tool` names the tool. `items` has what it says of each recording that it was given:
of "zoo/NAME/fault", "zoo/NAME/clean", the same of "simulated" and "blind" (programs.py), and of each path in
real_traces.toml. What a tool says is an object whose keys may all be left out:

    findings    most important first: `rule` (of stepscope; without it `words` decide, by causes.toml), `words`,
                `places` (each "file:line function"), `saving` (share of the step, 0 to 1), `advice`
    refused     why it read nothing
    step_ms     length of a step
    busy        busy share of each device
    matrix      share of matrix work in the busy time
    notes       other sentences

Printed is, for each group of the set: how many recordings were answered; how many first findings were right (or
defensible) and named the planted line; how far promises were from the measured gain; on how many clean twins something
of 5 % or more was said; for traces, on how many there are false alarms or figures that are off. What was not answered
counts as missed, but a group of which nothing was answered is left out. The last rows are those of a tool that says
nothing, which is right where nothing can be saved.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks.labelled.judging import PROMISES, Finding, Said, Truth, Verdict, judge, truths  # noqa: E402
from benchmarks.labelled.programs import TWINS, Program, programs  # noqa: E402

CAUSES: Final = Path(__file__).with_name("causes.toml")
CAUSES_KNOWN: Final = "public traces with a cause"
NOTHING_TO_SAVE: Final = "public traces with nothing to save"
NO_TRACES: Final = "no traces"
UNANSWERED: Final = Said(refused="not answered")


class Answers(msgspec.Struct, frozen=True):
    """What a tool says of the recordings of the set."""

    tool: str
    items: Mapping[str, Said] = {}


@dataclass(frozen=True)
class Row:
    """The score of a tool on one group of the set; None where a figure has no meaning.

    Attributes:
        first: first findings that are right or defensible.
        placed: of those whose place is known, first findings that name it.
        error: median distance of promise and gain, in points of the step.
        alarmed: of the answered clean twins, those with a finding of 5 % or more; of traces, those with a false alarm.
    """

    tool: str
    group: str
    count: int
    answered: int
    first: int
    placed: tuple[int, int] | None
    error: float | None
    alarmed: tuple[int, int]
    off: int | None


def understood(answers: Answers) -> Answers:
    """The answers with the rules that words stand for, where findings name no rule."""
    causes = msgspec.toml.decode(CAUSES.read_bytes(), type=dict[str, str])
    items = {
        name: msgspec.structs.replace(said, findings=[_meant(f, causes) for f in said.findings])
        for name, said in answers.items.items()
    }
    return Answers(answers.tool, items)


def _meant(finding: Finding, causes: Mapping[str, str]) -> Finding:
    if finding.rule:
        return finding
    means = tuple(rule for rule, words in causes.items() if re.search(words, finding.words))
    return msgspec.structs.replace(finding, means=means)


def scores(answers: Answers) -> Iterator[Row]:
    """A row for each group of the set."""
    known = understood(answers)
    groups: dict[str, list[Program]] = {}
    for program in programs():
        groups.setdefault(program.name.partition("/")[0], []).append(program)
    for group, members in groups.items():
        yield of_programs(known, group, members)
    by_path = truths().by_path()
    for group in (CAUSES_KNOWN, NOTHING_TO_SAVE, NO_TRACES):
        paths = [path for path, truth in by_path.items() if _group(truth) == group]
        yield of_traces(known, group, [_judged(known, path, by_path[path]) for path in paths])


def _group(truth: Truth) -> str:
    return NO_TRACES if truth.refused else NOTHING_TO_SAVE if truth.quiet else CAUSES_KNOWN


def _judged(answers: Answers, path: str, truth: Truth) -> Verdict:
    if path not in answers.items:
        return Verdict(path, "missed", "not answered")
    return judge(path, truth, answers.items[path])


def silence() -> Answers:
    """The answers of a tool that reads everything and says nothing."""
    twins = [f"{program.name}/{twin}" for program in programs() for twin in TWINS]
    return Answers("silence", dict.fromkeys([*twins, *truths().by_path()], Said()))


def _said(answers: Answers, item: str) -> Said:
    return answers.items.get(item, UNANSWERED)


def of_programs(answers: Answers, group: str, members: Sequence[Program]) -> Row:
    """The score on programs with planted faults."""
    firsts = [(one, next(iter(_said(answers, f"{one.name}/fault").findings), None)) for one in members]
    errors = [abs(first.saving - one.gain) for one, first in firsts if _is_promise(one, first)]
    placed = [(one, first) for one, first in firsts if one.is_at is not None]
    clean = [said for one in members if (said := _said(answers, f"{one.name}/clean")).refused is None]
    return Row(
        answers.tool,
        group,
        len(members),
        sum(_said(answers, f"{one.name}/fault").refused is None for one in members),
        sum(first is not None and is_cause(one, first) for one, first in firsts),
        (sum(first is not None and at_fault(one, first) for one, first in placed), len(placed)) if placed else None,
        statistics.median(errors) if errors else None,
        (sum(map(_promises, clean)), len(clean)),
        None,
    )


def _is_promise(program: Program, first: Finding | None) -> bool:
    return first is not None and first.saving is not None and program.gain is not None and is_cause(program, first)


def _promises(said: Said) -> bool:
    return any((finding.saving or 0.0) >= PROMISES for finding in said.findings)


def is_cause(program: Program, finding: Finding) -> bool:
    """Whether a finding is the planted fault: by its rule, or of a blind program by its place."""
    return finding.names(program.rules) if program.rules else at_fault(program, finding)


def at_fault(program: Program, finding: Finding) -> bool:
    """Whether the first place of a finding is the fault's."""
    place = re.match(r"(.+):(\d+)", finding.places[0]) if finding.places else None
    return place is not None and program.is_at is not None and program.is_at(place[1], int(place[2]))


def of_traces(answers: Answers, group: str, judged: Sequence[Verdict]) -> Row:
    """The score on public traces."""
    return Row(
        answers.tool,
        group,
        len(judged),
        answered := sum(each.path in answers.items for each in judged),
        sum(each.first in ("right", "defensible") for each in judged),
        None,
        None,
        (sum(bool(each.alarms) for each in judged), answered),
        sum(bool(each.figures) for each in judged),
    )


def table(rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown."""
    lines = [
        "| tool | group | recordings | answered | first finding right | line named | promise off by (median) "
        "| with false alarms | with figures off |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        placed = "-" if row.placed is None else _of(row.placed)
        error = "-" if row.error is None else f"{100 * row.error:.1f} points"
        first = f"{row.first} ({row.first / row.count:.0%})"
        cells = (
            row.tool,
            row.group,
            row.count,
            row.answered,
            first,
            placed,
            error,
            _of(row.alarmed),
            "-" if row.off is None else row.off,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _of(part: tuple[int, int]) -> str:
    return f"{part[0]}/{part[1]}"


def main() -> None:
    """Read the answers and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="+", metavar="ANSWERS.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for path in arguments.answers:
        try:
            rows.extend(row for row in scores(msgspec.json.decode(path.read_bytes(), type=Answers)) if row.answered)
        except msgspec.MsgspecError as error:
            parser.error(f"{path} is no file of answers: {error}")
    print(table([*rows, *(row for row in scores(silence()) if row.group in {each.group for each in rows})]))


if __name__ == "__main__":
    main()
