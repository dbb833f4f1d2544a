"""Which slice stands inside which, against a stack that looks at one slice after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.trace.nesting import (
    Nesting,
    by_level,
    depths,
    enclosing,
    inherit,
    innermost_at,
    nesting_order,
    open_after,
    parents,
)


@dataclass(frozen=True)
class Slices:
    """Slices of several lanes with partial overlaps, points and equals, in any order."""

    lanes: list[int]
    starts: list[int]
    durations: list[int]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array(self.lanes, np.int32), np.array(self.starts, np.int64), np.array(self.durations, np.int64)


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 12)), max_size=14)
SLICES = ROWS.map(
    lambda rows: Slices(*(list(column) for column in zip(*rows, strict=True))) if rows else Slices([], [], [])
)


def is_open(start: int, duration: int, time: int) -> bool:
    """Whether a slice that began by `time` is open then; one of no length is at its own time."""
    return time < start + duration or (duration == 0 and time == start)


def brute_force_parents(slices: Slices) -> list[int]:
    """For each slice the last one before it in nesting order, on its lane, that is still open."""
    lanes, starts, durations = slices.arrays()
    order = nesting_order(lanes, starts, durations).tolist()
    found = [-1] * len(order)
    for place, row in enumerate(order):
        for before in order[:place]:
            same = slices.lanes[before] == slices.lanes[row]
            if same and is_open(slices.starts[before], slices.durations[before], slices.starts[row]):
                found[row] = before
    return found


@given(SLICES)
def test_parents_are_those_of_a_stack(slices: Slices) -> None:
    assert parents(*slices.arrays()).tolist() == brute_force_parents(slices)


@given(SLICES, st.integers(0, 2), st.integers(0, 34))
def test_the_innermost_slice_at_a_time(slices: Slices, lane: int, time: int) -> None:
    lanes, starts, durations = slices.arrays()
    order = nesting_order(lanes, starts, durations).tolist()
    begun = [row for row in order if slices.lanes[row] == lane and slices.starts[row] <= time]
    open_then = [row for row in begun if is_open(slices.starts[row], slices.durations[row], time)]
    question = (np.array([lane], np.int32), np.array([time], np.int64))

    found = innermost_at(*question, lanes, starts, durations, parents(lanes, starts, durations))

    assert found.tolist() == (open_then or [-1])[-1:]


@given(SLICES, st.sets(st.integers(0, 20)), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 34)), max_size=6))
def test_slices_that_come_in_pieces(slices: Slices, cuts: set[int], questions: list[tuple[int, int]]) -> None:
    lanes, starts, durations = slices.arrays()
    order = np.lexsort((-durations, starts))
    lanes, starts, durations = lanes[order], starts[order], durations[order]
    whole = parents(lanes, starts, durations)
    asked_lanes, times = (np.array(column) for column in zip(*(questions or [(0, 0)]), strict=True))
    asked_lanes = asked_lanes.astype(np.int32)
    expected = innermost_at(asked_lanes, times, lanes, starts, durations, whole)

    nesting, found = Nesting(), []
    answers = np.full(len(times), -1)
    for begin, end in pairwise([0, *sorted(cuts - {0}), 100]):
        rows = (starts >= begin) & (starts < end)
        if rows.any():
            found += nesting.add(lanes[rows], starts[rows], durations[rows]).tolist()
        asked = (times >= begin) & (times < end)
        answers[asked] = nesting.innermost_at(asked_lanes[asked], times[asked])

    assert found == whole.tolist()
    assert answers.tolist() == expected.tolist()


@given(SLICES)
def test_what_encloses_a_slice_covers_most_of_it(slices: Slices) -> None:
    lanes, starts, durations = slices.arrays()
    above = brute_force_parents(slices)
    expected = []
    for row, (start, duration) in enumerate(zip(slices.starts, slices.durations, strict=True)):
        around = above[row]
        while around >= 0 and slices.starts[around] + slices.durations[around] < start + duration // 2:
            around = above[around]
        expected.append(around)

    assert enclosing(parents(lanes, starts, durations), starts, durations).tolist() == expected


@given(SLICES)
def test_depths_levels_and_inheritance(slices: Slices) -> None:
    above = brute_force_parents(slices)
    around = [chain(above, row) for row in range(len(above))]
    own = [row if slices.durations[row] % 3 == 0 else -1 for row in range(len(above))]
    parent = np.array(above, np.int64)

    depth = depths(parent)

    assert depth.tolist() == [len(chain_of_row) for chain_of_row in around]
    assert [rows.tolist() for rows in by_level(depth)] == [
        [row for row in range(len(above)) if len(around[row]) == level] for level in range(depth.max(initial=-1) + 1)
    ]
    assert inherit(np.array(own, np.int64), parent).tolist() == [
        next((own[other] for other in [row, *around[row]] if own[other] >= 0), -1) for row in range(len(above))
    ]


@given(SLICES, st.integers(0, 2))
def test_what_is_open_after_each_change_on_a_lane(slices: Slices, lane: int) -> None:
    lanes, starts, durations = slices.arrays()
    order = nesting_order(lanes, starts, durations).tolist()
    mine = [row for row in order if slices.lanes[row] == lane]
    expected = []
    for time in sorted({time for row in mine for time in (starts[row], starts[row] + durations[row])}):
        covering = [row for row in mine if starts[row] <= time < starts[row] + durations[row]]
        expected.append((int(time), (covering or [-1])[-1]))

    tree = (starts, starts + durations, parents(lanes, starts, durations))
    times, innermost = open_after(np.flatnonzero(lanes == lane), *tree)

    assert list(zip(times.tolist(), innermost.tolist(), strict=True)) == expected


def chain(above: list[int], row: int) -> list[int]:
    """The rows around a row, the innermost first."""
    return [] if above[row] < 0 else [above[row], *chain(above, above[row])]
