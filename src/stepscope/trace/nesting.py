"""Nesting of slices: the parents of the slices of each lane; and columns that refer to rows, as arrays.

A slice's parent is the innermost slice of its lane that is open when it starts; of two that start together, the longer
one is outside. Profilers round and clip, so a child may end after its parent. In arrays, -1 represents a table's null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.window import Times, Window

Rows = npt.NDArray[np.int64]

_MOST_EFFORT: Final = 64
"""Maximum steps per slice, on average, to find the slices around it; deeper nesting is solved with a stack."""
_ROUND_COSTS: Final = 500
"""Fixed cost of one round, in steps."""
_ROUNDS: Final = 64
"""Rounds for all slices at once; the few slices left after that are solved one by one."""


def nesting_order(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
    """Return the rows ordered by lane, then start, then longest first, so that parents precede their children."""
    if _are_in_order(lanes, starts, durations):
        return np.arange(len(lanes))
    return np.lexsort((-durations, starts, lanes))


def _are_in_order(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> bool:
    if not len(lanes) or lanes[0] != lanes[-1] or (lanes != lanes[0]).any():
        return False
    later = np.diff(starts)
    return bool((later >= 0).all()) and not ((later == 0) & (np.diff(durations) > 0)).any()


def parents(lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
    """Return each slice's parent row, -1 for none; rows in any order, shape (n,).

    All slices of a lane are solved at once, or with a stack if that takes too many steps.
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
    """Parents of one lane's slices in nesting order: the last slice before each that is still open."""
    count = len(start)
    if not count:
        return np.zeros(0, np.int64)
    # Doubled times let a zero-length slice end after it starts, and before longer slices that start with it.
    begins = start * 2
    finishes = np.maximum(end * 2, begins + 1)
    above = np.arange(-1, count - 1)
    above[1:][begins[1:] >= np.maximum.accumulate(finishes)[:-1]] = -1  # all earlier slices have ended
    rows = np.flatnonzero(above >= 0)
    asked, candidate = begins[rows], rows - 1
    effort = 0
    while (closed := np.flatnonzero(finishes[candidate] <= asked)).size:
        effort += len(closed) + _ROUND_COSTS
        if effort > _MOST_EFFORT * (count + _ROUND_COSTS):
            return _parents_by_stack(start, end)
        rows, asked = rows[closed], asked[closed]
        # Slices between this one and its candidate are closed, so continue from the candidate's own candidate.
        candidate = above[candidate[closed]]
        above[rows] = candidate
    return above


