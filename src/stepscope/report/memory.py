"""Report what a device's memory was used for: as text, as JSON, and as a chart over time with steps and the peak."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import polars as pl

from stepscope.analysis.blocks import CATEGORIES
from stepscope.analysis.memory import DeviceMemory, MemorySummary
from stepscope.analysis.telemetry import PlotLine, TelemetryPicture, TelemetryPlot
from stepscope.report.document import Block, Document, Facts, Group, Section, Table, Text, fields, stamped
from stepscope.report.format import cell, clock, count, duration, share, size
from stepscope.report.html import TemplateVariables, script_json

_NO_ADDRESSES: Final = (
    "The events have no addresses, like those of older profilers: how long each block lived, and what was alive at the "
    "peak, is unknown."
)


def memory_document(summaries: Sequence[MemorySummary]) -> Document:
    """Report each device: its numbers, what was alive at the peak, and what allocated."""
    groups = (Group(device_name(each), tuple(_device(each)), f"d{place}") for place, each in enumerate(summaries))
    return Document("memory", tuple(groups))


def _device(summary: MemorySummary) -> Iterator[Block]:
    yield Facts(tuple(facts(summary)))
    if not summary.addressed:
        yield Text(_NO_ADDRESSES)
        return
    categories = summary.categories
    meaning = pl.col("category").replace_strict(CATEGORIES, default="")
    yield Section("Alive at the peak, by category", (Table(categories.with_columns(meaning=meaning)),))
    yield _section("By line", summary.lines, "file", "(no line of yours)", "lines")
    if summary.modules.height > 1 or summary.modules["module"].null_count() == 0:
        yield _section("By module", summary.modules, "module", "(outside of modules)", "modules")
    if summary.operators["operator_name"].null_count() < summary.operators.height:
        steps = " in the steps" if summary.memory.steps.height else ""
        title = f"Allocated{steps}, by operator"
        yield _section(title, summary.operators, "operator_name", "(no operator)", "operators")


def fit_document(
    memories: Sequence[DeviceMemory], tables: Sequence[pl.DataFrame], limits: Sequence[int | None]
) -> Document:
    """Report which changes make each device's allocations fit; tables as from `fit_table`."""
    groups = [
        Group(f"Device {memory.device}", tuple(_fits(memory, table, limit)), f"d{place}")
        for place, (memory, table, limit) in enumerate(zip(memories, tables, limits, strict=True))
    ]
    return Document("memory", tuple(groups))


def _fits(memory: DeviceMemory, table: pl.DataFrame, limit: int | None) -> Iterator[Block]:
    recorded = f"{size(memory.peak_bytes)} allocated at the peak"
    if memory.reserved_bytes is not None:
        recorded += f", {size(memory.reserved_bytes)} reserved"
    yield Facts(
        (
            ("recorded", recorded),
            ("available", "unknown: --memory-limit says it" if limit is None else size(limit)),
            ("replayed", "with one stream, and nothing in the allocator's cache at first"),
        )
    )
    rows = table.select(
        change=pl.Series([_change(row) for row in table.iter_rows(named=True)]),
        fits="fits",
        peak_bytes=pl.when(pl.col("failed_bytes").is_null()).then("peak_bytes"),  # a failed run had no peak yet
        reserved_bytes=pl.when(pl.col("failed_bytes").is_null()).then("reserved_bytes"),
        added_per_step_ns="added_per_step_ns",
        fails=pl.Series([_failure(row) for row in table.iter_rows(named=True)], dtype=pl.String),
    )
    yield Section("Would it fit?", (Table(rows, wide_only=("reserved_bytes", "added_per_step_ns")),))


def _change(row: Mapping[str, Any]) -> str:
    parts = []
    if row["batch_factor"] != 1:
        parts.append(f"batch times {count(row['batch_factor'])}")
    modules = row["checkpointed"]
    if modules:
        others = f" and {count(len(modules) - 1)} more" if len(modules) > 1 else ""
        parts.append(f"checkpoint {modules[0]}{others}")
    if row["expandable"]:
        parts.append("expandable segments")
    return ", ".join(parts) or "as recorded"


def _failure(row: Mapping[str, Any]) -> str | None:
    if row["failed_bytes"] is None:
        return None
    place = f"{row['file']}:{row['line']}" if row["file"] else row["module"]
    where = f" at {place}" if place else ""
    return f"{size(row['failed_bytes'])}{where}, with {size(row['peak_bytes'])} in use"


def _section(title: str, frame: pl.DataFrame, column: str, nothing: str, things: str) -> Section:
    return Section(title, (Table(frame.with_columns(pl.col(column).fill_null(nothing)), things),))


def device_name(summary: MemorySummary) -> str:
    """Name the device, such as "Device 0 (NVIDIA H100)"."""
    device = summary.memory.device
    if device == "cpu":
        return "The host's memory"
    return f"Device {device}" + (f" ({summary.name})" if summary.name else "")


