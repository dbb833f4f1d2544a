"""What to draw of a device's memory: what each category held over time, thinned to what an eye can tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import HostActivity
from stepscope.analysis.memory import alive_table, category_levels, device_memories
from stepscope.analysis.memory_categories import CATEGORIES
from stepscope.analysis.memory_growth import memory_growth
from stepscope.analysis.memory_summary import memory_summary
from stepscope.trace import Trace
from stepscope.trace.intervals import Times

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
