"""Memory over time: what grows from step to step, the figures of one device, and what to draw of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import HostActivity
from stepscope.analysis.memory import DeviceMemory, alive_table, allocation_table, category_levels, device_memories
from stepscope.analysis.memory_blocks import CATEGORIES, PLACE_SCHEMA, allocator_table, out_of_memory
from stepscope.trace import Trace, Window
from stepscope.trace.window import Times

_UNSETTLED: Final = 2
"""Blocks of the last steps may still be given back: gradients, the loss and the batch live until the next step."""

ACCUMULATED_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    **PLACE_SCHEMA,
    "category": pl.String,
    "bytes_per_step": pl.Int64,
    "blocks_per_step": pl.Float64,
}


@dataclass(frozen=True)
class MemoryGrowth:
    """How a device's memory develops over the steps.

    Attributes:
        level_bytes: what was allocated at the end of each complete step; shape (steps,).
        slope_bytes: per step, the median slope between all pairs of steps (Theil and Sen): single steps do not move it.
        kept_bytes: of each step but the last two, what was allocated in it and never given back; shape (steps - 2,).
        accumulated: who allocated that; columns as in ACCUMULATED_SCHEMA, the most first.
    """

    level_bytes: Times
    slope_bytes: float
    kept_bytes: Times
    accumulated: pl.DataFrame

    @property
    def leak_bytes(self) -> int:
        """What stays behind of every step, 0 unless each step leaves something and the level rises.

        A cache that fills leaves something of its first steps only; one of limited size gives back what it takes.
        """
        if not len(self.kept_bytes) or self.kept_bytes.min() <= 0 or self.slope_bytes <= 0:
            return 0
        return int(min(float(np.median(self.kept_bytes)), self.slope_bytes))


def memory_growth(memory: DeviceMemory) -> MemoryGrowth | None:
    """The development over the complete steps; None with fewer than two."""
    steps = memory.steps.sort("start_ns")
    if steps.height < 2:
        return None
    start = steps["start_ns"].to_numpy()
    end = start + steps["duration_ns"].to_numpy()
    at = np.searchsorted(memory.levels["start_ns"].to_numpy(), end, side="right") - 1
    level = np.where(at >= 0, memory.levels["allocated_bytes"].to_numpy()[np.maximum(at, 0)], 0)
    settled = max(steps.height - _UNSETTLED, 0)
    left = memory.blocks.filter(
        (pl.col("start_ns") >= int(start[0])) & (pl.col("end_ns").is_null() | (pl.col("end_ns") >= int(end[-1])))
    )
    number = np.searchsorted(start, left["start_ns"].to_numpy(), side="right") - 1
    left = left.with_columns(step=pl.Series(number)).filter(pl.col("step") < settled)
    kept = np.zeros(settled, np.int64)
    np.add.at(kept, left["step"].to_numpy(), left["bytes"].to_numpy())
    return MemoryGrowth(level, _theil_sen(level), kept, _accumulated(left, settled))


def _theil_sen(values: Times) -> float:
    """The median of the slopes between all pairs of values, or of those of up to 500 of them."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), 500)).astype(np.int64))
    first, second = np.triu_indices(len(chosen), 1)
    rise = values[chosen[second]] - values[chosen[first]]
    return float(np.median(rise / (chosen[second] - chosen[first])))


