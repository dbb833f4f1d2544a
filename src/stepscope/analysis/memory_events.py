"""Allocations from the first moment to the last: how much was held when, and how long each block lived.

A profiler writes one event when a block of memory is handed out and one when it is given back. Blocks that were there
before the recording are known only as a level, and as the events that give them back.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, innermost_at

LEVEL_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "start_ns": pl.Int64,
    "allocated_bytes": pl.Int64,  # from here on
    "reserved_bytes": pl.Int64,  # what the allocator holds of the device; null where it was not recorded
}
BLOCK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "start_ns": pl.Int64,  # null: before the recording
    "end_ns": pl.Int64,  # null: not freed while recording
    "bytes": pl.Int64,
    "lane": pl.Int32,
    "row": pl.UInt32,  # of the allocation in `memory`; null: before the recording
    "operator": pl.Int64,  # row in operators of the innermost around the allocation, -1 for none
}


def memory_devices(trace: Trace) -> list[str]:
    """The devices with memory events: accelerators before the CPU, and the one that held the most first."""
    peaks = memory_levels(trace).group_by("device").agg(pl.col("allocated_bytes").max())
    order = [pl.col("device") == "cpu", pl.col("allocated_bytes"), pl.col("device")]
    return peaks.sort(order, descending=[False, True, False])["device"].to_list()


def memory_levels(trace: Trace) -> pl.DataFrame:
    """What each device held after every event, in order of time; columns as in LEVEL_SCHEMA.

    Where a trace has no totals they are added up from the events, from the least that makes every level possible.
    """
    memory = trace.memory.filter((pl.col("bytes") != 0) & pl.col("device").is_not_null())
    added = pl.col("bytes").cum_sum().over("device")
    counted = (added - pl.min_horizontal(added.min().over("device"), 0)).cast(pl.Int64)
    known = pl.col("total_allocated").is_not_null().all().over("device")
    reserved = pl.when(pl.col("total_reserved").max().over("device") > 0).then(pl.col("total_reserved"))
    return memory.select(
        "device",
        "start_ns",
        allocated_bytes=pl.when(known).then(pl.col("total_allocated")).otherwise(counted),
        reserved_bytes=reserved,
    )


def blocks(trace: Trace) -> pl.DataFrame:
    """Every block of memory that events tell of, in order of its allocation; columns as in BLOCK_SCHEMA.

    Events are paired by address. A block whose end was not recorded ends where its address is handed out again.
    Events without addresses are left out: who lived how long cannot be told from them.
    """
    memory = trace.memory.with_row_index("row").filter(
        (pl.col("bytes") != 0) & pl.col("address").is_not_null() & pl.col("device").is_not_null()
    )
    if memory.is_empty():
        return pl.DataFrame(schema=dict(BLOCK_SCHEMA))
    device = memory["device"].rank("dense").to_numpy()
    address, size = memory["address"].to_numpy(), memory["bytes"].to_numpy()
    order = np.lexsort((np.arange(len(size)), address, device))
    same = (device[order][1:] == device[order][:-1]) & (address[order][1:] == address[order][:-1])
    following = np.full(len(order), -1, np.int64)
    following[order[:-1]] = np.where(same, order[1:], -1)
    previous = np.full(len(order), -1, np.int64)
    previous[order[1:]] = np.where(same, order[:-1], -1)
    begins = size > 0
    # A block that is given back without having been handed out was there before.
    earlier = ~begins & ((previous < 0) | ~begins[np.maximum(previous, 0)])
    start = memory["start_ns"].to_numpy()
    ended = pl.Series(np.where(following >= 0, start[np.maximum(following, 0)], -1))
    table = memory.select("device", "start_ns", pl.col("bytes").abs(), "lane", "row").with_columns(
        end_ns=pl.when(ended >= 0).then(ended), operator=pl.Series(_operators_at(trace, memory))
    )
    before = table.filter(pl.Series(earlier)).with_columns(
        start_ns=pl.lit(None, pl.Int64), end_ns=pl.col("start_ns"), row=pl.lit(None, pl.UInt32), operator=pl.lit(-1)
    )
    found = pl.concat([before, table.filter(pl.Series(begins))], how="diagonal_relaxed")
    return found.select([pl.col(name).cast(dtype) for name, dtype in BLOCK_SCHEMA.items()])


def _operators_at(trace: Trace, memory: pl.DataFrame) -> Rows:
    operators = trace.operators
    if operators.is_empty():
        return np.full(memory.height, -1, np.int64)
    return innermost_at(
        memory["lane"].to_numpy(),
        memory["start_ns"].to_numpy(),
        operators["lane"].to_numpy(),
        operators["start_ns"].to_numpy(),
        operators["duration_ns"].to_numpy(),
        operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy(),
    )


def outermost_operators(trace: Trace) -> Rows:
    """For each operator, the row of the outermost around it or itself; shape (operators,)."""
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    top = np.arange(len(parent))
    while (active := np.flatnonzero(parent[top] >= 0)).size:
        top[active] = parent[top[active]]
    return top
