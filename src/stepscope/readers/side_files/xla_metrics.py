"""PyTorch/XLA's metrics reports: what `torch_xla.debug.metrics` prints, among whatever else a program prints."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Final

from stepscope.errors import UsageError
from stepscope.readers.side_files.text import LARGEST_COUNT, MOST_NAMES, lines
from stepscope.trace.evidence import Evidence, Fallback, Tally

_HEAD: Final = re.compile(r"^(Metric|Counter): (\S{1,200})\s*$")
_FIELD: Final = re.compile(r"^\s+(TotalSamples|Accumulator|Counter|Percentiles|Value): (.{1,2000})$")
_LONGEST: Final = re.compile(r"99%=(\S{1,60})")
_TIME: Final = re.compile(
    r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m(?!s))?(?:(\d{1,9})s)?(?:(\d{1,9})ms)?(\d{1,9}(?:\.\d{1,9})?)us"
)
_UNITS_US: Final = (86_400_000_000, 3_600_000_000, 60_000_000, 1_000_000, 1_000)
_SCALAR_READ: Final = "aten::_local_scalar_dense"
_TRANSFERS_OUT: Final = ("TransferFromDeviceTime", "TransferFromServerTime")


@dataclass(slots=True)
class _Report:
    """Every value of each name, in order; a program may print several reports."""

    counts: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    longest: dict[str, int] = field(default_factory=dict)
    counters: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


def read_xla_metrics(path: str | Path) -> Evidence:
    """What the reports in a file say of the whole run.

    Raises:
        UsageError: there is no report in it.
        TraceError: it cannot be read.
    """
    report = _Report()
    kind, name = "", ""
    for line in lines(path):
        if head := _HEAD.match(line):
            kind, name = head[1], head[2]
        elif not line.startswith(" "):
            name = ""
        elif name and (value := _FIELD.match(line)):
            _take(report, kind, name, value[1], value[2])
    if not report.counts and not report.counters:
        raise UsageError(
            f"{path} holds no metrics report of PyTorch/XLA: one has lines such as 'Metric: CompileTime', and is "
            "printed by torch_xla.debug.metrics.metrics_report()"
        )
    return _evidence(report, str(path))


def _take(report: _Report, kind: str, name: str, key: str, text: str) -> None:
    known = report.counters if kind == "Counter" else report.counts
    if name not in known and len(known) >= MOST_NAMES:
        return
    if key in ("TotalSamples", "Value"):
        if text.strip().isdecimal() and len(text) < 20:
            known[name].append(min(int(text), LARGEST_COUNT))
    elif key in ("Accumulator", "Counter"):
        time = duration_ns(text.strip())
        if time is not None:
            report.times[name].append(time)
    elif longest := _LONGEST.search(text):
        time = duration_ns(longest[1])
        if time is not None:
            report.longest[name] = max(report.longest.get(name, 0), time)


def duration_ns(text: str) -> int | None:
    """Nanoseconds of a time as the report spells it, such as "14s152ms226.398us"; None if it is none.

    The report rounds each part instead of cutting it off: 2.89 ms stand there as "003ms890.000us". A part that is
    followed by half of it or more was rounded up.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    rest = Fraction(match[6])
    for part, unit in zip(reversed(match.groups()[:5]), reversed(_UNITS_US), strict=True):
        if part is not None:
            rest += (int(part) - (1 if 2 * rest >= unit and int(part) > 0 else 0)) * unit
    return min(round(rest * 1000), LARGEST_COUNT)


def _total(values: list[int]) -> int:
    """The last of growing counts; where the program cleared them in between, the sum of what they had come to."""
    cleared = [before for before, after in pairwise(values) if after < before]
    return min(sum(cleared) + values[-1], LARGEST_COUNT)


def _evidence(report: _Report, path: str) -> Evidence:
    counters = {name: _total(values) for name, values in report.counters.items() if values}
    out = next((name for name in _TRANSFERS_OUT if report.counts.get(name)), "")
    fallbacks = [
        Fallback(name, count) for name, count in counters.items() if name.startswith("aten::") and name != _SCALAR_READ
    ]
    return Evidence(
        sources=(path,),
        steps=counters.get("MarkStep"),
        compilations=_tally(report, "CompileTime"),
        executions=_tally(report, "ExecuteTime"),
        transfers_out=_tally(report, out),
        scalar_reads=counters.get(_SCALAR_READ),
        cached=counters.get("CachedCompile"),
        missed=counters.get("UncachedCompile"),
        fallbacks=tuple(sorted(fallbacks, key=lambda each: (-(each.count or 0), each.operator))),
    )


def _tally(report: _Report, name: str) -> Tally | None:
    counts, times = report.counts.get(name), report.times.get(name)
    return Tally(_total(counts), _total(times) if times else None, report.longest.get(name)) if counts else None
