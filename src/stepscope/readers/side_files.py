"""Read files that a run writes beside its trace: framework counters and logs, and measurements by Nsight Compute."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import polars as pl

from stepscope.errors import NotATraceError, UnreadableTraceError, UsageError
from stepscope.readers.source import ByteSource
from stepscope.trace.metadata import WARM_UP_STEPS, CodePlace, Fallback, RunCounts, Tally, Trigger
from stepscope.trace.tables import rows_frame

LONGEST_LINE: Final = 2**16
"""Maximum bytes of a line; longer lines are split."""
MOST_NAMES: Final = 10_000
"""Maximum distinct names of metrics, operators or stacks kept per file; later ones are dropped."""
LARGEST_COUNT: Final = 2**62


def lines(path: str | Path, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yield the lines without their ends, from the first text on; invalid UTF-8 is replaced.

    Args:
        longest: bytes after which a line is split.

    Raises NotATraceError if the file is empty, UnreadableTraceError if it cannot be read.
    """
    source = ByteSource(path)
    try:
        rest, some = b"", False
        for block in source.text_blocks():
            some = True
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield from _pieces(line, longest)
            while len(rest) > longest:
                yield rest[:longest].decode("utf-8", "replace")
                rest = rest[longest:]
        if source.damage and not some:
            raise UnreadableTraceError(f"{source.name} cannot be unpacked: {source.damage}")
        yield from _pieces(rest, longest)
    finally:
        source.close()


def _pieces(line: bytes, longest: int) -> Iterator[str]:
    for first in range(0, len(line), longest):
        yield line[first : first + longest].decode("utf-8", "replace").rstrip("\r")


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


def read_xla_metrics(path: str | Path) -> RunCounts:
    """Return the run's counts from the metrics reports in a file.

    Raises UsageError if there is no report, TraceError if the file is unreadable.
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
            f"{path} contains no metrics report of PyTorch/XLA, which has lines such as 'Metric: CompileTime', and is "
            "printed by torch_xla.debug.metrics.metrics_report()"
        )
    return _of_metrics_report(report, str(path))


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
    """Parse a duration such as "14s152ms226.398us" to nanoseconds; None for other text.

    The report rounds each part instead of truncating it: 2.89 ms are "003ms890.000us". A part followed by half of its
    unit or more was therefore rounded up.
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
    """The last of the growing counts, plus the values reached before each time the program cleared them."""
    cleared = [before for before, after in pairwise(values) if after < before]
    return min(sum(cleared) + values[-1], LARGEST_COUNT)


