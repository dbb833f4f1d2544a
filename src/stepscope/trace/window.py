"""Exact arithmetic on sets of time intervals, and windows of time and steps.

An interval set is a pair of int64 arrays `(starts, ends)`, in nanoseconds, sorted and disjoint, as returned by `union`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.errors import UsageError

Times: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IntervalSet:
    """Sorted, disjoint half-open intervals: arrays of shape (n,), int64 nanoseconds."""

    starts: Times
    ends: Times

    @property
    def total_ns(self) -> int:
        return int((self.ends - self.starts).sum())

    def covered_until(self, times: Times) -> Times:
        """Return the length of the set before each of `times`, in their shape."""
        if self.starts.size == 0:
            return np.zeros(times.shape, np.int64)
        lengths = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, times, side="right")
        inside = np.clip(times, None, self.ends[np.maximum(index - 1, 0)]) - self.starts[np.maximum(index - 1, 0)]
        return np.asarray(np.where(index == 0, 0, lengths[np.maximum(index - 1, 0)] + inside), np.int64)

    def overlap_of(self, starts: Times, ends: Times) -> Times:
        """Return the length of the set inside each interval [starts, ends); the intervals may overlap each other."""
        return self.covered_until(ends) - self.covered_until(starts)

    def overlap_ns(self, other: IntervalSet) -> int:
        """Return the length of the intersection of both sets."""
        return int(self.overlap_of(other.starts, other.ends).sum())

    def clip(self, start_ns: int, end_ns: int) -> IntervalSet:
        """Return the part of the set inside [start_ns, end_ns)."""
        keep = (self.ends > start_ns) & (self.starts < end_ns)
        return IntervalSet(np.clip(self.starts[keep], start_ns, None), np.clip(self.ends[keep], None, end_ns))

    def gaps(self) -> IntervalSet:
        return IntervalSet(self.ends[:-1], self.starts[1:])

    def complement(self, start_ns: int, end_ns: int) -> IntervalSet:
        """Return the part of [start_ns, end_ns) that the set does not cover, without empty intervals."""
        inside = self.clip(start_ns, end_ns)
        starts = np.concatenate([np.array([start_ns], np.int64), inside.ends])
        ends = np.concatenate([inside.starts, np.array([end_ns], np.int64)])
        keep = ends > starts
        return IntervalSet(starts[keep], ends[keep])


def union(starts: Times, ends: Times) -> IntervalSet:
    """Return the union of any intervals; touching ones are merged, and zero-length ones in gaps are kept as points."""
    if starts.size == 0:
        return IntervalSet(np.zeros(0, np.int64), np.zeros(0, np.int64))
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([np.ones(1, np.bool_), starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], np.ones(1, np.bool_)])
    return IntervalSet(starts[first], reach[last])


_UNITS_NS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "": 1_000_000_000}
_TIME = re.compile(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*(ns|us|ms|s|)\s*")


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval [start_ns, end_ns) in nanoseconds from the start of the trace."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse "2s:4s", "150ms:" or ":1.5s"; a number without a unit is in seconds, and an open end is unbounded.

        Raises UsageError.
        """
        first, colon, last = text.partition(":")
        if not colon:
            raise UsageError(f"a window is START:END, such as 2s:4s or 150ms:, not {text!r}")
        window = cls(_time_ns(first, 0, text), _time_ns(last, 2**62, text))
        if window.duration_ns <= 0:
            raise UsageError(f"the window {text!r} ends before it begins")
        return window


def _time_ns(text: str, default: int, whole: str) -> int:
    if not text.strip():
        return default
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} in the window {whole!r} is not a time: write a number with ns, us, ms or s")
    return min(int(Decimal(match[1]) * _UNITS_NS[match[2]]), 2**62)


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps first to last, inclusive, by the numbers in their annotations."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Parse a range such as "3", "3:5", "3:" or ":5"; raises UsageError."""
        match = re.fullmatch(r"\s*(\d{0,18})\s*(?:(:)\s*(\d{0,18})\s*)?", text)
        if match is None or not (match[1] or match[3]):
            raise UsageError(f"steps are FIRST:LAST, such as 3:5, or one number, not {text!r}")
        first = int(match[1]) if match[1] else 0
        last = int(match[3]) if match[3] else (2**62 if match[2] else first)
        if last < first:
            raise UsageError(f"the steps {text!r} end before they begin")
        return cls(first, last)
