"""The recorded dependency graph with the times of another device, and with messages as long as they were recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stepscope.predict.prediction import StepPrediction
from stepscope.predict.step_replay import joint_band
from stepscope.predict.trace_operations import WorkKinds
from stepscope.predict.work_times import WorkTimes, work_times
from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.graph import Graph, Stretches

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TargetGraph:
    """The graph of the recorded device or of another one.

    Attributes:
        expected: with its times.
        low, high: with all work but communication at the ends of its joint band; None where nothing was exchanged,
            since then the step's own band has it.
        factor: the target's step over that of the graph in which messages take the target's times, too.
    """

    expected: Graph
    low: Graph | None = None
    high: Graph | None = None
    factor: float = 1.0


def target_graph(experiment: Experiment, target: StepPrediction | None, messages: Rows) -> TargetGraph:
    """The graph with the target's times: of its works, or without a device of all that the host does.

    Args:
        target: of which a step time is given; None for the recorded device.
        messages: works that stay as they were recorded.
    """
    graph = experiment.graph
    if target is None or target.step_ns is None:
        return TargetGraph(graph)
    if experiment.device is None:
        slower = target.step_ns / (experiment.recorded_ns / experiment.step_count)
        lanes = np.unique(graph.stretches.lane)
        start = np.full(len(lanes), experiment.span.start_ns)
        end = np.full(len(lanes), experiment.span.end_ns)
        changed = graph.with_host_time(lanes, start, end, np.full(len(lanes), slower))
        return TargetGraph(changed, factor=target.step_ns / experiment.run(changed).step_ns)
    by = target.predictor
    times = work_times(experiment.trace, target.device) if by is None else by.times_on(target.device)[0]
    graph = graph if by is None else by.replays.graph
    rows = np.arange(len(times.ns))
    factors = _factors(times, times.ns)
    whole = experiment.run(graph.with_work(rows, factors)).step_ns
    stays = messages[messages < len(rows)]
    factors[stays] = 1.0
    expected, scale = graph.with_work(rows, factors), target.step_ns / whole
    exchanged = (experiment.trace.device_work["kind"] == "communication").fill_null(False).to_numpy()
    if not exchanged.any():
        return TargetGraph(expected, factor=scale)
    ends = [_factors(times, end) for end in _ends(experiment, times, exchanged)]
    for end in ends:
        end[stays] = 1.0
    low, high = (graph.with_work(rows, end) for end in ends)
    return TargetGraph(expected, low, high, scale)


def _factors(times: WorkTimes, ns: Numbers) -> Numbers:
    """How many times as long each work takes; what is not known changes as the rest does."""
    known = np.isfinite(times.ns) & (times.measured_ns > 0)
    factors = np.ones(len(ns))
    if known.any():
        factors[:] = float(ns[known].sum() / times.measured_ns[known].sum())
        factors[known] = ns[known] / times.measured_ns[known]
    return factors


def _ends(experiment: Experiment, times: WorkTimes, exchanged: npt.NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """The ends of the joint band of all work but communication, which is at what is expected."""
    known, kinds = np.isfinite(times.ns), WorkKinds(experiment.trace)
    ns = np.where(known, times.ns, 0.0)
    low, high = (np.where(known & ~exchanged, end, ns) for end in (times.low_ns, times.high_ns))
    return joint_band(ns, low, high, kinds.kinds, kinds.calls, experiment.works)


class CutExperiment(Experiment):
    """A trace whose graph has further borders; its replay without a change is the same.

    Args:
        experiment: the same trace.
        lanes, times: threads and moments of the borders; shape (n,).
    """

    def __init__(self, experiment: Experiment, lanes: npt.NDArray[np.int32], times: Times) -> None:
        super().__init__(experiment.view)
        self._uncut = experiment
        self._borders = lanes, times

    @cached_property
    def graph(self) -> Graph:
        """What waited for what, as measured."""
        return with_borders(self._uncut.graph, *self._borders)


def with_borders(graph: Graph, lanes: npt.NDArray[np.int32], times: Times) -> Graph:
    """The graph in which stretches of these threads that go on at these moments are two; shape (n,)."""
    old = graph.stretches
    if not len(old.start) or not len(times):
        return graph
    inside = old.at(lanes, times)
    index = np.maximum(inside, 0)
    fits = (inside >= 0) & (old.start[index] < times) & (times < old.end[index])
    cuts = np.unique(np.column_stack([inside[fits], times[fits]]), axis=0)
    if not len(cuts):
        return graph
    stretches, first = _cut(old, cuts[:, 0], cuts[:, 1])

    def at(stretch: Rows, time: Times) -> Rows:
        """The piece of these old stretches in which the moment lies."""
        lane = old.lane[np.maximum(stretch, 0)]
        found = stretches.at(lane, np.maximum(time, old.start[np.maximum(stretch, 0)]))
        return np.where(stretch >= 0, found, -1)

    works, hands, hosts = graph.works, graph.handovers, graph.host_waits
    return replace(
        graph,
        stretches=stretches,
        works=replace(works, stretch=at(works.stretch, np.where(works.stretch >= 0, works.launched, 0))),
        host_waits=replace(hosts, target=first[hosts.target]),
        handovers=replace(hands, source=at(hands.source, hands.time), target=first[hands.target]),
    )


def _cut(old: Stretches, stretch: Rows, time: Times) -> tuple[Stretches, Rows]:
    """The stretches with borders, sorted as before; and for each old one the place of its first piece.

    Args:
        stretch, time: sorted; moments inside of stretches.
    """
    count = len(old.start)
    before = np.searchsorted(stretch, np.arange(count), side="left")
    first = np.arange(count) + before
    pieces = np.searchsorted(stretch, np.arange(count), side="right") - before
    last = first + pieces
    origin = np.repeat(np.arange(count), pieces + 1)
    added = np.ones(len(origin), np.bool_)
    added[first] = False
    start, end = old.start[origin].copy(), old.end[origin].copy()
    start[added] = time
    end[np.flatnonzero(added) - 1] = time
    previous = np.where(old.previous >= 0, last[np.maximum(old.previous, 0)], -1)[origin]
    previous[added] = np.flatnonzero(added) - 1
    return (
        Stretches(
            lane=old.lane[origin],
            start=start,
            end=end,
            previous=previous,
            own_ns=np.where(added, 0, old.own_ns[origin]),
            launch=np.where(added, -1, old.launch[origin]),
            is_given=np.where(added, False, old.is_given[origin]),
        ),
        first,
    )