def _of_metrics_report(report: _Report, path: str) -> RunCounts:
    counters = {name: _total(values) for name, values in report.counters.items() if values}
    out = next((name for name in _TRANSFERS_OUT if report.counts.get(name)), "")
    fallbacks = [
        Fallback(name, count) for name, count in counters.items() if name.startswith("aten::") and name != _SCALAR_READ
    ]
    return RunCounts(
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


def read_xla_debug_log(path: str | Path) -> RunCounts:
    """Return the run's counts from debug output.

    Raises UsageError if there is no debug output, TraceError if the file is unreadable.
    """
    log, open_blocks = _Log(), {"Compilation": _Open(), "Execution": _Open()}
    for line in lines(path):
        if "Analysis:" in line and (block := _BLOCK.search(line)):
            _take_block(log, block[1], open_blocks[block[1]], block[2].rstrip())
        elif "pt-xla-profiler:" in line:
            _take_warning(log, line)
    if not log.blocks and not log.counts and not log.longest and not log.not_lowered:
        raise UsageError(
            f"{path} contains no debugging output of PyTorch/XLA, which has lines that begin with "
            "'Compilation Analysis:' or 'pt-xla-profiler:', and is printed if PT_XLA_DEBUG_LEVEL=2 is set"
        )
    return _of_debug_log(log, str(path))


def _take_block(log: _Log, kind: str, block: _Open, text: str) -> None:
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
    """Counts only grow, so the last line of a kind wins."""
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


def _of_debug_log(log: _Log, path: str) -> RunCounts:
    out = log.counts.get("TransferFromDeviceTime", log.counts.get("TransferFromServerTime"))
    return RunCounts(
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


_MOST_CHARACTERS: Final = 64 * 2**20
"""Maximum file size, reached by a program that writes its counts on every step for days."""
_LONGEST_NAME: Final = 200
_DECODER: Final = json.JSONDecoder()
_BETWEEN: Final = re.compile(r"[\s,\]]*")
_RANK: Final = re.compile(r"-rank(\d{1,6})(?=\.|$)")


class _Counts:
    """Cumulative counts that include what was counted before each reset."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def take(self, key: str, value: Any) -> int | None:
        """Add a value and return the total for `key`; a value that is not a number is ignored."""
        number = _number(value)
        if number is None or (key not in self._last and len(self._last) >= MOST_NAMES):
            return self.total(key)
        if number < self._last.get(key, 0):
            self._before[key] = self._before.get(key, 0) + self._last[key]
        self._last[key] = number
        return self.total(key)

    def total(self, key: str) -> int | None:
        return min(self._before.get(key, 0) + self._last[key], LARGEST_COUNT) if key in self._last else None


def read_gaudi_metrics(path: str | Path) -> RunCounts:
    """Return the run's final counts from a metrics file; a killed run leaves the array open, which is accepted.

    Raises UsageError if it is not a metrics file, TraceError if the file is unreadable.
    """
    counts, operators = _Counts(), _Counts()
    names: dict[str, None] = {}
    steps, at_warm_up, found = 0, None, False
    for entry in _entries(_text(path)):
        name, statistics = entry.get("metric_name"), entry.get("statistics")
        if not isinstance(name, str) or not isinstance(statistics, dict):
            continue
        found = True
        for key in ("TotalNumber", "TotalTime", "TotalHit", "TotalMiss"):
            counts.take(f"{name}.{key}", statistics.get(key))
        if name == "graph_compilation" and entry.get("triggered_by") == "mark_step":
            steps += 1
            at_warm_up = counts.total("graph_compilation.TotalNumber") if steps == WARM_UP_STEPS else at_warm_up
        fallbacks = statistics.get("FallbackOps")
        for operator, count in fallbacks.items() if isinstance(fallbacks, dict) else ():
            if len(names) < MOST_NAMES or operator in names:
                names[operator] = None
                operators.take(operator, count)
    if not found:
        raise UsageError(
            f"{path} is not a metrics file of Intel Gaudi, which is a JSON array of objects with metric_name and "
            "statistics that a program writes if PT_HPU_METRICS_FILE is set"
        )
    return _of_gaudi_metrics(str(path), counts, operators, names, steps, at_warm_up)


def rank_in_name(path: str | Path) -> int | None:
    """Return the rank at the end of a metrics file's name, as in metrics-rank3.json; None if absent."""
    match = _RANK.search(Path(path).name)
    return int(match[1]) if match else None


def _text(path: str | Path) -> str:
    parts, size = [], 0
    for line in lines(path):
        size += len(line) + 1
        if size > _MOST_CHARACTERS:
            raise UsageError(
                f"{path} is not read: it is longer than {_MOST_CHARACTERS >> 20} MiB, too long for a metrics file"
            )
        parts.append(line)
    return "\n".join(parts)


def _entries(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of the array until it ends or is damaged."""
    position = text.find("[") + 1
    if position == 0 or text[: position - 1].strip():
        return
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text):
            return
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            yield value


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LARGEST_COUNT:
        return None
    return int(value)


def _of_gaudi_metrics(
    path: str, counts: _Counts, operators: _Counts, names: dict[str, None], steps: int, at_warm_up: int | None
) -> RunCounts:
    compiled = counts.total("graph_compilation.TotalNumber")
    time_us = counts.total("graph_compilation.TotalTime")
    fallbacks = [Fallback(_qualified(name), operators.total(name)) for name in names]
    return RunCounts(
        sources=(path,),
        steps=steps or None,
        compilations=None
        if compiled is None
        else Tally(compiled, None if time_us is None else min(time_us * 1000, LARGEST_COUNT)),
        late_compilations=None if at_warm_up is None or compiled is None else compiled - at_warm_up,
        cached=counts.total("recipe_cache.TotalHit"),
        missed=counts.total("recipe_cache.TotalMiss"),
        fallbacks=tuple(sorted(fallbacks, key=lambda each: (-(each.count or 0), each.operator))),
    )


def _qualified(name: str) -> str:
    """The operator's name with its namespace, truncated, and valid UTF-8."""
    name = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()
    return name if "::" in name else f"aten::{name}"


_CALL: Final = re.compile(r"CPU fallback (?:for )?([\w:.]{1,200})\s*:?\s*(.{0,1000})")
_TABLE: Final = "Frequency of op and op name that were executed on CPU"
_ROW: Final = re.compile(r"^\s*(\d{1,18})\s+([\w:.]{1,200})\s*$")
_LONGEST_TYPES: Final = 200


def read_fallback_log(path: str | Path) -> RunCounts:
    """Return which operators ran on the CPU, how often, and with which input types.

    Calls are logged one by one, and in a table when the process ends; the table takes precedence.

    Raises UsageError if there is no such log, TraceError if the file is unreadable.
    """
    calls: Counter[str] = Counter()
    types: dict[str, str] = {}
    table: dict[str, int] = {}
    in_table = False
    for line in lines(path):
        if _TABLE in line:
            in_table = True
        elif in_table and (row := _ROW.match(line)):
            name = _qualified(row[2])
            if name in table or len(table) < MOST_NAMES:
                table[name] = max(min(int(row[1]), LARGEST_COUNT), table.get(name, 0))
        elif call := _CALL.search(line):
            name = _qualified(call[1])
            if name in calls or len(calls) < MOST_NAMES:
                calls[name] += 1
                if call[2]:
                    types.setdefault(name, call[2].strip()[:_LONGEST_TYPES])
        elif in_table and line.strip() and not line.startswith("("):
            in_table = False
    if not calls and not table:
        raise UsageError(
            f"{path} contains no log of operators on the CPU, which has lines that begin with 'CPU fallback' that Intel"
            " Gaudi's PyTorch prints if LOG_LEVEL_PT_FALLBACK=1 is set"
        )
    counts = {**calls, **table}
    found = [Fallback(name, count, types.get(name)) for name, count in counts.items()]
    return RunCounts(
        sources=(str(path),), fallbacks=tuple(sorted(found, key=lambda each: (-(each.count or 0), each.operator)))
    )


MOST_LAUNCHES: Final = 1_000_000
_LONGEST_LINE: Final = 2**24
COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "sm_throughput": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "Compute (SM) Throughput",
        "Compute (SM) [%]",
        "SM [%]",
    ),
    "memory_throughput": (
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "Memory Throughput",
        "Memory [%]",
    ),
    "dram_throughput": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "DRAM Throughput",
    ),
    "achieved_occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
}
"""Column -> metrics for it, in percent; the first one in the file is used."""
SCHEMA: Final = {"name": pl.String, "grid": pl.String, "block": pl.String, **dict.fromkeys(COUNTERS, pl.Float64)}
_RANKS: Final = {metric: (column, rank) for column, metrics in COUNTERS.items() for rank, metric in enumerate(metrics)}
_PERCENT: Final = ("%", "")
_HEADER: Final = re.compile(r'^"?ID"?,.*"?Kernel Name"?', re.IGNORECASE)
_EXPORT: Final = "write one with ncu --csv --page raw, or ncu --import REPORT.ncu-rep --csv --page raw"


