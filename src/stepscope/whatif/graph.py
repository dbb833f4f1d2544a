"""The dependency graph of a trace: what had to happen before each piece of host and device work could begin.

Host threads are cut into stretches, in which a thread goes on without waiting for anybody. A stretch begins when the
one before it on its thread has ended and, where the thread waited, when what it waited for was there. Device work
begins when it was launched, when the work before it in its queue has ended, and when the work of other queues that it
waits for has. Every dependency has a delay, chosen so that the replay of the graph as it is gives the measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.arrays import concatenated
from stepscope.whatif.host_scale import HostScale

LONGEST_NS: Final = 2**61
"""What is longer, 73 years, is not replayed: sums of it would not fit into 64 bits."""
Durations = npt.NDArray[np.int64]
"""Nanoseconds; negative delays occur where two clocks disagree."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Where host threads went on without waiting; arrays of shape (n,), sorted by lane and start.

    Attributes:
        lane: the thread.
        start, end: nanoseconds, measured.
        previous: the stretch before on the same thread, -1 for a thread's first.
        own_ns: the shortest time from the end of the stretch before to the start of this one, were nothing waited for.
        launch: row in `launches` of the call that waited before it, -1 where there was none.
        is_given: whether it begins with work that another thread gave it.
    """

    lane: npt.NDArray[np.int32]
    start: Times
    end: Times
    previous: Rows
    own_ns: Durations
    launch: Rows
    is_given: npt.NDArray[np.bool_]

    def at(self, lanes: npt.NDArray[np.int32], times: Times) -> Rows:
        """For each moment the stretch of that thread that it falls in or after, -1 before the thread's first."""
        found = np.full(len(times), -1, np.int64)
        for lane in np.unique(lanes).tolist():
            mine, its = np.flatnonzero(lanes == lane), np.flatnonzero(self.lane == lane)
            if len(its):
                position = np.searchsorted(self.start[its], times[mine], side="right") - 1
                found[mine] = np.where(position >= 0, its[np.maximum(position, 0)], -1)
        return found


@dataclass(frozen=True, slots=True)
class Works:
    """What devices did; arrays of shape (n,), as in `device_work`.

    Attributes:
        start, duration: nanoseconds, measured.
        queue: a number for each queue of each device.
        stretch: the host stretch it was launched in, -1 where the launch is not in the trace.
        launched: when it was launched, nanoseconds; undefined where `stretch` is -1.
        latency_ns: the shortest time from launch to start.
        previous: the work before it in its queue, -1 for a queue's first.
        gap_ns: the shortest time from the end of the work before to its start.
    """

    start: Times
    duration: Durations
    queue: Rows
    stretch: Rows
    launched: Times
    latency_ns: Durations
    previous: Rows
    gap_ns: Durations


@dataclass(frozen=True, slots=True)
class Edges:
    """Dependencies beside the order of threads and queues; arrays of shape (n,).

    Attributes:
        source, target: indices of works or stretches, by the kind of edge.
        delay_ns: the shortest time from the end of the source to the start of the target.
        time: for sources on a host thread the moment that counts, nanoseconds, measured; else undefined.
    """

    source: Rows
    target: Rows
    delay_ns: Durations
    time: Times

    def select(self, which: npt.NDArray[np.bool_]) -> Edges:
        """The edges of this mask."""
        return Edges(self.source[which], self.target[which], self.delay_ns[which], self.time[which])

    def with_edges(self, other: Edges) -> Edges:
        """These edges and others."""
        return concatenated(self, other)

    @classmethod
    def none(cls) -> Edges:
        """No edges."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, nothing)


@dataclass(frozen=True)
class Graph:
    """What waited for what.

    Attributes:
        queue_waits: work -> work of another queue.
        host_waits: work -> the stretch that began when a thread was done waiting for it.
        handovers: moment of one thread -> stretch of another.
        rendezvous: for each work the number of the collective in which it meets other ranks' works, -1 for none; shape
            (n,). All works of a collective end together; a work's duration is then what remains after the last arrived.
        on_host: rows in `annotations` of collectives that the host runs; each is a work behind those of `device_work`,
            in this order, and before any that a change adds.
        unexplained_ns: time by which work began later than all its known dependencies allow; kept as a delay.
        dropped: dependencies that the measured times contradict, which were left out.
        host_scale: by how much host time is stretched where.
        work_scale: factor on each work's duration, shape (n,).
    """

    stretches: Stretches
    works: Works
    queue_waits: Edges
    host_waits: Edges
    handovers: Edges
    rendezvous: Rows
    on_host: Rows
    unexplained_ns: Durations
    dropped: int
    host_scale: HostScale
    work_scale: npt.NDArray[np.float64]

    def with_host_time(
        self, lanes: npt.NDArray[np.int32], starts: Times, ends: Times, factors: npt.NDArray[np.float64]
    ) -> Graph:
        """The graph in which host time in these intervals takes so many times as long; overlapping ones both count."""
        return replace(self, host_scale=self.host_scale.with_intervals(lanes, starts, ends, factors))

    def with_work(self, rows: Rows, factors: npt.NDArray[np.float64] | float) -> Graph:
        """The graph in which these works take so many times as long; those that take nothing leave no pause either."""
        scale = self.work_scale.copy()
        scale[rows] *= factors
        changed = replace(self, work_scale=scale)
        gone = rows[scale[rows] <= 0]
        return changed._with_pauses(gone, 0.0) if len(gone) else changed

    def with_fewer_works(self, rows: Rows, factor: float) -> Graph:
        """The graph in which these works and their queue's pauses before them take so many times as long."""
        return self.with_work(rows, factor)._with_pauses(rows, factor)

    def _with_pauses(self, rows: Rows, factor: float) -> Graph:
        """Pauses of the queue before these works take so many times as long; what nothing explains of them stays."""
        gap_ns = self.works.gap_ns.copy()
        own = np.maximum(gap_ns[rows] - self.unexplained_ns[rows], 0)
        less = np.clip(np.rint(own * (1 - factor)), -LONGEST_NS, LONGEST_NS).astype(np.int64)
        gap_ns[rows] = np.clip(gap_ns[rows] - less, -LONGEST_NS, LONGEST_NS)
        return replace(self, works=replace(self.works, gap_ns=gap_ns))

    def without_waits(self, launches: Rows) -> Graph:
        """The graph in which these calls, rows of `launches`, return without waiting for a device."""
        stay = ~np.isin(self.stretches.launch[self.host_waits.target], launches)
        return replace(self, host_waits=self.host_waits.select(stay))

    @cached_property
    def order(self) -> Rows:
        """All stretches (their index) and works (number of stretches + index) so that sources come before targets."""
        count = len(self.stretches.start)
        begin = np.full(count + 1, np.iinfo(np.int64).min)
        begin[:count] = self.stretches.start
        ready = np.maximum(self.works.start, begin[self.works.stretch])  # clocks may disagree
        key = np.concatenate([self.stretches.start, ready])
        is_work = np.concatenate([np.zeros(count, np.int8), np.ones(len(ready), np.int8)])
        position = np.concatenate([np.arange(count), self._place_in_queue])
        return np.lexsort((position, is_work, key))

    @property
    def places(self) -> tuple[Rows, Rows]:
        """For each stretch and for each work its place in `order`."""
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(place))
        return place[: len(self.stretches.start)], place[len(self.stretches.start) :]

    @cached_property
    def _place_in_queue(self) -> Rows:
        order = np.lexsort((self.works.start + self.works.duration, self.works.start))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return place
