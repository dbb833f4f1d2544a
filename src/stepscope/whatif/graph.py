"""Dependency graph of a trace: what had to happen before each piece of host and device work could begin.

Host threads are cut into stretches, in which a thread runs without waiting. A stretch begins when the previous one on
its thread has ended and, where the thread waited, when its wait was over. Device work begins when it was launched, the
previous work in its queue has ended, and the work of other queues that it waits for has ended. Every dependency has a
delay, chosen so that the replay of the unchanged graph reproduces the measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from stepscope.errors import UsageError
from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times

Floats = npt.NDArray[np.float64]


Record = TypeVar("Record")
"""A class whose slots are all arrays of shape (n,), such as `Edges`."""


def nothing(kind: type[Record]) -> Record:
    """Create a record without rows."""
    return kind(*(np.zeros(0, np.int64) for _ in fields(kind)))  # type: ignore[arg-type]


def concatenated(first: Record, *others: Record) -> Record:
    """Concatenate records of one class."""
    names = [each.name for each in fields(first)]  # type: ignore[arg-type]
    return type(first)(*(np.concatenate([getattr(part, name) for part in (first, *others)]) for name in names))


def selected(record: Record, which: npt.NDArray[np.bool_] | Rows) -> Record:
    """Select rows by a mask or indices."""
    return type(record)(*(getattr(record, each.name)[which] for each in fields(record)))  # type: ignore[arg-type]


def previous_in(queue: Rows, start: Times, end: Times) -> Rows:
    """For each row its predecessor in its queue, by start and then end; -1 for the first in a queue. Shape (n,)."""
    order = np.lexsort((end, start, queue))
    previous = np.full(len(order), -1, np.int64)
    same = queue[order][1:] == queue[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


@dataclass(frozen=True)
class HostScale:
    """Factors on host time; arrays of shape (n,). Factors of overlapping intervals multiply."""

    lane: npt.NDArray[np.int32]  # thread
    start: Times  # nanoseconds, measured
    end: Times  # nanoseconds, measured
    factor: Floats  # factor on the time of the interval, at least 0

    def with_intervals(self, lanes: npt.NDArray[np.int32], starts: Times, ends: Times, factors: Floats) -> HostScale:
        """Add these intervals; empty ones are left out."""
        some = ends > starts
        return HostScale(
            np.concatenate([self.lane, lanes[some]]).astype(np.int32),
            np.concatenate([self.start, starts[some]]),
            np.concatenate([self.end, ends[some]]),
            np.concatenate([self.factor, np.maximum(factors[some], 0.0)]),
        )

    def after(self, moment: int) -> HostScale:
        """Keep the part after this time."""
        some = self.end > moment
        return HostScale(self.lane[some], np.maximum(self.start[some], moment), self.end[some], self.factor[some])

    def added_ns(self) -> float:
        """Total time added to all threads; infinite or not-a-number on overflow."""
        added = 0.0
        for _, saved in self._saved.values():
            added += float(np.maximum(-np.diff(saved), 0.0).sum())
        return added

    def length(self, lanes: npt.NDArray[np.int32], starts: Times, ends: Times) -> Times:
        """Scaled length of each interval of a thread's measured time, nanoseconds; shape (n,)."""
        result: Times = np.array(ends - starts, np.int64)
        for lane, (times, saved) in self._saved.items():
            mine = np.flatnonzero(lanes == lane)
            if len(mine):
                less = np.interp(ends[mine], times, saved) - np.interp(starts[mine], times, saved)
                result[mine] -= np.rint(less).astype(np.int64)
        return result

    @cached_property
    def _saved(self) -> dict[int, tuple[Floats, Floats]]:
        return {lane: self._saved_by(lane) for lane in np.unique(self.lane).tolist()}

    def _saved_by(self, lane: int) -> tuple[Floats, Floats]:
        """Break points of the thread's time, and the time saved up to each."""
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


