"""Which slice stands inside which: parents of the slices of each lane.

A slice's parent is the innermost slice of its lane that is open when it starts; of two that start together the
longer is outside. Profilers round and clip, so a child may end after its parent.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.trace.window import Times

Rows = npt.NDArray[np.int64]

_MOST_EFFORT: Final = 64
"""Steps a slice, together, up to those around it; files that nest deeper are taken slice by slice."""
_ROUND_COSTS: Final = 500
"""Steps that take as long as beginning with the next of all slices."""
_ROUNDS: Final = 64
"""Climbs of all slices at once before the few that go on are taken one by one."""


def nesting_order(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
    """Row order by lane, then start, then longest first: parents come before their children."""
    if _are_in_order(lanes, starts, durations):
        return np.arange(len(lanes))
    return np.lexsort((-durations, starts, lanes))


def _are_in_order(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> bool:
    if not len(lanes) or lanes[0] != lanes[-1] or (lanes != lanes[0]).any():
        return False
    later = np.diff(starts)
    return bool((later >= 0).all()) and not ((later == 0) & (np.diff(durations) > 0)).any()


def parents(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
    """The parent's row for each slice, -1 where it has none; rows in any order, shape (n,).

    Slices of a lane are solved all at once; by a stack where that takes too much.
    """
    if _are_in_order(lanes, starts, durations):
        return _parents_at_once(starts, starts + durations)
    order = nesting_order(lanes, starts, durations)
    lane, start = lanes[order], starts[order]
    end = start + durations[order]
    result = np.full(len(order), -1, np.int64)
    for first, last in _bounds_of_lanes(lane):
        found = _parents_at_once(start[first:last], end[first:last])
        result[first:last] = np.where(found >= 0, found + first, -1)
    parent = np.full(len(order), -1, np.int64)
    parent[order] = np.where(result >= 0, order[result], -1)
    return parent


def _parents_at_once(start: Times, end: Times) -> Rows:
    """Parents of one lane's slices in nesting order: of each the last one before it that is still open."""
    count = len(start)
    if not count:
        return np.zeros(0, np.int64)
    # Doubled times let a slice of no length end after it starts, and before anything longer that starts with it.
    begins = start * 2
    finishes = np.maximum(end * 2, begins + 1)
    above = np.arange(-1, count - 1)
    above[1:][begins[1:] >= np.maximum.accumulate(finishes)[:-1]] = -1  # all before have ended
    rows = np.flatnonzero(above >= 0)
    asked, candidate = begins[rows], rows - 1
    effort = 0
    while (closed := np.flatnonzero(finishes[candidate] <= asked)).size:
        effort += len(closed) + _ROUND_COSTS
        if effort > _MOST_EFFORT * (count + _ROUND_COSTS):
            return _parents_by_stack(start, end)
        rows, asked = rows[closed], asked[closed]
        # What lies between a slice and its candidate has closed by then: also what lies before that one's own.
        candidate = above[candidate[closed]]
        above[rows] = candidate
    return above


