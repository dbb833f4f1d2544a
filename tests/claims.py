"""Whether what a finding says follows from its evidence: each number and each qualifier of its sentences.

A number in a title, a basis or a remedy's text must be one of the finding's figures (or its saving, a share at a place,
or the number of steps), as printed, or a constant that the rule's page states. Some words are claims too: they need a
figure that bears them out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Figure, Finding
from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.view import View
from stepscope.report.words import headline

_NUMBER: Final = re.compile(
    r"(?<![\w.,/#<-])(?P<digits>\d+(?:,\d{3})*(?:\.\d+)?)(?:e(?P<power>[+-]\d+))?"
    r"(?: ?(?P<unit>%|ns|us|ms|s|[KMGT]i?B/s|[KMGT]i?B|bytes|days|hours|minutes|seconds)(?![\w/]))?"
    r"(?![\w-]|\.\w|,\d| bits?\b)"
)
"""A number that stands by itself: "16x64", "float16" and "Conv2d" are names."""
_SCALES: Final[Mapping[str, tuple[str, float]]] = {
    "%": ("share", 0.01),
    "ns": ("ns", 1.0), "us": ("ns", 1e3), "ms": ("ns", 1e6), "s": ("ns", 1e9),
    "seconds": ("ns", 1e9), "minutes": ("ns", 6e10), "hours": ("ns", 3.6e12), "days": ("ns", 8.64e13),
    "bytes": ("bytes", 1), "KiB": ("bytes", 2**10), "MiB": ("bytes", 2**20), "GiB": ("bytes", 2**30),
    "TiB": ("bytes", 2**40),
    "MB": ("bytes", 1e6), "GB": ("bytes", 1e9), "GB/s": ("bytes", 1e9),
}  # fmt: skip
"""Unit as printed -> unit of the figure, and its value in it."""
_NEVER: Final = re.compile(
    r"\b(?:None|nan|inf)\b|(?<![\d.,])0(?:\.0)? (?:times|[KMGT]iB|n?s|[um]s)\b|(?<![\d.])0 ?% of|\{"
)
"""Unknown values, nothing at all as if it were a cost, and templates that nobody filled."""
_QUOTED: Final = re.compile(r"because .*|\bdevice \d+|\brank \d+")
"""What torch itself says of a compilation, and names."""


@dataclass(frozen=True)
class _Qualifier:
    """A word that claims something, and what the figures must show for it."""

    word: re.Pattern[str]
    holds: Callable[[Finding], bool]


def _most(finding: Finding, name: str, least: float = 0.5) -> bool:
    return any(name in figure.name and figure.unit == "share" and figure.value > least for figure in _figures(finding))


def _qualifier(pattern: str, holds: Callable[[Finding], bool]) -> _Qualifier:
    return _Qualifier(re.compile(pattern), holds)


_QUALIFIERS: Final = (
    _qualifier(r"from or to pageable memory", lambda finding: _most(finding, "pageable")),
    _qualifier(r"memory is pinned already", lambda finding: not _most(finding, "pageable")),
    _qualifier(r"(?i)workers? can keep up with the computation(?! if)", lambda finding: any(
        figure.name == "processors the program may use" for figure in _figures(finding))),
    _qualifier(r"most of it (?:all-\w+|reduce\S*|broadcast|sends)", lambda finding: _most(
        finding, "share of the communication in")),
)  # fmt: skip


def unsupported(finding: Finding, rule: Rule, view: View | None = None) -> list[str]:
    """What a finding says without evidence, a phrase each; empty if all of it follows."""
    return [*_unsupported(finding, rule, view)]


def _unsupported(finding: Finding, rule: Rule, view: View | None) -> Iterator[str]:
    stated = {found["digits"] for found in _NUMBER.finditer(rule.page)}
    for said in (finding.title, finding.saving_basis, finding.remedy.text):
        text = _QUOTED.sub("", said)
        yield from (f"{found[0]!r} in {text!r}" for found in _NEVER.finditer(text))
        for found in _NUMBER.finditer(text):
            if found["digits"] not in stated and not any(
                _is_printed(found, known) for known in _known(finding, rule, view, _unit(found))
            ):
                yield f"{found[0]!r} in {text!r}"
        for qualifier in _QUALIFIERS:
            if (word := qualifier.word.search(text)) and not qualifier.holds(finding):
                yield f"{word[0]!r} in {text!r}"


def false_headline(diagnosis: Diagnosis, record: Mapping[str, Any]) -> list[str]:
    """What a report's first sentence says otherwise than its JSON record: numbers, causes and superlatives."""
    text = headline(diagnosis)
    wrong = [found[0] for found in _NEVER.finditer(text)] + re.findall(r"\d+ others", text)
    values = {unit: [*_values(record, unit)] for unit in ("share", "ns", "count")}
    for found in _NUMBER.finditer(_NAMES.sub("", text)):
        if not any(_is_printed(found, known) for known in values[_unit(found)]):
            wrong.append(found[0])
    superlative = _SUPERLATIVE.search(text)
    if superlative and not any(_is_first(rows, superlative) for rows in _accountings(record)):
        wrong.append(superlative[0])
    return wrong