LONGEST_NS: Final = 2**61
"""Longest time to replay (73 years): sums of longer ones would not fit in 64 bits."""
Durations = npt.NDArray[np.int64]
"""Nanoseconds; delays are negative where two clocks disagree."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Times in which host threads ran without waiting; arrays of shape (n,), sorted by lane and start."""

    lane: npt.NDArray[np.int32]  # thread
    start: Times  # nanoseconds, measured
    end: Times  # nanoseconds, measured
    previous: Rows  # previous stretch on the same thread, -1 for the first
    # shortest time from the end of the previous stretch to the start of this one, if nothing was waited for
    own_ns: Durations
    launch: Rows  # row in `launches` of the call that waited before it, -1 if there was none
    is_given: npt.NDArray[np.bool_]  # whether it begins with work handed over by another thread

    def at(self, lanes: npt.NDArray[np.int32], times: Times) -> Rows:
        """For each time the stretch of that thread at or before it, -1 before the first."""
        found = np.full(len(times), -1, np.int64)
        for lane in np.unique(lanes).tolist():
            mine, its = np.flatnonzero(lanes == lane), np.flatnonzero(self.lane == lane)
            if len(its):
                position = np.searchsorted(self.start[its], times[mine], side="right") - 1
                found[mine] = np.where(position >= 0, its[np.maximum(position, 0)], -1)
        return found


@dataclass(frozen=True, slots=True)
class Works:
    """Device work; arrays of shape (n,), as in `device_work`."""

    start: Times  # nanoseconds, measured
    duration: Durations  # nanoseconds, measured
    queue: Rows  # index of each queue of each device
    stretch: Rows  # host stretch that launched it, -1 if the launch is not in the trace
    launched: Times  # launch time, nanoseconds; undefined where `stretch` is -1
    latency_ns: Durations  # shortest time from launch to start
    previous: Rows  # previous work in its queue, -1 for the first
    gap_ns: Durations  # shortest time from the end of the previous work to its start


@dataclass(frozen=True, slots=True)
class Edges:
    """Dependencies beyond the order of threads and queues; arrays of shape (n,)."""

    source: Rows  # works or stretches, depending on the kind of edge
    target: Rows  # works or stretches, depending on the kind of edge
    delay_ns: Durations  # shortest time from the end of the source to the start of the target
    time: Times  # measured time that counts for sources on a host thread, nanoseconds; else undefined

    @classmethod
    def without_delay(cls, source: Rows, target: Rows) -> Edges:
        """Edges between works whose delay is 0 or not set yet."""
        zero = np.zeros(len(source), np.int64)
        return cls(source, target, zero, zero)

    def select(self, which: npt.NDArray[np.bool_]) -> Edges:
        return selected(self, which)

    def with_edges(self, other: Edges) -> Edges:
        return concatenated(self, other)


@dataclass(frozen=True)
class Graph:
    stretches: Stretches
    works: Works
    queue_waits: Edges  # work -> work of another queue
    host_waits: Edges  # work -> the stretch that began when a thread's wait for it ended
    handovers: Edges  # time on one thread -> stretch of another
    # index of the collective in which each work meets other ranks' works, -1 for none; shape (n,).
    # All works of a collective end together; a work's duration is then the rest after the last arrival
    rendezvous: Rows
    # rows in `annotations` of host-run collectives; each is a work after those of `device_work`, in this
    # order, and before any that a change adds
    on_host: Rows
    unexplained_ns: Durations  # delay of work beyond all its known dependencies, kept in replays
    dropped: int  # dependencies left out because the measured times contradict them
    host_scale: HostScale  # scaled host intervals
    work_scale: npt.NDArray[np.float64]  # factor on each work's duration, shape (n,)

    def with_host_time(
        self, lanes: npt.NDArray[np.int32], starts: Times, ends: Times, factors: npt.NDArray[np.float64]
    ) -> Graph:
        """Scale host time in these intervals; overlapping factors multiply."""
        return replace(self, host_scale=self.host_scale.with_intervals(lanes, starts, ends, factors))

    def with_work(self, rows: Rows, factors: npt.NDArray[np.float64] | float) -> Graph:
        """Scale these works; works scaled to 0 also lose the pauses before them."""
        scale = self.work_scale.copy()
        scale[rows] *= factors
        changed = replace(self, work_scale=scale)
        gone = rows[scale[rows] <= 0]
        return changed._with_pauses(gone, 0.0) if len(gone) else changed

    def with_fewer_works(self, rows: Rows, factor: float) -> Graph:
        """Scale these works and their queue's pauses before them."""
        return self.with_work(rows, factor)._with_pauses(rows, factor)

    def _with_pauses(self, rows: Rows, factor: float) -> Graph:
        """Scale the queue's pauses before these works; their unexplained part stays."""
        gap_ns = self.works.gap_ns.copy()
        own = np.maximum(gap_ns[rows] - self.unexplained_ns[rows], 0)
        less = np.clip(np.rint(own * (1 - factor)), -LONGEST_NS, LONGEST_NS).astype(np.int64)
        gap_ns[rows] = np.clip(gap_ns[rows] - less, -LONGEST_NS, LONGEST_NS)
        return replace(self, works=replace(self.works, gap_ns=gap_ns))

    def without_waits(self, launches: Rows) -> Graph:
        """Make these calls, rows of `launches`, return without waiting for a device."""
        stay = ~np.isin(self.stretches.launch[self.host_waits.target], launches)
        return replace(self, host_waits=self.host_waits.select(stay))

    @cached_property
    def order(self) -> Rows:
        """Topological order of all stretches (their index) and works (number of stretches + index)."""
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
        """Position in `order` of each stretch and each work."""
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(place))
        return place[: len(self.stretches.start)], place[len(self.stretches.start) :]

    @cached_property
    def _place_in_queue(self) -> Rows:
        order = np.lexsort((self.works.start + self.works.duration, self.works.start))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return place