def _bounds_of_lanes(lane: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    bounds = [0, *(np.flatnonzero(np.diff(lane)) + 1).tolist(), len(lane)]
    return list(pairwise(bounds))


def by_level(depth: Rows) -> list[Rows]:
    """The rows of each depth, from 0 on, in order of row."""
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
    return [order[first:last] for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def depths(parent: Rows) -> Rows:
    """How many slices stand around each; shape (n,)."""
    depth = (parent >= 0).astype(np.int64)
    above = parent.copy()
    while (active := np.flatnonzero(above >= 0)).size:
        over = above[active]
        depth[active] += depth[over]
        above[active] = above[over]
    return depth


def inherit(own: Rows, around: Rows) -> Rows:
    """Each slice's own value, or that of the nearest slice around it that has one; -1 means none."""
    result: Rows = own.copy()
    above = around.copy()
    while (active := np.flatnonzero((result < 0) & (above >= 0))).size:
        over = above[active]
        result[active] = result[over]
        above[active] = above[over]
    return result


def _parents_by_stack(start: Times, end: Times) -> Rows:
    found: list[int] = []
    stack: list[int] = []
    starts, ends = start.tolist(), end.tolist()
    for row, begin in enumerate(starts):
        while stack and ends[stack[-1]] <= begin and not (starts[stack[-1]] == begin == ends[stack[-1]]):
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(row)
    return np.array(found, np.int64)


def enclosing(parent: Rows, starts: Times, durations: Times) -> Rows:
    """The nearest slice around each that also covers most of it, -1 for none; shape (n,).

    A slice that outlives its parent, as frames that were open when a profiler started do, is not that parent's doing.
    """
    middle = starts + durations // 2
    return _first_open(parent, middle, starts + durations + 1, parent)


def innermost_at(
    query_lanes: npt.NDArray[np.int32],
    query_times: Times,
    lanes: npt.NDArray[np.int32],
    starts: Times,
    durations: Times,
    parent: Rows,
) -> Rows:
    """Row of the innermost slice open at each time on its lane, -1 where none is; shape of `query_times`.

    A slice of no length is open at its own time.

    Args:
        query_lanes, query_times: the questions, shape (m,).
        lanes, starts, durations, parent: the slices, as `parents` takes and gives them.
    """
    order = nesting_order(lanes, starts, durations)
    ordered_lanes = lanes[order]
    result = np.full(len(query_times), -1, np.int64)
    for number in np.unique(query_lanes):
        asked = query_lanes == number
        first, last = np.searchsorted(ordered_lanes, [number, number + 1])
        found = np.searchsorted(starts[order[first:last]], query_times[asked], side="right") - 1
        result[asked] = np.where(found >= 0, order[first + np.maximum(found, 0)], -1) if last > first else -1
    return _first_open(result, query_times, np.maximum(starts + durations, starts + 1), parent)


def open_after(rows: Rows, starts: Times, ends: Times, parent: Rows) -> tuple[Times, Rows]:
    """The times at which what is open on one lane changes, and the innermost slice open from each on, -1 for none.

    Args:
        rows: the lane's slices, in nesting order of those that start together.
        starts, ends, parent: of all slices; slices are half-open, so one of no length is never open.
    """
    order = rows[np.lexsort((rows, starts[rows] - ends[rows], starts[rows]))]
    times = np.concatenate([ends[order], starts[order]])
    around = parent[order]
    if ((around >= 0) & (ends[order] > ends[np.maximum(around, 0)])).any():
        # Where slices partly overlap, one may outlive its parent: only what began last leads to what is open.
        times = np.sort(times)
        times = times[np.append(True, times[1:] != times[:-1])]  # np.unique takes ten times as long for this many
        candidates = order[np.searchsorted(starts[order], times, side="right") - 1]
    else:
        candidates = np.concatenate([around, order])
        # At one time ends come before starts, and of several starts the innermost is last.
        sequence = np.argsort(times, kind="stable")
        times, candidates = times[sequence], candidates[sequence]
        last = np.append(times[1:] != times[:-1], np.ones(min(len(times), 1), np.bool_))
        times, candidates = times[last], candidates[last]
    return times, _first_open(candidates, times, ends, parent)


def _first_open(rows: Rows, times: Times, closing: Times, parent: Rows) -> Rows:
    """Each row, or the nearest around it that closes after the row's time; -1 for none.

    Args:
        rows, times: where each climb begins, -1 for nowhere, and for which time; shape (m,).
        closing, parent: of all slices.
    """
    result: Rows = rows.copy()
    over = np.flatnonzero(result >= 0)
    for _ in range(_ROUNDS):
        over = over[closing[result[over]] <= times[over]]
        if not over.size:
            return result
        result[over] = parent[result[over]]
        over = over[result[over] >= 0]
    # Deep: what has closed stays closed, so in order of time every climb shortens those that follow.
    above, closes = parent.tolist(), closing.tolist()
    over = over[np.argsort(times[over], kind="stable")]
    for position, row, time in zip(over.tolist(), result[over].tolist(), times[over].tolist(), strict=True):
        passed = []
        while row >= 0 and closes[row] <= time:
            passed.append(row)
            row = above[row]
        for each in passed:
            above[each] = row
        result[position] = row
    return result
