"""What rules about the program's own operators share."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.backward import BACKWARD_NAME
from stepscope.analysis.work_left import WorkLeft
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows

LONGEST_PAUSE_NS: Final = 50_000
"""Between two operators that follow each other; what takes longer is not Python's way from one to the next."""


def called_from_python(view: View) -> Rows:
    """Rows of the operators in the span that no operator of a library called, in order; the backward pass's left out.

    What runs inside a function of autograd that the program defined counts as the program's.
    """
    operators = view.operators
    parents = view.trace.operators["name"].gather(operators["parent"])
    libraries = parents.str.contains("::") | parents.str.contains(BACKWARD_NAME)
    mine = operators.filter(~libraries.fill_null(False) & ~operators["name"].str.contains(BACKWARD_NAME))
    return mine["row"].to_numpy().astype(np.int64)


def working_ns(view: View) -> Rows:
    """For each row of `operators`, the time in which its work was done: the device's, or without one the thread's."""
    if view.device is None:
        return view.trace.operators["duration_ns"].to_numpy()
    return view.operator_costs["device_total_ns"].to_numpy()


def work_left(view: View) -> WorkLeft:
    """What the trace shows of how fast work can be done."""
    return WorkLeft(view.trace, working_ns(view), on_device=view.device is not None)


def pauses_ns(view: View, rows: Rows) -> int:
    """Without a device: a thread's time between each of these operators, given in order, and the next."""
    if view.device is not None or len(rows) < 2:
        return 0
    start = view.trace.operators["start_ns"].to_numpy()[rows]
    end = start + view.trace.operators["duration_ns"].to_numpy()[rows]
    return int(np.clip(start[1:] - end[:-1], 0, LONGEST_PAUSE_NS).sum())


def engine_pauses_ns(view: View, rows: Rows) -> int:
    """Without a device: the time after each of these outermost operators until the next one of its thread begins."""
    if view.device is not None or not len(rows):
        return 0
    outermost = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    following = outermost.select(
        pl.col("row").cast(pl.Int64),
        pause=(pl.col("start_ns").shift(-1).over("lane") - pl.col("start_ns") - pl.col("duration_ns"))
        .fill_null(0)
        .clip(0, LONGEST_PAUSE_NS),
    )
    return int(following.filter(pl.col("row").is_in(pl.Series(rows).implode()))["pause"].sum())


def outermost_in_order(view: View) -> tuple[Rows, Rows]:
    """All outermost operators, thread by thread in order of time, and each one's position there; -1 for others."""
    table = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    ordered: Rows = table["row"].to_numpy().astype(np.int64)
    position = np.full(view.trace.operators.height, -1, np.int64)
    position[ordered] = np.arange(len(ordered))
    return ordered, position
