"""Sets of intervals against the sets of their single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.trace.window import IntervalSet, union

LONGEST = 40
INTERVALS = st.lists(
    st.tuples(st.integers(0, LONGEST), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)
WINDOW = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)


def made_of(intervals: list[tuple[int, int]]) -> IntervalSet:
    starts, ends = (np.array([pair[side] for pair in intervals], np.int64) for side in (0, 1))
    return union(starts, ends)


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


def moments_of(intervals: IntervalSet) -> set[int]:
    return moments(list(zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True)))


@given(INTERVALS)
def test_a_union_is_sorted_disjoint_and_complete(intervals: list[tuple[int, int]]) -> None:
    joined = made_of(intervals)

    assert moments_of(joined) == moments(intervals)
    assert joined.total_ns == len(moments(intervals))
    assert (joined.starts[1:] > joined.ends[:-1]).all()


@given(INTERVALS, WINDOW)
def test_clip_and_complement_part_a_window(intervals: list[tuple[int, int]], window: list[int]) -> None:
    start, end = window
    joined = made_of(intervals)

    assert moments_of(joined.clip(start, end)) == moments(intervals) & set(range(start, end))
    assert moments_of(joined.complement(start, end)) == set(range(start, end)) - moments(intervals)
    assert joined.clip(start, end).total_ns + joined.complement(start, end).total_ns == end - start


@given(INTERVALS, INTERVALS)
def test_overlap_is_the_intersection(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert made_of(one).overlap_ns(made_of(other)) == len(moments(one) & moments(other))


@given(INTERVALS, st.integers(0, 60))
def test_covered_until_counts_what_lies_before(intervals: list[tuple[int, int]], time: int) -> None:
    covered = made_of(intervals).covered_until(np.array([time], np.int64))

    assert covered.tolist() == [len({moment for moment in moments(intervals) if moment < time})]
