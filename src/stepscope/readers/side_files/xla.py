"""PyTorch/XLA's metrics reports: what `torch_xla.debug.metrics` prints, among whatever else a program prints."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Final

from stepscope.errors import UsageError
from stepscope.readers.side_files.text import LARGEST_COUNT, MOST_NAMES, lines
from stepscope.trace.evidence import CodePlace, Evidence, Fallback, Tally, Trigger

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
            known[name].append(min(int(text.strip()), LARGEST_COUNT))
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


_BLOCK: Final = re.compile(r"(?<!Post )(Compilation|Execution) Analysis: ?(.{0,4000})$")
_FRAME: Final = re.compile(r"^  (.{1,500}) \((.{1,1000}):(\d{1,9})\)$")
_FREQUENT: Final = re.compile(r"pt-xla-profiler: (\w{1,100}) too frequent: (\d{1,18}) counts during (\d{1,18}) steps")
_SLOW: Final = re.compile(r"pt-xla-profiler: (\w{1,100}) too slow: longest instance took ([\w.]{1,60}?)\.? ")
_NOT_LOWERED: Final = re.compile(r"pt-xla-profiler: Op\(s\) not lowered: (.{1,60000}?)(?:, *)?(?: Please open|$)")
_MOST_FRAMES: Final = 100


@dataclass(slots=True)
class _Open:
    """A block whose end has not come yet."""

    expects: str = ""
    cause: str = ""
    frames: list[CodePlace] = field(default_factory=list)


@dataclass(slots=True)
class _Log:
    triggers: dict[str, Counter[tuple[str, tuple[CodePlace, ...]]]] = field(
        default_factory=lambda: {"Compilation": Counter(), "Execution": Counter()}
    )
    blocks: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    steps: int | None = None
    not_lowered: dict[str, None] = field(default_factory=dict)


def read_xla_debug_log(path: str | Path) -> Evidence:
    """What the debugging output in a file says of the whole run.

    Raises:
        UsageError: there is none in it.
        TraceError: it cannot be read.
    """
    log, open_blocks = _Log(), {"Compilation": _Open(), "Execution": _Open()}
    for line in lines(path):
        if "Analysis:" in line and (block := _BLOCK.search(line)):
            _take_block(log, block[1], open_blocks[block[1]], block[2].rstrip())
        elif "pt-xla-profiler:" in line:
            _take_warning(log, line)
    if not log.blocks and not log.counts and not log.longest and not log.not_lowered:
        raise UsageError(
            f"{path} holds no debugging output of PyTorch/XLA: it has lines that begin with 'Compilation Analysis:' or "
            "'pt-xla-profiler:', and is printed where PT_XLA_DEBUG_LEVEL=2 is set"
        )
    return _debug_evidence(log, str(path))


def _take_block(log: _Log, kind: str, block: _Open, text: str) -> None:
    """One line of a block, without its prefix."""
    if text.startswith("---") or (text.startswith("===") and block.cause):
        triggers = log.triggers[kind]
        key = (block.cause, tuple(block.frames))
        if block.cause:
            log.blocks[kind] += 1
            if key in triggers or len(triggers) < MOST_NAMES:
                triggers[key] += 1
        block.expects, block.cause, block.frames = "", "", []
    elif text.endswith(" Cause"):
        block.expects = "cause"
    elif text.startswith("Python Frame"):
        block.expects = "frames"
    elif text and not text.startswith(" "):
        block.expects = ""
    elif block.expects == "cause" and text.strip():
        block.cause, block.expects = text.strip(), ""
    elif block.expects == "frames" and len(block.frames) < _MOST_FRAMES and (frame := _FRAME.match(text)):
        block.frames.append(CodePlace(frame[1], frame[2], int(frame[3])))


def _take_warning(log: _Log, line: str) -> None:
    """Counts only grow, so the last line of a kind tells most."""
    if match := _FREQUENT.search(line):
        if match[1] in log.counts or len(log.counts) < MOST_NAMES:
            log.counts[match[1]] = min(int(match[2]), LARGEST_COUNT)
        log.steps = min(int(match[3]), LARGEST_COUNT)
    elif match := _SLOW.search(line):
        time = duration_ns(match[2])
        if time is not None and len(log.longest) < MOST_NAMES:
            log.longest[match[1]] = max(time, log.longest.get(match[1], 0))
    elif match := _NOT_LOWERED.search(line):
        for name in match[1].split(","):
            if name.strip() and len(log.not_lowered) < MOST_NAMES:
                log.not_lowered[name.strip()] = None


def _debug_evidence(log: _Log, path: str) -> Evidence:
    out = log.counts.get("TransferFromDeviceTime", log.counts.get("TransferFromServerTime"))
    return Evidence(
        sources=(path,),
        steps=log.steps,
        compilations=_debug_tally(log, "CompileTime", log.blocks["Compilation"]),
        executions=_debug_tally(log, "ExecuteTime", log.blocks["Execution"]),
        transfers_out=Tally(out) if out is not None else None,
        fallbacks=tuple(Fallback(name) for name in sorted(log.not_lowered)),
        compile_triggers=_triggers(log, "Compilation"),
        execute_triggers=_triggers(log, "Execution"),
    )


def _debug_tally(log: _Log, name: str, blocks: int) -> Tally | None:
    count, longest = max(log.counts.get(name, 0), blocks), log.longest.get(name)
    return Tally(max(count, 1), None, longest) if count or longest is not None else None


def _triggers(log: _Log, kind: str) -> tuple[Trigger, ...]:
    return tuple(Trigger(cause, frames, count) for (cause, frames), count in log.triggers[kind].most_common())