def read_ncu(path: str | Path) -> pl.DataFrame:
    """Return the launches measured by Nsight Compute, in order.

    Returns:
        name, grid and block ("x,y,z"), and the columns of COUNTERS as a share of the peak (0 to 1), null if not
        measured.

    Raises:
        NotATraceError: the file is not such a CSV, or has no launch.
        UnreadableTraceError: the file cannot be opened.
    """
    source = ByteSource(path)
    try:
        rows = csv.reader(_from_header(source))
        header = next(rows, None)
        if header is None:
            raise NotATraceError(f"{source.name} is not a CSV of Nsight Compute (it has no header line): {_EXPORT}")
        is_long = "Metric Name" in header
        launches = _launches_of_details(rows, header) if is_long else _launches_of_raw_page(rows, header)
    except csv.Error as error:
        raise NotATraceError(f"{source.name} is not a readable CSV of Nsight Compute ({error}): {_EXPORT}") from None
    finally:
        source.close()
    if not launches:
        raise NotATraceError(f"{source.name} is a CSV of Nsight Compute without a single kernel: {_EXPORT}")
    return rows_frame(launches, SCHEMA)


def _from_header(source: ByteSource) -> Iterator[str]:
    """Yield the lines from the CSV header on, without the output of the program and of ncu."""
    started = False
    for line in _lines(source):
        started = started or _HEADER.match(line) is not None
        if started and not line.startswith("=="):
            yield line


