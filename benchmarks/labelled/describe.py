"""Writes the tables of docs/labelled-trainings.md: programs, public traces, and what covers the published classes.

python benchmarks/labelled/describe.py
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks.labelled.judging import Answer, Truth, truths  # noqa: E402
from benchmarks.labelled.programs import Program, programs  # noqa: E402

PAGE: Final = Path(__file__).parents[2] / "docs" / "labelled-trainings.md"
TAXONOMY: Final = Path(__file__).with_name("taxonomy.toml")


class IssueClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of the published study, and what covers it here.

    Attributes:
        rules: that find such issues.
        kinds: of blind programs that have them.
        uncovered: why no rule finds them, or which part none finds.
    """

    dimension: str
    name: str
    issues: int
    what: str
    rules: Sequence[str]
    kinds: Sequence[str] = ()
    uncovered: str = ""

    def has(self, program: Program) -> bool:
        """Whether a program's fault is of this class."""
        return program.kind in self.kinds or any(rule in self.rules for rule in program.rules)


class Taxonomy(msgspec.Struct, frozen=True):
    """The classes of the study."""

    classes: Sequence[IssueClass]


def taxonomy() -> Sequence[IssueClass]:
    """The classes of the study, in its order."""
    return msgspec.toml.decode(TAXONOMY.read_bytes(), type=Taxonomy).classes


def coverage(classes: Sequence[IssueClass], known: Sequence[Program]) -> str:
    """Which class has a rule, which a program, and what is missing."""
    rows = ["| class | issues | rules | programs | not found |", "|---|---:|---|---|---|"]
    total = sum(each.issues for each in classes)
    for each in classes:
        counts = Counter(program.name.partition("/")[0] for program in known if each.has(program))
        cells = (
            f"{each.dimension}: {each.name}: {each.what}",
            f"{each.issues} ({each.issues / total:.1%})",
            ", ".join(f"[`{rule}`](rules/{rule}.md)" for rule in each.rules) or "-",
            ", ".join(f"{number} {group}" for group, number in counts.items()) or "-",
            each.uncovered or "-",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([_summary(classes, known), "", *rows])


def _summary(classes: Sequence[IssueClass], known: Sequence[Program]) -> str:
    total = sum(each.issues for each in classes)
    whole, part = (_issues(classes, in_part) for in_part in (False, True))
    outside = sum(not any(each.has(program) for each in classes) for program in known)
    return (
        f"Of {total} issues, {whole} ({whole / total:.1%}) are of classes with rules, {part} ({part / total:.1%}) of "
        f"classes that rules see in part, {total - whole - part} ({1 - (whole + part) / total:.1%}) of classes that no "
        f"trace of the steps shows. A rule for a class does not mean that each of its issues is found. {outside} of "
        f"{len(known)} programs have faults that the study does not list: avoidable work that keeps the device busy."
    )


def _issues(classes: Iterable[IssueClass], in_part: bool) -> int:
    return sum(each.issues for each in classes if each.rules and bool(each.uncovered) is in_part)


def of_programs(known: Sequence[Program]) -> str:
    """All programs: fault, place and measured gain."""
    rows = ["| program | planted | cause | place | gain |", "|---|---|---|---|---:|"]
    for one in known:
        cause = ", ".join(f"`{rule}`" for rule in one.rules) or f"`{one.kind}`"
        place = "marked lines" if one.is_at else "none"
        gain = "memory" if one.gain is None else f"{one.gain:.0%}"
        rows.append(f"| [{one.name}](../{one.file}) | {one.cause} | {cause} | {place} | {gain} |")
    return "\n".join(rows)


def of_traces(known: Sequence[Truth]) -> str:
    """All public traces: source, truth, and which answers are right."""
    rows = ["| trace | from | what is true | right first finding | promise |", "|---|---|---|---|---|"]
    for truth in known:
        names = "<br>".join(f"`{path}`" for path in truth.paths)
        promise = "-" if truth.saving is None else f"{truth.saving[0]:.0%} to {truth.saving[1]:.0%}"
        rows.append(f"| {names} | {truth.source} | {truth.truth} | {_right(truth)} | {promise} |".replace("\n", " "))
    return "\n".join(rows)


def _right(truth: Truth) -> str:
    if truth.refused:
        return "refused"
    answers = [*(["nothing promised"] if truth.quiet else []), *map(_named, truth.right)]
    accepted = [_named(answer) for answer in truth.defensible]
    return ", ".join(answers) + (f" (accepted: {', '.join(accepted)})" if accepted else "")


def _named(answer: Answer) -> str:
    if answer.quiet:
        return "silence that says why"
    return " or ".join(f"`{rule}`" for rule in answer.rules) or f"words like `{answer.says}`".replace("|", "\\|")


def sources() -> str:
    """Where the public traces can be had."""
    rows = ["| name | repository | most of them in | licence |", "|---|---|---|---|"]
    for name, source in truths().sources.items():
        folder = f"`{source.folder}`" if source.folder else "-"
        rows.append(f"| {name} | {source.url or '-'} | {folder} | {source.licence} |")
    return "\n".join(rows)


def described(page: str) -> str:
    """The page with its tables as they are today."""
    known = programs()
    parts = {
        "coverage": coverage(taxonomy(), known),
        "programs": of_programs(known),
        "traces": of_traces(truths().traces),
        "sources": sources(),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        page = re.sub(
            f"{begin}.*?{end}", lambda _, text=text, b=begin, e=end: f"{b}\n{text}\n{e}", page, flags=re.DOTALL
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(described(PAGE.read_text()))