@dataclass(frozen=True)
class Replay:
    """Times of everything in a graph; arrays as in the graph's works and stretches."""

    graph: Graph  # the replayed graph
    stretch_start: Times  # nanoseconds
    stretch_end: Times  # nanoseconds
    work_start: Times  # nanoseconds
    work_end: Times  # nanoseconds

    def host_times(self, lanes: npt.NDArray[np.int32], times: Times) -> Times:
        """Replayed time of measured times on a thread; shape (n,).

        Times within a wait keep their distance to its end, but not before its begin; times before a thread's first
        stretch stay where they are.
        """
        stretches = self.graph.stretches
        if not len(stretches.end):
            return times
        found = stretches.at(lanes, times)
        index = np.maximum(found, 0)
        inside = np.minimum(times, stretches.end[index])
        offset = self.graph.host_scale.length(stretches.lane[index], stretches.start[index], inside)
        result = self.stretch_start[index] + offset
        following = np.full(len(stretches.lane) + 1, -1, np.int64)
        has_previous = np.flatnonzero(stretches.previous >= 0)
        following[stretches.previous[has_previous]] = has_previous
        after = following[index]
        waiting = (times > stretches.end[index]) & (after >= 0)
        back = self.stretch_start[after] - (stretches.start[after] - times)
        result = np.where(waiting, np.maximum(result, back), result)
        beyond = (times > stretches.end[index]) & (after < 0)
        result = np.where(beyond, result + times - stretches.end[index], result)
        return np.where(found >= 0, result, times)


def replay(graph: Graph) -> Replay:
    """Compute when everything in the graph happens.

    Raises:
        UsageError: changes make it longer than LONGEST_NS.
    """
    stretches, works = graph.stretches, graph.works
    _check_length(graph)
    count = len(stretches.start)
    length = graph.host_scale.length(stretches.lane, stretches.start, stretches.end)
    own = scaled_own(graph)
    scaled = np.rint(works.duration * graph.work_scale).astype(np.int64)
    stretch_start = stretches.start.tolist()
    stretch_end = [0] * count
    work_start = works.start.tolist()
    work_end = [0] * len(work_start)
    launch_stretch, launch_offset = works.stretch.tolist(), launch_offsets(graph).tolist()
    previous_work, gap, duration = works.previous.tolist(), works.gap_ns.tolist(), scaled.tolist()
    previous_stretch, own_ns, lengths = stretches.previous.tolist(), own.tolist(), length.tolist()
    queue_waits, host_waits = sources_by_target(graph.queue_waits), sources_by_target(graph.host_waits)
    handovers = handovers_by_target(graph)
    meetings = _meetings(graph)
    for item in graph.order.tolist():
        if item >= count:
            work = item - count
            source = launch_stretch[work]
            before = previous_work[work]
            if source >= 0:
                time = stretch_start[source] + launch_offset[work]
                if before >= 0:
                    free = work_end[before] + gap[work]
                    if free > time:
                        time = free
            elif before >= 0:
                time = work_end[before] + gap[work]
            else:
                time = work_start[work]
            if work in queue_waits:
                for other, delay in queue_waits[work]:
                    time = max(time, work_end[other] + delay)
            work_start[work] = time
            work_end[work] = time + duration[work]
            if work in meetings:
                missing, members = meetings[work]
                missing.discard(work)
                if not missing:
                    last = max(work_start[member] for member in members)
                    for member in members:
                        work_end[member] = last + duration[member]
            continue
        before = previous_stretch[item]
        earliest = [] if before < 0 else [stretch_end[before] + own_ns[item]]
        if item in host_waits:
            earliest += [work_end[other] + delay for other, delay in host_waits[item]]
        if item in handovers:
            earliest += [stretch_start[other] + offset for other, offset in handovers[item]]
        if earliest:
            stretch_start[item] = max(earliest)
        stretch_end[item] = stretch_start[item] + lengths[item]
    return Replay(graph, *(np.array(times, np.int64) for times in (stretch_start, stretch_end, work_start, work_end)))