_NAMES: Final = re.compile(r"\([^()]*[A-Za-z]{3}[^()]*\): |[Rr]ank \d+|[Dd]evice \w+")
_SUPERLATIVE: Final = re.compile(r"[Dd]evice (?P<device>\w+)(?: \([^)]*\))?, the (?P<which>busiest|most idle) of")


def _accountings(record: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    yield record["devices"]
    yield record.get("accounting", [])


def _is_first(rows: Sequence[Mapping[str, Any]], superlative: re.Match[str]) -> bool:
    """Whether the named device is the first of these by its busy time, or by its idle share."""
    by = {
        row["device"]: row["busy_ns"]
        if superlative["which"] == "busiest"
        else 1 - row["busy_ns"] / max(row["window_ns"], 1)
        for row in rows
    }
    return superlative["device"] in by and by[superlative["device"]] >= max(by.values())


def _values(record: Mapping[str, Any], unit: str) -> Iterator[float]:
    """The record's values of a unit, in devices' times, causes and steps."""
    for rows in _accountings(record):
        yield from (len(rows),) if unit == "count" else ()
        for row in rows:
            window = max(row["window_ns"], 1)
            times = [value for name, value in row.items() if name.endswith("_ns")] + [window - row["busy_ns"]]
            yield from times if unit == "ns" else [time / window for time in times] if unit == "share" else []
            yield from _of_causes(row.get("idle", []) if isinstance(row.get("idle"), list) else [], unit)
    yield from _of_causes(record["idle"], unit)
    yield from _of_causes(record["host"], unit)
    yield from _of_steps(record["steps"], unit)


def _of_causes(rows: Sequence[Mapping[str, Any]], unit: str) -> Iterator[float]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        if unit in row:
            sums[row.get("device", ""), row["cause"]] += row[unit]
    yield from sums.values()


def _of_steps(steps: Mapping[str, Any], unit: str) -> Iterator[float]:
    yield from (value for name, value in steps.items() if unit == "ns" and name.endswith("_ns") and value is not None)
    yield from (value for name, value in steps.items() if unit == "count" and isinstance(value, int))
    yield len(steps["list"]) if unit == "count" else 0


def _figures(finding: Finding) -> tuple[Figure, ...]:
    return finding.evidence.figures


def _unit(found: re.Match[str]) -> str:
    return _SCALES.get(found["unit"] or "", ("count", 1.0))[0]


def _is_printed(found: re.Match[str], known: float) -> bool:
    """Whether a value printed with as many digits is this number."""
    scale = _SCALES.get(found["unit"] or "", ("count", 1.0))[1] * 10.0 ** int(found["power"] or 0)
    digits = found["digits"].replace(",", "")
    unsure = 0.5001 * scale * 10.0 ** -len(digits.partition(".")[2])
    return abs(float(digits) * scale - known) <= unsure


def _known(finding: Finding, rule: Rule, view: View | None, unit: str) -> Iterator[float]:
    alike = {"count": ("count", "")}.get(unit, (unit,))
    for figure in _figures(finding):
        if figure.unit in alike:
            yield figure.value
            if figure.threshold is not None:
                yield figure.threshold
    if view is not None:
        yield from (rule.limits(view)[name] for name, limit in rule.thresholds.items() if limit.unit == unit)
    if unit == "share":
        yield finding.saving_share
        if view is not None:
            yield from (figure.value / view.step_ns for figure in _figures(finding) if figure.unit == "ns")
        yield from (place.share for place in finding.where)
    if unit == "ns":
        yield finding.saving_ns_per_step
    if unit == "count" and view is not None:
        yield view.step_count
