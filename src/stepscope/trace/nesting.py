"""Which slice stands inside which: parents of the slices of each lane.

A slice's parent is the innermost slice of its lane that is open when it starts; of two that start together the
longer is outside. Profilers round and clip, so a child may end after its parent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepscope.trace.intervals import Times

Rows = npt.NDArray[np.int64]


def nesting_order(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
    """Row order by lane, then start, then longest first: parents come before their children."""
    return np.lexsort((-durations, starts, lanes))


def parents(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
    """The parent's row for each slice, -1 where it has none; rows in any order, shape (n,).

    Strictly nested lanes are solved all at once, level by level; lanes with partial overlaps by a stack.
    """
    order = nesting_order(lanes, starts, durations)
    lane, start = lanes[order], starts[order]
    end = start + durations[order]
    result = _parents_by_level(lane, start, end)
    has_parent = result >= 0
    broken = has_parent & (end > end[np.where(has_parent, result, 0)])
    for bad_lane in np.unique(lane[broken]):
        first, last = np.searchsorted(lane, [bad_lane, bad_lane + 1])
        found = _parents_by_stack(start[first:last], end[first:last])
        result[first:last] = np.where(found >= 0, found + first, -1)
    parent = np.full(len(order), -1, np.int64)
    parent[order] = np.where(result >= 0, order[result], -1)
    return parent


def _parents_by_level(lane: npt.NDArray[np.int32], start: Times, end: Times) -> Rows:
    """Parents of strictly nested slices given in nesting order; wrong where slices partly overlap."""
    count = len(start)
    # Doubled times let a slice of no length end after it starts, and before anything longer that starts with it.
    begins = start * 2
    finishes = np.maximum(end * 2, begins + 1)
    finish_order = np.lexsort((finishes, lane))
    closed = _rank_per_lane(lane, begins, lane[finish_order], finishes[finish_order])
    first_of_lane = np.searchsorted(lane, lane)
    depth = np.arange(count) - first_of_lane - closed
    result = np.full(count, -1, np.int64)
    previous = np.flatnonzero(depth == 0)
    for level in range(1, int(depth.max(initial=0)) + 1):
        current = np.flatnonzero(depth == level)
        if previous.size:
            found = np.searchsorted(previous, current) - 1
            candidate = previous[np.maximum(found, 0)]
            valid = (found >= 0) & (lane[candidate] == lane[current])
            result[current] = np.where(valid, candidate, -1)
        previous = current
    return result


def _rank_per_lane(
    lane: npt.NDArray[np.int32], begins: Times, end_lane: npt.NDArray[np.int32], finishes: Times
) -> Rows:
    """For each begin, how many slices of its lane had finished by then."""
    result = np.empty(len(begins), np.int64)
    for number in np.unique(lane):
        first, last = np.searchsorted(lane, [number, number + 1])
        low, high = np.searchsorted(end_lane, [number, number + 1])
        result[first:last] = np.searchsorted(finishes[low:high], begins[first:last], side="right")
    return result


def _parents_by_stack(start: Times, end: Times) -> Rows:
    """Parents of the slices of one lane in nesting order, whatever their overlaps."""
    found: list[int] = []
    stack: list[int] = []
    starts, ends = start.tolist(), end.tolist()
    for row, begin in enumerate(starts):
        while stack and ends[stack[-1]] <= begin and not (starts[stack[-1]] == begin == ends[stack[-1]]):
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(row)
    return np.array(found, np.int64)


def clipped_ends(parent: Rows, starts: Times, durations: Times) -> Times:
    """Each slice's end, cut at the ends of all slices around it; shape (n,)."""
    ends = starts + durations
    above = parent.copy()
    while (active := np.flatnonzero(above >= 0)).size:
        ends[active] = np.minimum(ends[active], (starts + durations)[above[active]])
        above[active] = parent[above[active]]
    return np.asarray(np.maximum(ends, starts), np.int64)


def enclosing(parent: Rows, starts: Times, durations: Times) -> Rows:
    """The nearest slice around each that also covers most of it, -1 for none; shape (n,).

    A slice that outlives its parent, as frames that were open when a profiler started do, is not that parent's doing.
    """
    ends = starts + durations
    middle = starts + durations // 2
    around = parent.copy()
    while True:
        above = np.flatnonzero(around >= 0)
        above = above[ends[around[above]] < middle[above]]
        if not above.size:
            return around
        around[above] = parent[around[above]]


def innermost_at(
    query_lanes: npt.NDArray[np.int32],
    query_times: Times,
    lanes: npt.NDArray[np.int32],
    starts: Times,
    durations: Times,
    parent: Rows,
    *,
    closed: bool = True,
) -> Rows:
    """Row of the innermost slice open at each time on its lane, -1 where none is; shape of `query_times`.

    Args:
        query_lanes, query_times: the questions, shape (m,).
        lanes, starts, durations, parent: the slices, as `parents` takes and gives them.
        closed: a slice of no length is open at its own time; if false, slices are half-open and it never is.
    """
    order = nesting_order(lanes, starts, durations)
    ordered_lanes = lanes[order]
    result = np.full(len(query_times), -1, np.int64)
    for number in np.unique(query_lanes):
        asked = query_lanes == number
        first, last = np.searchsorted(ordered_lanes, [number, number + 1])
        found = np.searchsorted(starts[order[first:last]], query_times[asked], side="right") - 1
        result[asked] = np.where(found >= 0, order[first + np.maximum(found, 0)], -1) if last > first else -1
    ends = starts + durations
    while True:
        over = np.flatnonzero(result >= 0)
        past = ends[result[over]] <= query_times[over]
        over = over[past & (starts[result[over]] < query_times[over]) if closed else past]
        if not over.size:
            return result
        result[over] = parent[result[over]]
