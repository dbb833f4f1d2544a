"""Walking back through a replay from the end of the steps, always to what was waited for longest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stepscope.whatif.experiment import Experiment
from stepscope.whatif.replay import Replay, handovers_by_target, launch_offsets, scaled_own, sources_by_target


class _OnDevice(NamedTuple):
    work: int


class _OnHost(NamedTuple):
    """A moment in a stretch, measured; the path reaches the thread there."""

    stretch: int
    moment: int


_Point = _OnDevice | _OnHost | None


@dataclass
class Chain:
    """What lies on the path, the last first.

    Attributes:
        begin: when the span begins, nanoseconds of the replay; what lies before it counts from there on.
        works: row in `device_work`, start, end.
        delays: row in `device_work` of the work that began after the delay, start, end.
        host: lane, measured start and end, start and end in the replay.
    """

    done: Replay
    begin: int
    works: list[tuple[int, int, int]] = field(default_factory=list)
    delays: list[tuple[int, int, int]] = field(default_factory=list)
    host: list[tuple[int, int, int, int, int]] = field(default_factory=list)


def walk_back(experiment: Experiment, done: Replay) -> Chain:
    """The chain from the end of the span to its beginning."""
    walker = _Walker(experiment, done)
    point = walker.end
    for _ in range(len(done.graph.order) + 1):  # each is come to once at most
        if point is None:
            break
        point = walker.before_work(point.work) if isinstance(point, _OnDevice) else walker.before_moment(*point)
    return walker.chain


class _Walker:
    def __init__(self, experiment: Experiment, done: Replay) -> None:
        self._experiment, self._done = experiment, done
        graph = done.graph
        self._works, self._stretches, self._edges = graph.works, graph.stretches, graph.handovers
        self._queue_waits = sources_by_target(graph.queue_waits)
        self._host_waits = sources_by_target(graph.host_waits)
        self._handovers = handovers_by_target(graph)
        self._numbers: dict[int, list[int]] = {}
        for number, target in enumerate(graph.handovers.target.tolist()):
            self._numbers.setdefault(target, []).append(number)
        self._offsets, self._own = launch_offsets(graph), scaled_own(graph)
        begin, self.end = self._span()
        self.chain = Chain(done, begin)

        self._until = np.iinfo(np.int64).max  # where two clocks disagree, what comes before would overlap

    def _take_host(self, lane: int, measured: tuple[int, int], start: int, end: int) -> None:
        over = max(end - self._until, 0)
        self.chain.host.append((lane, measured[0], max(measured[1] - over, measured[0]), start, end - over))
        self._until = min(self._until, start)

    def _span(self) -> tuple[int, _Point]:
        """When the span begins in the replay, and the point at which it ends."""
        experiment, done = self._experiment, self._done
        works = experiment.works
        last = int(works[np.argmax(done.work_end[works])]) if len(works) else -1
        if experiment.device is not None and not experiment.steps.height:
            return (int(done.work_start[works].min()), _OnDevice(last)) if last >= 0 else (0, None)
        begin, end = experiment.host_ends(done)
        if last >= 0:
            first, finish = int(done.work_start[works].min()), int(done.work_end[last])
            if finish - first > end - begin:
                return first, _OnDevice(last)
        lane, moment = np.array([experiment.lane], np.int32), np.array([experiment.span.end_ns], np.int64)
        stretch = int(self._stretches.at(lane, moment)[0])
        if stretch < 0:  # no host thread was recorded: what the device did is all there is
            return begin, _OnDevice(last) if last >= 0 else None
        return begin, _OnHost(stretch, int(moment[0]))

    def before_work(self, work: int) -> _Point:
        """Take up a work, and go on to what it waited for."""
        done, works = self._done, self._works
        start = int(done.work_start[work])
        self.chain.works.append((work, start, min(int(done.work_end[work]), self._until)))
        self._until = min(self._until, start)
        if start <= self.chain.begin:
            return None
        options: list[tuple[int, int, _Point]] = []
        previous, source = int(works.previous[work]), int(works.stretch[work])
        if source >= 0:
            ready = int(done.stretch_start[source]) + int(self._offsets[work])
            options.append((ready, ready - int(works.latency_ns[work]), _OnHost(source, int(works.launched[work]))))
        for other, delay in self._queue_waits.get(work, ()):
            options.append((int(done.work_end[other]) + delay, int(done.work_end[other]), _OnDevice(other)))
        if previous >= 0:
            free = int(done.work_end[previous])
            options.append((free + int(works.gap_ns[work]), free, _OnDevice(previous)))
        if not options:
            return None
        _, since, point = max(options, key=lambda option: option[0])
        self.chain.delays.append((work, min(since, start), start))
        self._until = min(self._until, since)
        return point

    def before_moment(self, stretch: int, moment: int) -> _Point:
        """Take up a thread's time in a stretch until a moment, and go on to what the stretch waited for."""
        done, stretches = self._done, self._stretches
        lane, begin = int(stretches.lane[stretch]), int(stretches.start[stretch])
        at = min(max(moment, begin), int(stretches.end[stretch]))
        start = int(done.stretch_start[stretch])
        scale = done.graph.host_scale
        inside = int(scale.length(stretches.lane[[stretch]], np.array([begin]), np.array([at]))[0])
        beyond = max(moment - at, 0)  # in the pause after the stretch
        if beyond:
            self._take_host(lane, (at, at + beyond), start + inside, start + inside + beyond)
        self._take_host(lane, (begin, at), start, start + inside)
        if start <= self.chain.begin:
            return None
        options: list[tuple[int, int, _Point]] = []
        before = int(stretches.previous[stretch])
        if before >= 0:
            end = int(done.stretch_end[before])
            options.append((end + int(self._own[stretch]), end, _OnHost(before, int(stretches.end[before]))))
        for other, delay in self._host_waits.get(stretch, ()):
            options.append((int(done.work_end[other]) + delay, int(done.work_end[other]), _OnDevice(other)))
        for number, (other, delay) in zip(
            self._numbers.get(stretch, ()), self._handovers.get(stretch, ()), strict=True
        ):
            reached = int(done.stretch_start[other]) + delay
            given = _OnHost(other, int(self._edges.time[number]))
            options.append((reached, reached - int(self._edges.delay_ns[number]), given))
        if not options:
            return None
        _, since, point = max(options, key=lambda option: option[0])
        if since < start:
            self._take_host(lane, (begin - (start - since), begin), since, start)
        return point
