"""One device's memory in a few numbers and tables: what `stepscope memory` prints and a report shows."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from stepscope.analysis.memory import DeviceMemory, alive_table, allocation_table
from stepscope.analysis.memory_allocator import allocator_table, out_of_memory
from stepscope.analysis.memory_growth import MemoryGrowth, memory_growth
from stepscope.trace import Trace, Window


@dataclass(frozen=True)
class MemorySummary:
    """What is told of a device's memory.

    Attributes:
        memory: the device's memory itself.
        name: the device's name where it is known.
        peak_step: number of the step in which the peak lies; None outside of complete steps.
        categories, lines, modules: what was alive at the peak, as `alive_table`.
        operators: what operators allocated per call and step, as `allocation_table`.
        growth: over the steps; None with fewer than two.
        allocator: calls of the driver, as `allocator_table`.
        failures: requests that failed, as `out_of_memory`.
        addressed: whether events have addresses; without them nothing is known of what was alive.
    """

    memory: DeviceMemory
    name: str | None
    peak_step: int | None
    categories: pl.DataFrame
    lines: pl.DataFrame
    modules: pl.DataFrame
    operators: pl.DataFrame
    growth: MemoryGrowth | None
    allocator: pl.DataFrame
    failures: pl.DataFrame
    addressed: bool


def memory_summary(trace: Trace, memory: DeviceMemory) -> MemorySummary:
    """The summary of one device's memory."""
    steps = memory.steps
    end = pl.col("start_ns") + pl.col("duration_ns")
    around = steps.filter((pl.col("start_ns") <= memory.peak_ns) & (end > memory.peak_ns))
    window = None
    if steps.height:
        window = Window(int(steps["start_ns"].to_numpy().min()), int(steps.select(end).to_series().to_numpy().max()))
    calls = (
        allocator_table(trace, window, memory.step_count) if memory.device != "cpu" else allocator_table(trace).clear()
    )
    return MemorySummary(
        memory=memory,
        name={each.device: each.name for each in trace.metadata.devices}.get(memory.device),
        peak_step=int(around["index"][0]) if around.height else None,
        categories=alive_table(memory, "category"),
        lines=alive_table(memory, "line"),
        modules=alive_table(memory, "module"),
        operators=allocation_table(memory, "operator"),
        growth=memory_growth(memory),
        allocator=calls,
        failures=out_of_memory(trace).filter(pl.col("device") == memory.device),
        addressed=memory.blocks.height > 0,
    )
