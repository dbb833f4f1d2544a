"""What a device's memory was used for, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from stepscope.analysis.blocks import CATEGORIES
from stepscope.analysis.memory import MemorySummary
from stepscope.report.format import cell, count, duration, printable, share, size
from stepscope.report.tables import showing, table_lines

NO_ADDRESSES = (
    "The events have no addresses, as those of older profilers: how long each block lived is not known, and what was "
    "alive at the peak cannot be told."
)


def memory_text(summaries: Sequence[MemorySummary], *, width: int, top: int) -> str:
    """One screen for each device; `top` rows of each table, 0 for all."""
    parts = ["\n".join(_device(summary, width, top)) for summary in summaries]
    return "\n\n".join(parts) + "\n"


def _device(summary: MemorySummary, width: int, top: int) -> Iterator[str]:
    yield device_name(summary)
    for label, sentence in facts(summary):
        yield f"  {label:<10}{sentence}"
    if summary.addressed:
        yield from _table("Alive at the peak, by category", described(summary.categories), width, 0, "categories")
        yield from _table("By line", _named(summary.lines, "file", "(no line of yours)"), width, top, "lines")
        if summary.modules.height > 1 or summary.modules["module"].null_count() == 0:
            named = _named(summary.modules, "module", "(outside of modules)")
            yield from _table("By module", named, width, top, "modules")
        if summary.operators["operator_name"].null_count() < summary.operators.height:
            steps = " in the steps" if summary.memory.steps.height else ""
            named = _named(summary.operators, "operator_name", "(no operator)")
            yield from _table(f"Allocated{steps}, by operator", named, width, top, "operators")
    else:
        yield f"  {NO_ADDRESSES}"


def device_name(summary: MemorySummary) -> str:
    """Such as "Device 0 (NVIDIA H100)"."""
    device = summary.memory.device
    if device == "cpu":
        return "The host's memory"
    return f"Device {printable(device)}" + (f" ({printable(summary.name)})" if summary.name else "")


def facts(summary: MemorySummary) -> Iterator[tuple[str, str]]:
    """The numbers to see first, each with a label."""
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
        where = "" if row["file"] is None else f" at {printable(row['file'])}:{row['line']}"
        yield "failed", f"{size(row['asked_bytes'])} asked for{where}{free}, {cell('start_ns', row['start_ns'])}"
    if not memory.is_total:
        yield "counted", "what was allocated since the recording began; what was there before is not known"


def _growth(summary: MemorySummary) -> str:
    growth = summary.growth
    if growth is None:
        return "not known: it takes two complete steps"
    steps = len(growth.level_bytes)
    if growth.leak_bytes:
        return f"{size(growth.leak_bytes)} stay behind of every step, over {steps} steps"
    if growth.slope_bytes > 0:
        return f"{size(growth.slope_bytes)} per step over {steps} steps, but not of every step"
    return f"none over {steps} steps"


def _names(allocator: pl.DataFrame) -> str:
    rows = allocator.head(4).select("name", "calls").iter_rows()
    return ", ".join(f"{printable(name)} {count(calls)} times" for name, calls in rows)


def described(categories: pl.DataFrame) -> pl.DataFrame:
    """The table with what each category means."""
    return categories.with_columns(meaning=pl.col("category").replace_strict(CATEGORIES, default=""))


def _named(frame: pl.DataFrame, column: str, nothing: str) -> pl.DataFrame:
    return frame.with_columns(pl.col(column).fill_null(nothing))


def _table(title: str, frame: pl.DataFrame, width: int, top: int, things: str) -> Iterator[str]:
    shown = frame.head(top) if top else frame
    yield ""
    yield title
    yield from (f"  {line}" for line in table_lines(shown, width=width - 2))
    cut = showing(shown.height, frame.height, things)
    if cut:
        yield f"  {cut}"


def memory_json(summaries: Sequence[MemorySummary]) -> dict[str, Any]:
    """The same for programs: one entry a device, numbers in bytes and nanoseconds."""
    return {"schema": 1, "devices": [_json(summary) for summary in summaries]}


def _json(summary: MemorySummary) -> dict[str, Any]:
    memory, growth = summary.memory, summary.growth
    return {
        "device": memory.device,
        "name": summary.name,
        "capacity_bytes": memory.capacity_bytes,
        "peak": {"start_ns": memory.peak_ns, "bytes": memory.peak_bytes, "step": summary.peak_step},
        "reserved_bytes": memory.reserved_bytes,
        "unused_reserved_bytes": memory.fragmentation_bytes,
        "unused_reserved_share": memory.fragmentation_share,
        "growth": None
        if growth is None
        else {
            "bytes_per_step": growth.leak_bytes,
            "slope_bytes": growth.slope_bytes,
            "level_bytes": growth.level_bytes.tolist(),
            "accumulated": growth.accumulated.rows(named=True),
        },
        "categories": summary.categories.rows(named=True),
        "lines": summary.lines.rows(named=True),
        "modules": summary.modules.rows(named=True),
        "operators": summary.operators.rows(named=True),
        "allocator": summary.allocator.rows(named=True),
        "out_of_memory": summary.failures.rows(named=True),
    }
