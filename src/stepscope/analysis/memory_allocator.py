"""What the caching allocator asked of the driver: how often, for how long, and what could not be had."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.memory_places import user_place
from stepscope.trace import Trace, Window

OUT_OF_MEMORY: Final = "out of memory"
"""Name of the launches and annotations by which a trace tells that memory could not be had."""
DEVICE_FREE: Final = "device free"
"""Name of the counter of bytes that the driver could still have given then."""

OUT_OF_MEMORY_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "start_ns": pl.Int64,
    "asked_bytes": pl.Int64,
    "free_bytes": pl.Int64,  # what the driver had left; null where not recorded
    "file": pl.String,
    "line": pl.Int32,
    "function": pl.String,
}


def allocator_table(trace: Trace, window: Window | None = None, steps: int = 1) -> pl.DataFrame:
    """Calls by which memory was asked of the driver and given back to it, the costliest first.

    Args:
        window: only calls that start in this stretch of time.
        steps: how many steps it holds.

    Returns:
        Columns name, calls, calls_per_step, total_ns, ns_per_step, bytes (0 where not recorded).
    """
    calls = trace.launches.filter((pl.col("kind") == "allocate") & (pl.col("name") != OUT_OF_MEMORY))
    if window is not None:
        calls = calls.filter(pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left"))
    count = max(steps, 1)
    return (
        calls.group_by("name")
        .agg(calls=pl.len(), total_ns=pl.col("duration_ns").sum(), bytes=pl.col("bytes").sum())
        .with_columns(calls_per_step=pl.col("calls") / count, ns_per_step=pl.col("total_ns") // count)
        .select("name", "calls", "calls_per_step", "total_ns", "ns_per_step", "bytes")
        .sort("total_ns", "calls", "name", descending=[True, True, False])
    )


def out_of_memory(trace: Trace) -> pl.DataFrame:
    """When memory could not be had, in order of time; columns as in OUT_OF_MEMORY_SCHEMA."""
    calls = trace.launches.filter((pl.col("kind") == "allocate") & (pl.col("name") == OUT_OF_MEMORY))
    if calls.is_empty():
        return pl.DataFrame(schema=dict(OUT_OF_MEMORY_SCHEMA))
    key = ["lane", "start_ns"]
    stacks = trace.annotations.filter(pl.col("name") == OUT_OF_MEMORY).select(*key, "call_stack").unique(key)
    free = trace.counters.filter(pl.col("name") == DEVICE_FREE).select(*key, free_bytes="value").unique(key)
    rows = (
        calls.select(*key, asked_bytes="bytes")
        .join(trace.lanes.select("lane", "device"), on="lane", how="left", maintain_order="left")
        .join(stacks, on=key, how="left", maintain_order="left")
        .join(free, on=key, how="left", maintain_order="left")
    )
    places = [user_place(stack) if stack else (None, None, None) for stack in rows["call_stack"]]
    columns = {name: [place[at] for place in places] for at, name in enumerate(("file", "line", "function"))}
    rows = rows.with_columns(pl.Series(name, values) for name, values in columns.items())
    return rows.select([pl.col(name).cast(dtype) for name, dtype in OUT_OF_MEMORY_SCHEMA.items()])
