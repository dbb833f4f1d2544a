"""Host time that is stretched or shortened in places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepscope.trace.intervals import Times

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostScale:
    """Factors on host time; arrays of shape (n,). Where intervals overlap their factors are multiplied.

    Attributes:
        lane: the thread.
        start, end: nanoseconds, measured.
        factor: by which the time of the interval is multiplied, at least 0.
    """

    lane: npt.NDArray[np.int32]
    start: Times
    end: Times
    factor: Floats

    @classmethod
    def none(cls) -> HostScale:
        """Everything as measured."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing.astype(np.int32), nothing, nothing, nothing.astype(np.float64))

    def with_intervals(self, lanes: npt.NDArray[np.int32], starts: Times, ends: Times, factors: Floats) -> HostScale:
        """These intervals in addition; empty ones are left out."""
        some = ends > starts
        return HostScale(
            np.concatenate([self.lane, lanes[some]]).astype(np.int32),
            np.concatenate([self.start, starts[some]]),
            np.concatenate([self.end, ends[some]]),
            np.concatenate([self.factor, np.maximum(factors[some], 0.0)]),
        )

    def after(self, moment: int) -> HostScale:
        """What of it comes after a moment."""
        some = self.end > moment
        return HostScale(self.lane[some], np.maximum(self.start[some], moment), self.end[some], self.factor[some])

    def added_ns(self) -> float:
        """How much longer threads take, all of them together; infinite or not a number where it overflows."""
        added = 0.0
        for lane in np.unique(self.lane).tolist():
            _, saved = self._saved_by(lane)
            added += float(np.maximum(-np.diff(saved), 0.0).sum())
        return added

    def length(self, lanes: npt.NDArray[np.int32], starts: Times, ends: Times) -> Times:
        """How long each interval of a thread's measured time then takes, nanoseconds; shape (n,)."""
        result: Times = np.array(ends - starts, np.int64)
        for lane in np.unique(self.lane).tolist():
            mine = np.flatnonzero(lanes == lane)
            if len(mine):
                times, saved = self._saved_by(lane)
                less = np.interp(ends[mine], times, saved) - np.interp(starts[mine], times, saved)
                result[mine] -= np.rint(less).astype(np.int64)
        return result

    def _saved_by(self, lane: int) -> tuple[Floats, Floats]:
        """Break points of the thread's time, and how much time was saved until then."""
        its = self.lane == lane
        start, end, factor = self.start[its], self.end[its], self.factor[its]
        gone = factor <= 0.0
        logarithm = np.log(np.where(gone, 1.0, factor))
        times = np.concatenate([start, end])
        order = np.argsort(times, kind="stable")
        removed = np.cumsum(np.concatenate([gone, -gone.astype(np.int64)])[order])
        scale = np.exp(np.cumsum(np.concatenate([logarithm, -logarithm])[order]))
        share = np.where(removed > 0, 1.0, 1.0 - scale)
        times = times[order]
        saved = np.concatenate([[0.0], np.cumsum(share[:-1] * np.diff(times))])
        return times.astype(np.float64), saved
