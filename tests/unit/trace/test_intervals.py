"""Exact arithmetic on sets of intervals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from stepscope.trace.window import IntervalSet, union

Pairs = list[tuple[int, int]]


def times(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def made_of(pairs: Pairs) -> IntervalSet:
    return union(times(*(start for start, _ in pairs)), times(*(end for _, end in pairs)))


def pairs(intervals: IntervalSet) -> Pairs:
    return list(zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True))


def test_the_empty_set() -> None:
    nothing = made_of([])

    assert pairs(nothing) == []
    assert nothing.total_ns == 0
    assert pairs(nothing.gaps()) == []
    assert pairs(nothing.clip(0, 10)) == []
    assert pairs(nothing.complement(3, 10)) == [(3, 10)]
    assert nothing.covered_until(times(0, 5)).tolist() == [0, 0]
    assert nothing.overlap_ns(made_of([(0, 10)])) == 0
    assert made_of([(0, 10)]).overlap_ns(nothing) == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([(5, 8)], [(5, 8)]),
        ([(5, 8), (1, 3)], [(1, 3), (5, 8)]),
        ([(1, 5), (5, 8)], [(1, 8)]),
        ([(1, 5), (3, 8)], [(1, 8)]),
        ([(1, 9), (3, 4), (5, 6)], [(1, 9)]),
        ([(1, 2), (1, 2)], [(1, 2)]),
        ([(4, 4)], [(4, 4)]),
        ([(1, 9), (4, 4)], [(1, 9)]),
        ([(1, 4), (4, 4), (6, 6)], [(1, 4), (6, 6)]),
    ],
    ids=["one", "unsorted", "touching", "overlapping", "inside", "equal", "point", "point inside", "points beside"],
)
def test_union(given: Pairs, expected: Pairs) -> None:
    assert pairs(made_of(given)) == expected


def test_gaps_and_complement() -> None:
    busy = made_of([(10, 20), (30, 40)])

    assert pairs(busy.gaps()) == [(20, 30)]
    assert pairs(busy.complement(0, 50)) == [(0, 10), (20, 30), (40, 50)]
    assert pairs(busy.complement(10, 40)) == [(20, 30)]
    assert pairs(busy.complement(15, 18)) == []
    assert pairs(busy.complement(22, 25)) == [(22, 25)]


def test_clip_cuts_at_the_edges() -> None:
    busy = made_of([(10, 20), (30, 40)])

    assert pairs(busy.clip(15, 35)) == [(15, 20), (30, 35)]
    assert pairs(busy.clip(20, 30)) == []


def test_how_much_lies_before() -> None:
    busy = made_of([(10, 20), (30, 40)])

    assert busy.covered_until(times(0, 10, 15, 20, 25, 30, 31, 40, 99)).tolist() == [0, 0, 5, 10, 10, 10, 11, 20, 20]
    assert busy.overlap_of(times(0, 15, 21), times(99, 35, 29)).tolist() == [20, 10, 0]


def test_overlap_of_two_sets() -> None:
    assert made_of([(0, 10), (20, 30)]).overlap_ns(made_of([(5, 25), (28, 29)])) == 5 + 5 + 1


def test_times_beyond_what_a_double_holds_stay_exact() -> None:
    large = 1_751_410_836_000_000_001

    assert made_of([(large, large + 3), (large + 2, large + 5)]).total_ns == 5
