"""What rules about the program's own operators share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.backward import BACKWARD_NAME
from stepscope.analysis.work_left import WorkLeft
from stepscope.diagnosis.view import View
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif import Change
from stepscope.whatif.changes import Lanes, scaled_host_time, scaled_operators, together

HostTime: TypeAlias = tuple[Lanes, Times, Times]
"""Threads, starts and ends of intervals; nanoseconds, each of shape (n,)."""
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
    return 0 if view.device is not None else _length(pauses(view, rows))


def pauses(view: View, rows: Rows) -> HostTime:
    """A thread's time between each of these operators, given in order, and the next."""
    lanes = view.trace.operators["lane"].to_numpy()[rows]
    start = view.trace.operators["start_ns"].to_numpy()[rows]
    end = start + view.trace.operators["duration_ns"].to_numpy()[rows]
    return lanes[:-1], end[:-1], np.clip(start[1:], end[:-1], end[:-1] + LONGEST_PAUSE_NS)


def pauses_of_all(view: View, sequences: Sequence[Rows]) -> HostTime:
    """A thread's time between the operators of each of these sequences; at least one."""
    each = [pauses(view, rows) for rows in sequences]
    return (
        np.concatenate([lanes for lanes, _, _ in each]),
        np.concatenate([starts for _, starts, _ in each]),
        np.concatenate([ends for _, _, ends in each]),
    )


def engine_pauses_ns(view: View, rows: Rows) -> int:
    """Without a device: the time after each of these outermost operators until the next one of its thread begins."""
    return 0 if view.device is not None else _length(engine_pauses(view, rows))


def engine_pauses(view: View, rows: Rows) -> HostTime:
    """The time after each of these outermost operators until the next one of its thread begins."""
    outermost = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    end = pl.col("start_ns") + pl.col("duration_ns")
    pause = (pl.col("start_ns").shift(-1).over("lane") - end).fill_null(0).clip(0, LONGEST_PAUSE_NS)
    following = outermost.select(pl.col("row").cast(pl.Int64), "lane", end=end, pause=pause)
    mine = following.filter(pl.col("row").is_in(pl.Series(rows, dtype=pl.Int64).implode()))
    ends = mine["end"].to_numpy()
    return mine["lane"].to_numpy(), ends, ends + mine["pause"].to_numpy()


def scaled_with_pauses(rows: Rows, between: Sequence[HostTime], factor: float) -> Change:
    """These operators, on the host and on the device, and these pauses between them take so many times as long."""
    return together(scaled_operators(rows, factor), *(scaled_host_time(*each, factor) for each in between))


def _length(time: HostTime) -> int:
    _, start, end = time
    return int((end - start).sum())


def outermost_in_order(view: View) -> tuple[Rows, Rows]:
    """All outermost operators, thread by thread in order of time, and each one's position there; -1 for others."""
    table = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    ordered: Rows = table["row"].to_numpy().astype(np.int64)
    position = np.full(view.trace.operators.height, -1, np.int64)
    position[ordered] = np.arange(len(ordered))
    return ordered, position