def facts(summary: MemorySummary) -> Iterator[tuple[str, str]]:
    """Key numbers with their labels."""
    memory = summary.memory
    step = f", in step {summary.peak_step}" if summary.peak_step is not None else ""
    yield "peak", f"{size(memory.peak_bytes)} allocated at {cell('start_ns', memory.peak_ns)}{step}"
    if memory.reserved_bytes is not None:
        of = ""
        if memory.capacity_bytes:
            part = memory.reserved_bytes / memory.capacity_bytes
            of = f", {share(part)} of the device's {size(memory.capacity_bytes)}"
        yield "reserved", f"{size(memory.reserved_bytes)} at most{of}"
    if memory.fragmentation_bytes is not None and memory.fragmentation_share is not None:
        unused = f"{size(memory.fragmentation_bytes)} of the reserved memory at the peak"
        yield "unused", f"{unused} ({share(memory.fragmentation_share)})"
    yield "growth", _growth(summary)
    if summary.allocator.height:
        calls = float(summary.allocator["calls_per_step"].sum())
        time = int(summary.allocator["ns_per_step"].sum())
        per = ("per step" if memory.steps.height else "in all") + (f", {duration(time)}" if time else "")
        yield "driver", f"{count(calls)} calls for memory {per}: {_names(summary.allocator)}"
    for row in summary.failures.iter_rows(named=True):
        free = "" if row["free_bytes"] is None else f", {size(row['free_bytes'])} were free"
        where = "" if row["file"] is None else f" at {row['file']}:{row['line']}"
        yield "failed", f"{size(row['asked_bytes'])} asked for{where}{free}, {cell('start_ns', row['start_ns'])}"
    if memory.contradiction is not None:
        allocated, reserved = map(size, memory.contradiction)
        yield (
            "totals",
            f"not used: the recording says that {allocated} were in use when {reserved} were reserved, but only "
            "reserved memory can be in use; the levels here are added up from single allocations",
        )
    if not memory.is_total:
        yield "counted", "what was allocated since the recording began; what was there before is unknown"


def _growth(summary: MemorySummary) -> str:
    growth = summary.growth
    if growth is None:
        return "unknown: it takes two complete steps"
    steps = len(growth.level_bytes)
    if growth.leak_bytes:
        return f"every step leaves {size(growth.leak_bytes)} behind, over {steps} steps"
    if growth.slope_bytes > 0:
        return f"{size(growth.slope_bytes)} per step over {steps} steps, but not in every step"
    return f"none over {steps} steps"


def _names(allocator: pl.DataFrame) -> str:
    rows = allocator.head(4).select("name", "calls").iter_rows()
    return ", ".join(f"{name} {count(calls)} times" for name, calls in rows)


def memory_json(summaries: Sequence[MemorySummary]) -> dict[str, Any]:
    """One entry per device, numbers in bytes and nanoseconds."""
    return stamped(devices=[_device_json(summary) for summary in summaries])


def fit_json(
    memories: Sequence[DeviceMemory], tables: Sequence[pl.DataFrame], limits: Sequence[int | None]
) -> dict[str, Any]:
    """One entry per device: what was recorded, the limit in bytes, and the rows of `fit_table`."""
    return stamped(
        devices=[
            {
                **fields(memory, "device", "capacity_bytes", "peak_bytes", "reserved_bytes"),
                "limit_bytes": limit,
                "changes": table,
            }
            for memory, table, limit in zip(memories, tables, limits, strict=True)
        ]
    )


def _device_json(summary: MemorySummary) -> dict[str, Any]:
    memory, growth = summary.memory, summary.growth
    return {
        **fields(memory, "device", "capacity_bytes", "reserved_bytes"),
        "peak": {"start_ns": memory.peak_ns, "bytes": memory.peak_bytes, "step": summary.peak_step},
        "contradiction": None
        if memory.contradiction is None
        else dict(zip(("allocated_bytes", "reserved_bytes"), memory.contradiction, strict=True)),
        "unused_reserved_bytes": memory.fragmentation_bytes,
        "unused_reserved_share": memory.fragmentation_share,
        "growth": None
        if growth is None
        else {
            "bytes_per_step": growth.leak_bytes,
            "slope_bytes": growth.slope_bytes,
            "level_bytes": growth.level_bytes.tolist(),
            "accumulated": growth.accumulated,
        },
        **fields(summary, "name", "categories", "lines", "modules", "operators", "allocator"),
        "out_of_memory": summary.failures,
    }


_WIDTH: Final = 1000
_HEIGHT: Final = 300
NAMED_LINES: Final = 8
"""More lines are thin and grey, since more colours cannot be told apart."""

_SHORT_UNIT: Final = 5
"""Longer units are written only with the last value."""
_LARGEST: Final = 1e300
"""Larger values are drawn outside, since their difference could overflow."""
_FROM_ZERO: Final = ("share", "bytes", "bytes/s", "cores", "W", "MHz")


