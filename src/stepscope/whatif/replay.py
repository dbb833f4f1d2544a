"""Replaying a dependency graph: when everything would begin and end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepscope.errors import UsageError
from stepscope.trace.intervals import Times
from stepscope.whatif.graph import LONGEST_NS, Edges, Graph


@dataclass(frozen=True)
class Replay:
    """When everything happens in a graph; arrays as in the graph's works and stretches.

    Attributes:
        graph: what was replayed.
        stretch_start, stretch_end: nanoseconds.
        work_start, work_end: nanoseconds.
    """

    graph: Graph
    stretch_start: Times
    stretch_end: Times
    work_start: Times
    work_end: Times

    def host_times(self, lanes: npt.NDArray[np.int32], times: Times) -> Times:
        """When each measured moment of a thread happens now; shape (n,).

        Moments while a thread waits come as long before the wait's end as measured, but not before its beginning;
        moments before a thread's first stretch stay where they are.
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
    """When everything in the graph happens.

    Raises:
        UsageError: changes make it so long that nanoseconds cannot count it.
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
    meetings = _Meetings(graph)
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
            if work in meetings.number_of:
                meetings.arrive(work, work_start, work_end)
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
    """Refuse what changes make longer than whole nanoseconds can tell."""
    if not len(graph.host_scale.lane) and (graph.work_scale <= 1).all():
        return
    with np.errstate(over="ignore", invalid="ignore"):
        work = np.sum(graph.works.duration * graph.work_scale)
        pauses = np.sum(np.maximum(graph.works.gap_ns, 0), dtype=np.float64)
        longest = work + pauses + graph.host_scale.added_ns()
    if not longest <= LONGEST_NS:  # neither is infinity times nothing
        raise UsageError("with these changes the steps would take longer than 70 years: take smaller factors")


class _Meetings:
    """Collectives that end when the last rank has arrived and the transfer is done."""

    def __init__(self, graph: Graph) -> None:
        members = np.flatnonzero(graph.rendezvous >= 0)
        numbers = graph.rendezvous[members]
        self.number_of = dict(zip(members.tolist(), numbers.tolist(), strict=True))
        self._members: dict[int, list[int]] = {}
        for work, number in self.number_of.items():
            self._members.setdefault(number, []).append(work)
        self._arrived: dict[int, int] = {}
        self._transfer = np.rint(graph.works.duration * graph.work_scale).astype(np.int64)

    def arrive(self, work: int, work_start: list[int], work_end: list[int]) -> None:
        """Note that a rank has arrived; when it is the last, all ends are known."""
        number = self.number_of[work]
        self._arrived[number] = self._arrived.get(number, 0) + 1
        members = self._members[number]
        if self._arrived[number] == len(members):
            last = max(work_start[member] for member in members)
            for member in members:
                work_end[member] = last + int(self._transfer[member])


def scaled_own(graph: Graph) -> Times:
    """How long calls take at least, where host time is scaled."""
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
    """From the start of the stretch to the earliest start of each work launched in it."""
    works, stretches = graph.works, graph.stretches
    if not len(stretches.start):
        return np.zeros(len(works.start), np.int64)
    index = np.maximum(works.stretch, 0)
    launched = np.clip(works.launched, stretches.start[index], stretches.end[index])
    offset = graph.host_scale.length(stretches.lane[index], stretches.start[index], launched)
    return offset + (works.launched - launched) + works.latency_ns


def sources_by_target(edges: Edges) -> dict[int, list[tuple[int, int]]]:
    """For each target its sources, each with the delay from its end."""
    result: dict[int, list[tuple[int, int]]] = {}
    for source, target, delay in zip(
        edges.source.tolist(), edges.target.tolist(), edges.delay_ns.tolist(), strict=True
    ):
        result.setdefault(target, []).append((source, delay))
    return result


def handovers_by_target(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """For each stretch those that hand over to it, each with the time from its start, delay included."""
    edges, stretches = graph.handovers, graph.stretches
    if not len(edges.source):
        return {}
    time = np.clip(edges.time, stretches.start[edges.source], stretches.end[edges.source])
    offset = graph.host_scale.length(stretches.lane[edges.source], stretches.start[edges.source], time)
    return sources_by_target(Edges(edges.source, edges.target, offset + edges.delay_ns, edges.time))
