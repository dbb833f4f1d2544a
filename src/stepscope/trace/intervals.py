"""Exact arithmetic on sets of time intervals.

An interval set is a pair of int64 arrays `(starts, ends)`, in nanoseconds, sorted and disjoint, as `union` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Times: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IntervalSet:
    """Sorted, disjoint half-open intervals.

    Attributes:
        starts: shape (n,), int64 nanoseconds.
        ends: shape (n,), int64 nanoseconds.
    """

    starts: Times
    ends: Times

    @property
    def total_ns(self) -> int:
        """Sum of the lengths."""
        return int((self.ends - self.starts).sum())

    def covered_until(self, times: Times) -> Times:
        """How much of the set lies before each of `times`; shape as `times`."""
        if self.starts.size == 0:
            return np.zeros(times.shape, np.int64)
        lengths = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, times, side="right")
        inside = np.clip(times, None, self.ends[np.maximum(index - 1, 0)]) - self.starts[np.maximum(index - 1, 0)]
        return np.asarray(np.where(index == 0, 0, lengths[np.maximum(index - 1, 0)] + inside), np.int64)

    def overlap_of(self, starts: Times, ends: Times) -> Times:
        """How much of the set lies in each interval [starts, ends); the intervals may overlap each other."""
        return self.covered_until(ends) - self.covered_until(starts)

    def overlap_ns(self, other: IntervalSet) -> int:
        """Length of what both sets cover."""
        return int(self.overlap_of(other.starts, other.ends).sum())

    def clip(self, start_ns: int, end_ns: int) -> IntervalSet:
        """The part of the set inside [start_ns, end_ns)."""
        keep = (self.ends > start_ns) & (self.starts < end_ns)
        return IntervalSet(np.clip(self.starts[keep], start_ns, None), np.clip(self.ends[keep], None, end_ns))

    def gaps(self) -> IntervalSet:
        """What lies between the intervals of the set."""
        return IntervalSet(self.ends[:-1], self.starts[1:])

    def complement(self, start_ns: int, end_ns: int) -> IntervalSet:
        """What of [start_ns, end_ns) the set does not cover, without empty intervals."""
        inside = self.clip(start_ns, end_ns)
        starts = np.concatenate([np.array([start_ns], np.int64), inside.ends])
        ends = np.concatenate([inside.starts, np.array([end_ns], np.int64)])
        keep = ends > starts
        return IntervalSet(starts[keep], ends[keep])


def union(starts: Times, ends: Times) -> IntervalSet:
    """The union of any intervals; touching ones are joined. Intervals of no length are kept as points in gaps."""
    if starts.size == 0:
        return IntervalSet(np.zeros(0, np.int64), np.zeros(0, np.int64))
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([np.ones(1, np.bool_), starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], np.ones(1, np.bool_)])
    return IntervalSet(starts[first], reach[last])
