"""Parents of slices, from their times alone."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.trace.nesting import enclosing, innermost_at, parents

Slice = tuple[int, int]


def parents_of(slices: list[Slice], lanes: list[int] | None = None) -> list[int]:
    starts, durations = (np.array([pair[side] for pair in slices], np.int64) for side in (0, 1))
    found: list[int] = parents(np.array(lanes or [0] * len(slices), np.int32), starts, durations).tolist()
    return found


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([], []),
        ([(0, 10)], [-1]),
        ([(0, 10), (2, 3), (3, 1), (6, 2)], [-1, 0, 1, 0]),
        ([(6, 2), (3, 1), (2, 3), (0, 10)], [3, 2, 3, -1]),
        ([(0, 10), (10, 5)], [-1, -1]),
        ([(0, 5), (0, 10)], [1, -1]),
        ([(0, 10), (5, 10)], [-1, 0]),
        ([(0, 10), (5, 10), (12, 1)], [-1, 0, 1]),
        ([(0, 10), (4, 0)], [-1, 0]),
        ([(0, 10), (10, 0)], [-1, -1]),
        ([(0, 10), (4, 0), (4, 3)], [-1, 2, 0]),
        ([(4, 0), (4, 0)], [-1, 0]),
    ],
    ids=[
        "none", "one", "nested", "in any order", "one after the other", "the longer is outside", "partial overlap",
        "inside what overlaps", "point inside", "point at the end", "point where another begins", "equal points",
    ],
)  # fmt: skip
def test_parents(slices: list[Slice], expected: list[int]) -> None:
    assert parents_of(slices) == expected


def test_lanes_do_not_mix() -> None:
    assert parents_of([(0, 10), (2, 3), (3, 1)], [0, 1, 0]) == [-1, -1, 0]


def test_slices_that_are_nested_deeper_than_any_programs() -> None:
    deep, points = 6_000, 1_000
    slices = [(row, 2 * (deep - row)) for row in range(deep)] + [(20_000, 0)] * points
    # then: also what stands beside them, on a lane of its own, has its parent
    found = parents_of([*slices, (0, 10), (2, 3)], [1] * len(slices) + [2, 2])
    assert found[:deep] == [-1, *range(deep - 1)]
    assert found[deep:] == [-1, *range(deep, deep + points - 1), -1, deep + points]


def test_a_frame_that_outlives_its_parent_is_not_its_doing() -> None:
    # given: a short slice, and a frame that begins in it and goes on for long
    starts, durations = np.array([0, 5], np.int64), np.array([10, 100], np.int64)
    above = np.array([-1, 0], np.int64)

    assert enclosing(above, starts, durations).tolist() == [-1, -1]


def test_the_innermost_slice_where_slices_meet() -> None:
    lanes = np.zeros(3, np.int32)
    starts, durations = np.array([0, 2, 5], np.int64), np.array([10, 3, 0], np.int64)
    tree = (lanes, starts, durations, np.array([-1, 0, 0], np.int64))
    asked = np.array([-1, 0, 2, 4, 5, 6, 10], np.int64)

    assert innermost_at(np.zeros(7, np.int32), asked, *tree).tolist() == [-1, 0, 1, 1, 2, 0, -1]
