"""Report what a device's memory was used for: as text, as JSON, and as a chart over time with steps and the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import polars as pl

from stepscope.analysis.blocks import CATEGORIES
from stepscope.analysis.memory import DeviceMemory, MemorySummary
from stepscope.report.document import Block, Document, Facts, Group, Section, Table, Text, fields, stamped
from stepscope.report.format import cell, count, duration, share, size

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