def _lines(source: ByteSource) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for block in source.text_blocks():
        *whole, rest = (rest + decoder.decode(block)).split("\n")
        yield from whole
        if len(rest) > _LONGEST_LINE:
            raise NotATraceError(
                f"{source.name} has a line of more than {_LONGEST_LINE >> 20} MiB, too long for a CSV of ncu"
            )
    if rest:
        yield rest


Launch = list["str | float | None"]


def _launches_of_details(rows: Iterator[list[str]], header: list[str]) -> list[Launch]:
    """The details page has a line for each metric of each launch."""
    place = {name: number for number, name in enumerate(header)}
    found: dict[tuple[str, str], tuple[Launch, dict[str, int]]] = {}
    for row in rows:
        if len(row) < len(header) - 6:  # the trailing rule columns may be missing
            continue
        cell = {name: row[number] if number < len(row) else "" for name, number in place.items()}
        key = (cell.get("Process ID", ""), cell["ID"])
        if key not in found:
            if len(found) >= MOST_LAUNCHES or not cell["ID"].strip():
                continue
            found[key] = _launch(cell), {}
        launch, ranks = found[key]
        if cell.get("Metric Unit", "") in _PERCENT:
            _set(launch, ranks, cell["Metric Name"], cell.get("Metric Value", ""))
    return [launch for launch, _ in found.values()]


def _launches_of_raw_page(rows: Iterator[list[str]], header: list[str]) -> list[Launch]:
    """The raw page has a line for each launch, below a line with the units."""
    found: list[Launch] = []
    for row in rows:
        cell = dict(zip(header, row, strict=False))
        if not cell.get("ID", "").strip() or not cell.get("Kernel Name") or len(found) >= MOST_LAUNCHES:
            continue
        launch, ranks = _launch(cell), dict[str, int]()
        for name, value in cell.items():
            _set(launch, ranks, name, value)
        found.append(launch)
    return found


def _launch(cell: dict[str, str]) -> Launch:
    return [
        cell.get("Kernel Name", ""),
        _sizes(cell.get("Grid Size", "") or cell.get("launch__grid_dim", "")),
        _sizes(cell.get("Block Size", "") or cell.get("launch__block_dim", "")),
        *(None for _ in COUNTERS),
    ]


def _set(launch: Launch, ranks: dict[str, int], metric: str, value: str) -> None:
    known = _RANKS.get(metric.strip())
    if known is None:
        return
    column, rank = known
    number = _figure(value)
    if number is not None and rank < ranks.get(column, len(_RANKS)):
        ranks[column] = rank
        launch[list(SCHEMA).index(column)] = number / 100


def _sizes(text: str) -> str | None:
    numbers = re.findall(r"\d{1,10}", text)
    return ",".join(numbers) if len(numbers) == 3 else None


def _figure(text: str) -> float | None:
    """Parse a value such as "1,234.5"; None for "n/a" and for values that are not a share of a peak."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if 0 <= number <= 1000 else None