def telemetry_view(picture: TelemetryPicture) -> TemplateVariables:
    """Telemetry plots by group, marks of the trace's time, and sentences."""
    whole = max(picture.duration_s, 1e-9)
    groups = [
        {"title": title, "plots": [_plot(plot, whole) for plot in plots]}
        for title, plots in groupby(picture.plots, key=lambda plot: plot.group)
    ]
    left_out = picture.plots_left_out
    return {
        "groups": groups,
        "length": clock(picture.duration_s),
        "recorded": None if picture.recorded_s is None else _band(picture.recorded_s, whole),
        "left_out": f"showing {len(picture.plots)} of {len(picture.plots) + left_out} plots" if left_out else "",
        "notes": list(picture.notes),
    }


def _band(recorded_s: tuple[float, float], whole: float) -> TemplateVariables:
    left, right = (min(max(each / whole, 0), 1) * 100 for each in recorded_s)
    return {"left": left, "width": max(right - left, 0), "time": duration((recorded_s[1] - recorded_s[0]) * 1e9)}


def _plot(plot: TelemetryPlot, whole: float) -> TemplateVariables:
    ticks = _ticks(plot)
    unit = plot.unit if len(plot.unit) <= _SHORT_UNIT or plot.unit in _FROM_ZERO else ""
    drawn = [_telemetry_drawn(line, whole, ticks[0], ticks[-1]) for line in plot.lines]
    sentences = []
    if len(plot.lines) > NAMED_LINES:
        sentences.append(f"in colour the {NAMED_LINES} lines with the largest values, {len(plot.lines)} in all")
    if plot.left_out:
        sentences.append(f"{plot.left_out} more are not drawn")
    data = {"seconds": whole, "unit": plot.unit, "lines": [_telemetry_data(line, plot.unit) for line in plot.lines]}
    return {
        "title": plot.title,
        "ticks": [_value(each, unit) for each in reversed(ticks)],
        "lines": drawn,
        "legend": [
            {"label": line.label or "whole", "colour": number}
            for number, line in enumerate(plot.lines[:NAMED_LINES])
            if len(plot.lines) > 1
        ],
        "sentence": "; ".join(sentences),
        "last": _last(plot),
        "data": script_json(data),
        "described": f"{plot.title}, {len(plot.lines)} lines" if len(plot.lines) > 1 else plot.title,
    }


def _telemetry_drawn(line: PlotLine, whole: float, low: float, high: float) -> TemplateVariables:
    """A line's path; a single point is a stroke of zero length with round ends, drawn as a dot."""
    pieces: list[str] = []
    begins = True
    for time_s, value in line.points.select("time_s", "value").iter_rows():
        if value is None:
            begins = True
            continue
        x, y = _WIDTH * time_s / whole, _HEIGHT * (high - value) / (high - low)
        pieces.append(f"{'M' if begins else 'L'}{x:.1f} {y:.1f}" + ("h0" if begins else ""))
        begins = False
    odd = "".join(f"M{_WIDTH * each / whole:.1f} 0V{_HEIGHT}" for each in line.not_finite_s)
    return {"path": "".join(pieces), "odd": odd}


def _telemetry_data(line: PlotLine, unit: str) -> list[Any]:
    """[name, times, values, steps] for the script; bytes are integers, other values are rounded."""
    rows = line.points
    return [
        line.label,
        [round(each, 4) for each in rows["time_s"].to_list()],
        [None if each is None else round(each) if unit == "bytes" else float(f"{each:.6g}") for each in rows["value"]],
        rows["step"].to_list() if rows["step"].null_count() < rows.height else None,
    ]


def _ticks(plot: TelemetryPlot) -> list[float]:
    """Round, evenly spaced ticks, from below the lowest value to above the highest one."""
    values = pl.concat([line.points["value"].drop_nulls() for line in plot.lines]).to_list() or [0.0, 1.0]
    low, high = max(min(values), -_LARGEST), min(max(values), _LARGEST)
    if plot.unit in _FROM_ZERO:
        low = min(low, 0.0)
    if plot.unit == "share":
        high = max(high, 1.0)
    # a spread within floating-point error
    if high - low <= max(abs(low), abs(high)) * 1e-9:
        low, high = (low, high + (abs(high) or 1.0)) if plot.unit in _FROM_ZERO else (low - 1, high + 1)
    step = _round((high - low) / 3, 2 if plot.unit.startswith("bytes") else 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _round(step: float, base: int) -> float:
    """The next larger round step: 1, 2 or 5 times a power of ten; for bytes, a power of two."""
    power = base ** math.floor(math.log(step, base))
    return next(float(each * power) for each in (1, 2, 5, 10) if each * power >= step * (1 - 1e-9))


def _last(plot: TelemetryPlot) -> str:
    if len(plot.lines) != 1:
        return ""
    values = plot.lines[0].points["value"].drop_nulls()
    return _value(values[-1], plot.unit) if values.len() else ""


def _value(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return size(value)
        case "bytes/s":
            return f"{size(value)}/s"
        case "share":
            return share(value)
    number = count(value) if abs(value) >= 1000 else f"{value + 0.0:.4g}"
    return f"{number} {unit}" if unit else number
