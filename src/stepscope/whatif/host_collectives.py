"""Collectives that a backend of the host's own runs, such as gloo: work that threads wait for, without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import HostActivity
from stepscope.trace import Trace
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.graph import Durations, Stretches, Works
from stepscope.whatif.host_waits import Waits, is_host_collective

SOON_NS: Final = 100_000
"""A thread that goes on so soon after a collective's end has waited for it,"""
SOON_SHARE: Final = 0.1
"""or within this share of the time for which it was silent while the collective ran."""
LEAST_WAIT_NS: Final = 20_000


@dataclass(frozen=True, slots=True)
class HostCollectives:
    """Collectives on threads of their own; arrays of shape (n,), in order of time.

    Attributes:
        row: in `annotations`.
        lane: the thread that runs it.
        start, end: nanoseconds.
        giver: the main thread of its process.
        given: the last moment before the start at which the main thread did something.
        paused, resumed: between which the main thread was silent and waited for the end; -1 where it did not wait.
    """

    row: Rows
    lane: Rows
    start: Times
    end: Times
    giver: Rows
    given: Times
    paused: Times
    resumed: Times

    def waits(self, first: int) -> Waits:
        """The main threads' waits, of the works that are numbered from `first` on; the last in each pause counts."""
        order = np.lexsort((-self.end, self.resumed))
        order = order[self.resumed[order] >= 0]
        chosen = order[np.unique(self.resumed[order], return_index=True)[1]]
        paused, resumed = self.paused[chosen], self.resumed[chosen]
        running = self.end[chosen] - np.maximum(self.start[chosen], paused)
        own = np.maximum(resumed - paused - running, 0)
        none = np.full(len(chosen), -1, np.int64)
        return Waits(none, self.giver[chosen].astype(np.int32), paused, resumed, own, first + chosen)

    def works(self, stretches: Stretches, first: int, queues: int) -> Works:
        """One work each, numbered from `first` on, in queues behind the devices': one a thread."""
        stretch = stretches.at(self.giver.astype(np.int32), self.given)
        previous = np.full(len(self.start), -1, np.int64)
        latest: dict[int, int] = {}
        for number, lane in enumerate(self.lane.tolist()):
            previous[number] = latest.get(lane, -1)
            latest[lane] = number
        queue = queues + np.unique(self.lane, return_inverse=True)[1].astype(np.int64)
        before = np.where(previous >= 0, self.end[previous], np.iinfo(np.int64).min)
        held = before > self.given  # by the collective before it
        latency: Durations = np.where(held, 0, self.start - self.given)
        gap: Durations = np.where(held, self.start - np.where(held, before, 0), 0)
        known = stretch >= 0
        return Works(
            self.start,
            self.end - self.start,
            queue,
            stretch,
            np.where(known, self.given, np.iinfo(np.int64).min),
            np.where(known, latency, 0),
            np.where(previous >= 0, previous + first, -1),
            gap,
        )


def host_collectives(trace: Trace, activity: HostActivity) -> HostCollectives:
    """Every collective that a thread other than its process's main thread runs."""
    processes = dict(trace.lanes.select("lane", "process").iter_rows())
    mains = {lane: activity.main_lanes.get(process, lane) for lane, process in processes.items()}
    rows = trace.annotations.with_row_index("row").filter(pl.Series(is_host_collective(trace), dtype=pl.Boolean))
    rows = rows.with_columns(main=pl.col("lane").replace_strict(mains, default=-1, return_dtype=pl.Int64))
    rows = rows.filter((pl.col("main") >= 0) & (pl.col("main") != pl.col("lane"))).sort("start_ns", "row")
    start, main = rows["start_ns"].to_numpy(), rows["main"].to_numpy()
    end = start + rows["duration_ns"].to_numpy()
    given, paused, resumed = start.copy(), np.full(len(start), -1, np.int64), np.full(len(start), -1, np.int64)
    for lane in np.unique(main).tolist():
        mine = np.flatnonzero(main == lane)
        timeline = activity.timelines.get(lane)
        if timeline is None or len(timeline.times) < 2:
            continue
        times = timeline.times[1:]
        begun = np.searchsorted(times, start[mine], side="right")
        given[mine] = np.where(begun > 0, times[np.maximum(begun - 1, 0)], start[mine])
        following = np.searchsorted(times, end[mine], side="left")
        inside = (following > 0) & (following < len(times))
        silent, again = times[np.maximum(following - 1, 0)], times[np.minimum(following, len(times) - 1)]
        running = end[mine] - np.maximum(silent, start[mine])
        soon = again - end[mine] <= np.maximum(SOON_NS, SOON_SHARE * running)
        waited = inside & soon & (running >= LEAST_WAIT_NS)
        paused[mine], resumed[mine] = np.where(waited, silent, -1), np.where(waited, again, -1)
    lanes = rows["lane"].cast(pl.Int64).to_numpy()
    return HostCollectives(rows["row"].to_numpy().astype(np.int64), lanes, start, end, main, given, paused, resumed)