def _bounds_of_lanes(lane: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    bounds = [0, *(np.flatnonzero(np.diff(lane)) + 1).tolist(), len(lane)]
    return list(pairwise(bounds))


def by_level(depth: Rows) -> list[Rows]:
    """Return the rows of each depth from 0 on, in row order."""
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
    return [order[first:last] for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def depths(parent: Rows, known: Rows | None = None) -> Rows:
    """Return the number of slices around each slice; shape (n,).

    Args:
        known: those counted already: one where there is a parent, and those around all of these rows.
    """
    depth = (parent >= 0).astype(np.int64) if known is None else known.copy()
    above = parent.copy()
    active = np.flatnonzero(above >= 0)
    while active.size:
        over = above[active]
        depth[active] += depth[over]
        above[active] = above[over]
        active = active[above[active] >= 0]
    return depth


def inherit(own: Rows, around: Rows) -> Rows:
    """Return each slice's own value, or that of the nearest slice around it that has one; -1 means none."""
    result: Rows = own.copy()
    above = around.copy()
    active = np.flatnonzero((result < 0) & (above >= 0))
    while active.size:
        over = above[active]
        result[active] = result[over]
        above[active] = above[over]
        active = active[(result[active] < 0) & (above[active] >= 0)]
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
    """Return the nearest slice around each that also covers most of it, -1 for none; shape (n,).

    A slice that outlives its parent was not caused by it, such as frames that were open when the profiler started.
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
    """Return the row of the innermost slice open at each time on its lane, -1 for none; shape of `query_times`.

    A zero-length slice is open at its own time.

    Args:
        query_lanes, query_times: the queries, shape (m,).
        lanes, starts, durations, parent: the slices, as in `parents`.
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


class Nesting:
    """Slices that are added in the order of time, piece by piece; remembers those that later ones may be nested in.

    Attributes:
        count: slices added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lanes = np.zeros(0, np.int32)
        self._rows = self._starts = self._ends = self._parents = np.zeros(0, np.int64)
        self._of_lane: dict[int, Rows] = {}

    def add(self, lanes: npt.NDArray[np.int32], starts: Times, durations: Times) -> Rows:
        """Return the parent of each slice among all that were added, -1 for none.

        Args:
            lanes, starts, durations: by start, longest first; all start later than those added before.
        """
        self._forget_ended()
        held = len(self._rows)
        self._rows = np.append(self._rows, np.arange(self.count, self.count + len(starts)))
        self._lanes = np.append(self._lanes, lanes)
        self._starts, self._ends = np.append(self._starts, starts), np.append(self._ends, starts + durations)
        self._parents = np.full(len(self._rows), -1, np.int64)
        self._of_lane = {int(self._lanes[rows[0]]): rows for rows in rows_by_lane(self._lanes)}
        for rows in self._of_lane.values():
            found = _parents_at_once(self._starts[rows], self._ends[rows])
            self._parents[rows] = at(rows, found)
        self.count += len(starts)
        return at(self._rows, self._parents[held:])

    def innermost_at(self, lanes: npt.NDArray[np.int32], times: Times) -> Rows:
        """Return the innermost slice open at each time, -1 for none, as `innermost_at`; rows in any order.

        Times are at or after the start of the piece that was added last.
        """
        result = np.full(len(times), -1, np.int64)
        for asked in rows_by_lane(lanes):
            rows = self._of_lane.get(int(lanes[asked[0]]))
            if rows is not None:
                result[asked] = at(rows, np.searchsorted(self._starts[rows], times[asked], side="right") - 1)
        found = _first_open(result, times, np.maximum(self._ends, self._starts + 1), self._parents)
        return at(self._rows, found)

    def _forget_ended(self) -> None:
        """Keep slices that are open at the last start, and longer than all that began after them: possible parents."""
        kept = [np.zeros(0, np.int64)]
        now_ns = self._starts[-1] if len(self._starts) else 0
        for rows in self._of_lane.values():
            rows = rows[self._ends[rows] > now_ns]
            later = np.maximum.accumulate(self._ends[rows][::-1])[::-1]
            kept.append(rows[np.append(self._ends[rows][:-1] > later[1:], True)[: len(rows)]])
        place = np.sort(np.concatenate(kept))
        self._rows, self._lanes = self._rows[place], self._lanes[place]
        self._starts, self._ends = self._starts[place], self._ends[place]


def rows_by_lane(lanes: npt.NDArray[np.int32]) -> list[Rows]:
    """Return the rows of each lane, in order; no list if there are no rows."""
    small = len(lanes) > 0 and lanes.min() >= 0 and lanes.max() < 2**15
    order = np.argsort(lanes.astype(np.int16) if small else lanes, kind="stable")  # 16-bit keys sort five times faster
    ordered = lanes[order]
    return np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1) if len(lanes) else []


def open_after(rows: Rows, starts: Times, ends: Times, parent: Rows) -> tuple[Times, Rows]:
    """Return the times at which the innermost open slice of one lane changes, and that slice from each on, -1 for none.

    Args:
        rows: the lane's slices, where slices that start together are in nesting order.
        starts, ends, parent: of all slices; intervals are half-open, so zero-length slices are never open.
    """
    order = rows[np.lexsort((rows, starts[rows] - ends[rows], starts[rows]))]
    times = np.concatenate([ends[order], starts[order]])
    around = parent[order]
    if ((around >= 0) & (ends[order] > ends[np.maximum(around, 0)])).any():
        # If slices partly overlap, one may outlive its parent: search from the last one that began.
        times = np.sort(times)
        times = times[np.append(True, times[1:] != times[:-1])]  # np.unique takes ten times as long at this size
        candidates = order[np.searchsorted(starts[order], times, side="right") - 1]
    else:
        candidates = np.concatenate([around, order])
        # At equal times, ends come before starts, and the innermost start is last.
        sequence = np.argsort(times, kind="stable")
        times, candidates = times[sequence], candidates[sequence]
        last = np.append(times[1:] != times[:-1], np.ones(min(len(times), 1), np.bool_))
        times, candidates = times[last], candidates[last]
    return times, _first_open(candidates, times, ends, parent)


def _first_open(rows: Rows, times: Times, closing: Times, parent: Rows) -> Rows:
    """Return each row, or the nearest slice around it that closes after the row's time; -1 for none.

    Args:
        rows, times: where each climb begins, -1 for nowhere, and its time; shape (m,).
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
    # Deep nesting: closed slices stay closed, so in time order every climb shortens the later ones.
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


_T = TypeVar("_T")


def row_numbers(column: pl.Series) -> Rows:
    """Convert a column of row numbers to an array, -1 for null; shape (n,)."""
    numbers: Rows = column.cast(pl.Int64).fill_null(-1).to_numpy()
    return numbers


def nullable(rows: Rows) -> pl.Series:
    """Convert rows to a column of UInt32, null for -1."""
    numbers = pl.Series(rows, dtype=pl.Int64)
    return pl.select(pl.when(numbers >= 0).then(numbers).cast(pl.UInt32)).to_series()


def at(values: npt.NDArray[np.signedinteger[Any]], index: Rows) -> Rows:
    """Values at these positions, -1 for position -1."""
    if not len(values):
        return np.full(len(index), -1, np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], -1).astype(np.int64)


def gathered(table: pl.DataFrame, rows: Rows) -> pl.DataFrame:
    """Rows of a table, null for -1."""
    known = nullable(rows)
    return pl.DataFrame([table[name].gather(known) for name in table.columns])


def meeting(table: pl.DataFrame, rows: Rows, condition: pl.Expr) -> pl.DataFrame:
    """Those of these rows that meet a condition, with their `row`; nothing of the others is copied."""
    met = table.select(condition.fill_null(False)).to_series().to_numpy()
    rows = rows[met[rows]]
    return table[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64))


