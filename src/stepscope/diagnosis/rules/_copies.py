"""Copies between host and device, as operators of the program, and what the device loses around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows, inherit

SHORT_KERNEL_NS: Final = 5_000
"""What making a tensor on the device takes at most: a kernel that fills a megabyte, or the gap of a launch."""
COPY_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # the outermost operator that copies
    "launch": pl.Int64,
    "lane": pl.Int32,
    "start_ns": pl.Int64,  # of the operator
    "end_ns": pl.Int64,  # of the operator, or of the copy where that ends later
    "direction": pl.String,  # copy_in or copy_out
    "bytes": pl.Int64,
    "copy_ns": pl.Int64,  # the device's time for it
    "step": pl.Int64,
}


def copies(view: View) -> pl.DataFrame:
    """The span's copies in order of time; columns as in COPY_SCHEMA. Copies that no operator made are left out."""
    work = view.work.filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
    if work.is_empty() or view.trace.operators.is_empty():
        return pl.DataFrame(schema=dict(COPY_SCHEMA))
    launch = work["launch"].to_numpy().astype(np.int64)
    operator = view.trace.launches["operator"].cast(pl.Int64).fill_null(-1).to_numpy()[launch]
    row = np.where(operator >= 0, outermost_of(view)[np.maximum(operator, 0)], -1)
    start = view.trace.operators["start_ns"].to_numpy()[np.maximum(row, 0)]
    end = start + view.trace.operators["duration_ns"].to_numpy()[np.maximum(row, 0)]
    frame = pl.DataFrame(
        {
            "row": row,
            "launch": launch,
            "lane": view.trace.launches["lane"].to_numpy()[launch],
            "start_ns": start,
            "end_ns": np.maximum(end, (work["start_ns"] + work["duration_ns"]).to_numpy()),
            "direction": work["kind"],
            "bytes": work["bytes"],
            "copy_ns": work["duration_ns"],
            "step": np.searchsorted(view.steps["start_ns"].to_numpy(), start, side="right"),
        },
        schema=dict(COPY_SCHEMA),
    )
    return frame.filter(pl.col("row") >= 0).sort("start_ns", "launch")


def outermost_of(view: View) -> Rows:
    """For each operator, the outermost one around it or itself."""
    parent = view.trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    own = np.where(parent < 0, np.arange(len(parent)), -1)
    return inherit(own, parent)


def work_of(view: View, launches: Sequence[int]) -> Rows:
    """Rows of `device_work` of these calls."""
    mine = view.trace.device_work["launch"].is_in(pl.Series(launches, dtype=pl.UInt32).implode())
    return np.flatnonzero(mine.fill_null(False).to_numpy())


def lost_ns(view: View, starts: Sequence[int], ends: Sequence[int], launches: Sequence[int]) -> int:
    """The device's idle time in these stretches and that which these calls caused later, and its time for them alone.

    Args:
        starts, ends: stretches of the host's time, apart from each other and in order.
        launches: the copying calls; idle time while one of them waited, or in the refill after it, is theirs.
    """
    pieces = view.pieces
    begin = pieces["start_ns"].to_numpy()
    position = np.searchsorted(np.array(starts, np.int64), begin, side="right") - 1
    inside = (position >= 0) & (begin < np.array(ends, np.int64)[np.maximum(position, 0)]) if len(starts) else begin < 0
    operator = view.trace.launches["operator"].cast(pl.Int64).fill_null(-1)
    calls = view.trace.launches.with_row_index("launch").filter(
        operator.is_in(operator.gather(list(launches)).implode()) & (operator >= 0)
    )
    caused = pieces["trigger_launch"].is_in(calls["launch"].implode()).fill_null(False).to_numpy()
    return int(pieces["duration_ns"].to_numpy()[inside | caused].sum())