def _check_length(graph: Graph) -> None:
    """Raise UsageError if changes make the replay longer than LONGEST_NS."""
    if not len(graph.host_scale.lane) and (graph.work_scale <= 1).all():
        return
    with np.errstate(over="ignore", invalid="ignore"):
        work = np.sum(graph.works.duration * graph.work_scale)
        pauses = np.sum(np.maximum(graph.works.gap_ns, 0), dtype=np.float64)
        longest = work + pauses + graph.host_scale.added_ns()
    if not longest <= LONGEST_NS:  # also false for not-a-number
        raise UsageError("with these changes the steps would take longer than 70 years: use smaller factors")


def _meetings(graph: Graph) -> dict[int, tuple[set[int], list[int]]]:
    """For each work of a multi-rank collective: the shared set of its works yet to begin, and all of its works.

    They all end when the last has begun and the transfer is done.
    """
    collectives: dict[int, list[int]] = {}
    for work in np.flatnonzero(graph.rendezvous >= 0).tolist():
        collectives.setdefault(int(graph.rendezvous[work]), []).append(work)
    return {
        work: shared for members in collectives.values() for shared in [(set(members), members)] for work in members
    }


def scaled_own(graph: Graph) -> Times:
    """Least duration of calls where host time is scaled."""
    stretches = graph.stretches
    before = stretches.end[stretches.previous]
    whole = np.where(stretches.previous >= 0, stretches.start - before, 0)
    if not len(graph.host_scale.lane):
        return stretches.own_ns
    scaled = graph.host_scale.length(
        stretches.lane, np.where(stretches.previous >= 0, before, stretches.start), stretches.start
    )
    return np.where(whole > 0, np.rint(stretches.own_ns * (scaled / np.maximum(whole, 1))), 0).astype(np.int64)


def launch_offsets(graph: Graph) -> Times:
    """Offset from the start of the stretch to the earliest start of each work launched in it."""
    works, stretches = graph.works, graph.stretches
    if not len(stretches.start):
        return np.zeros(len(works.start), np.int64)
    index = np.maximum(works.stretch, 0)
    launched = np.clip(works.launched, stretches.start[index], stretches.end[index])
    offset = graph.host_scale.length(stretches.lane[index], stretches.start[index], launched)
    return offset + (works.launched - launched) + works.latency_ns


def sources_by_target(edges: Edges) -> dict[int, list[tuple[int, int]]]:
    """Sources of each target, with the delay from their end."""
    result: dict[int, list[tuple[int, int]]] = {}
    for source, target, delay in zip(
        edges.source.tolist(), edges.target.tolist(), edges.delay_ns.tolist(), strict=True
    ):
        result.setdefault(target, []).append((source, delay))
    return result


def handovers_by_target(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """Stretches that hand over to each stretch, with the time from their start, delay included."""
    edges, stretches = graph.handovers, graph.stretches
    if not len(edges.source):
        return {}
    time = np.clip(edges.time, stretches.start[edges.source], stretches.end[edges.source])
    offset = graph.host_scale.length(stretches.lane[edges.source], stretches.start[edges.source], time)
    return sources_by_target(Edges(edges.source, edges.target, offset + edges.delay_ns, edges.time))