def _accumulated(left: pl.DataFrame, steps: int) -> pl.DataFrame:
    """Places that leave something behind in every step."""
    columns = [*PLACE_SCHEMA, "category"]
    table = (
        left.group_by(columns)
        .agg(in_steps=pl.col("step").n_unique(), bytes_per_step=pl.col("bytes").sum() // max(steps, 1), blocks=pl.len())
        .filter(pl.col("in_steps") == steps)
        .with_columns(blocks_per_step=pl.col("blocks") / max(steps, 1))
        .sort("bytes_per_step", *columns, descending=[True, *[False] * len(columns)])
    )
    return table.select([pl.col(name).cast(dtype) for name, dtype in ACCUMULATED_SCHEMA.items()])


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


MOMENTS: Final = 400
"""A longer history keeps the highest and the lowest level of each of half as many stretches of time."""
MAXIMUM_STEPS: Final = 100
ROWS: Final = 10


@dataclass(frozen=True)
class MemoryPicture:
    """One device's memory over time.

    Attributes:
        start_ns, end_ns: what is drawn.
        times: moments, in order; from each on the level is as given until the next.
        bands: category -> bytes at each moment, of the categories that held anything, from the bottom to the top. Where
            it is not known what was alive, one band "allocated".
        reserved: bytes at each moment; None where that was not recorded.
        capacity_bytes: of the device; None where not known.
        peak_ns, peak_bytes: the peak.
        steps: number and start of complete steps.
        growth_bytes: what each step leaves behind; None where that cannot be told.
        categories, lines: what was alive at the peak, as `alive_table`; the largest rows.
        line_count: how many rows `lines` has in all.
    """

    device: str
    name: str | None
    start_ns: int
    end_ns: int
    times: tuple[int, ...]
    bands: dict[str, tuple[int, ...]]
    reserved: tuple[int, ...] | None
    capacity_bytes: int | None
    peak_ns: int
    peak_bytes: int
    steps: tuple[tuple[int, int], ...]
    growth_bytes: int | None
    categories: pl.DataFrame
    lines: pl.DataFrame
    line_count: int


def memory_pictures(
    trace: Trace, *, steps: pl.DataFrame | None = None, activity: HostActivity | None = None
) -> tuple[MemoryPicture, ...]:
    """A picture for each device with memory events, in the order of `device_memories`."""
    found = []
    for memory in device_memories(trace, steps=steps, activity=activity):
        summary, levels = memory_summary(trace, memory), memory.levels
        chosen = _moments(levels["start_ns"].to_numpy(), levels["allocated_bytes"].to_numpy(), memory.peak_row)
        rows = levels[chosen]
        times = rows["start_ns"].to_list()
        marks = memory.steps.sort("start_ns").select("index", "start_ns")
        end = int((memory.steps["start_ns"] + memory.steps["duration_ns"]).to_numpy().max()) if marks.height else 0
        growth = memory_growth(memory)
        lines = alive_table(memory, "line")
        reserved = rows["reserved_bytes"]
        found.append(
            MemoryPicture(
                device=memory.device,
                name=summary.name,
                start_ns=min([times[0], *marks["start_ns"].head(1).to_list()]),
                end_ns=max(times[-1], end, times[0] + 1),
                times=tuple(times),
                bands=_bands(category_levels(memory, times))
                if summary.addressed
                else {"allocated": tuple(rows["allocated_bytes"].to_list())},
                reserved=None if reserved.null_count() else tuple(reserved.to_list()),
                capacity_bytes=memory.capacity_bytes,
                peak_ns=memory.peak_ns,
                peak_bytes=memory.peak_bytes,
                steps=tuple(marks.rows()) if marks.height <= MAXIMUM_STEPS else (),
                growth_bytes=None if growth is None else growth.leak_bytes,
                categories=summary.categories if summary.addressed else summary.categories.clear(),
                lines=lines.head(ROWS) if summary.addressed else lines.clear(),
                line_count=lines.height,
            )
        )
    return tuple(found)


def _moments(times: Times, levels: Times, peak: int) -> Times:
    """Rows to draw: all of a short history, else of each stretch of time the highest and the lowest level."""
    if len(times) <= MOMENTS:
        return np.arange(len(times))
    span = max(int(times[-1] - times[0]), 1)
    bucket = (times - times[0]) * (MOMENTS // 2) // (span + 1)
    frame = pl.DataFrame({"row": np.arange(len(times)), "bucket": bucket, "level": levels})
    ends = frame.group_by("bucket").agg(
        highest=pl.col("row").get(pl.col("level").arg_max()), lowest=pl.col("row").get(pl.col("level").arg_min())
    )
    rows: Times = np.unique(
        np.concatenate([ends["highest"].to_numpy(), ends["lowest"].to_numpy(), [0, peak, len(times) - 1]])
    )
    return rows


def _bands(held: pl.DataFrame) -> dict[str, tuple[int, ...]]:
    found = {}
    for category in ("before", *CATEGORIES):
        values = held.filter(pl.col("category") == category)["bytes"].to_list()
        if any(values):
            found[category] = tuple(values)
    return found