def inside(rows: Rows, parent: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row is one of these or nested in one; shape of `parent`."""
    own = np.full(len(parent), -1, np.int64)
    own[rows] = 1
    return inherit(own, parent) > 0


def containing(rows: Rows, parent: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row is one of these or has one nested in it; shape of `parent`."""
    result = np.zeros(len(parent), np.bool_)
    while len(rows):
        result[rows] = True
        rows = np.unique(parent[rows])
        rows = rows[rows >= 0]
        rows = rows[~result[rows]]
    return result


def outermost(rows: Rows, parent: Rows) -> Rows:
    """Rows that are not nested in another one of them."""
    return rows[at(inside(rows, parent).astype(np.int8), parent[rows]) <= 0]


def by_value(table: pl.DataFrame | pl.Series, number_of: Callable[..., int]) -> Rows:
    """Number each row, calling `number_of` once per distinct value in order of appearance; -1 for null."""
    table = table if isinstance(table, pl.DataFrame) else table.to_frame()
    different = table.unique(maintain_order=True)
    numbers = [-1 if set(row) == {None} else number_of(*row) for row in different.iter_rows()]
    known = different.with_columns(pl.Series("number", numbers, dtype=pl.Int64))
    return row_numbers(
        table.join(known, on=table.columns, how="left", nulls_equal=True, maintain_order="left")["number"]
    )


def conformed(table: pl.DataFrame, schema: Mapping[str, type[pl.DataType]]) -> pl.DataFrame:
    """Select and cast a table's columns to the schema, in its order."""
    return table.select(pl.col(name).cast(dtype) for name, dtype in schema.items())


def beginning_in(table: pl.DataFrame, window: Window | None) -> pl.DataFrame:
    """Rows that start in the window; all rows without a window."""
    if window is None:
        return table
    start = table["start_ns"]
    return those(table, ((start >= window.start_ns) & (start < window.end_ns)).fill_null(False).to_numpy())


def those(table: pl.DataFrame, wanted: npt.NDArray[np.bool_]) -> pl.DataFrame:
    """These rows; without a copy if they follow each other."""
    count = int(np.count_nonzero(wanted))
    first = int(wanted.argmax()) if count else 0
    return table.slice(first, count) if wanted[first : first + count].all() else table.filter(wanted)


class Numbering(Generic[_T]):
    """Assigns consecutive numbers from 0 to distinct things."""

    def __init__(self) -> None:
        self._numbers: dict[_T, int] = {}

    def __getitem__(self, thing: _T) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def words(self) -> tuple[_T, ...]:
        """The things in order of their numbers."""
        return tuple(self._numbers)
