"""Calls that log, and how often they may happen."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import TABLES
from stepscope.analysis.naming import cause_of_name
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows, inherit

BACKWARD_NODE: Final = "autograd::engine::evaluate_function"
"""Beginning of what the engine calls a node's run. Values read right inside are not the program's: anomaly detection
asks whether they are NaN."""
_REDUCER: Final = r"^torch(\.|::)distributed(\.ddp\.|::)reducer::"
"""What DistributedDataParallel's reducer calls its own work."""
_NICE: Final = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def every_steps(cost_ns: int, length_ns: int, share: float) -> int:
    """The least handy number of steps between two logs at which they cost no more than this share of the rest."""
    wanted = math.ceil(cost_ns / (share * max(length_ns - cost_ns, 1)))
    return next((number for number in _NICE if number >= wanted), _NICE[-1])


def reads_of_reducer(view: View) -> Rows:
    """The rows in `operators` of values that DistributedDataParallel reads, which are not the program's.

    Where it looks for unused parameters, it reads for each one whether any rank used it: `used[number].item()` on the
    line of the backward pass.
    """
    place = pl.format("{}:{}", "source_file", "source_line")
    operators = view.trace.operators.with_row_index("row").select(
        "row", "name", "lane", "start_ns", "parent", place=place
    )
    lines = operators.filter(pl.col("name").str.contains(_REDUCER))["place"].drop_nulls().unique()
    if lines.is_empty():
        return np.zeros(0, np.int64)
    outermost = operators.filter(pl.col("parent").is_null()).sort("lane", "start_ns", maintain_order=True)
    found = outermost.with_columns(before=pl.col("name").shift(1).over("lane")).filter(
        (pl.col("name") == "aten::item") & (pl.col("before") == "aten::select") & pl.col("place").is_in(lines.implode())
    )
    return found["row"].to_numpy().astype(np.int64)


def outermost_logging(view: View) -> Rows:
    """For each slice, the outermost logging call around it or itself, -1 for none."""
    activity = view.activity
    is_logging = np.zeros(len(activity.row), np.bool_)
    for code, table in enumerate(TABLES):
        names = view.trace.table(table)["name"]
        wanted = names.is_in([name for name in names.unique() if cause_of_name(name) == "logging"]).to_numpy()
        mine = np.flatnonzero(activity.table == code)
        is_logging[mine] = wanted[activity.row[mine]]
    inside = inherit(np.where(is_logging, 1, -1), activity.around) > 0
    around = activity.around
    is_inner = (around >= 0) & inside[np.maximum(around, 0)]
    rows = np.arange(len(inside))
    return inherit(np.where(is_logging & ~is_inner, rows, -1), around)
