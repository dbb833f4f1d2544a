"""Further borders between stretches of host threads: moments at which a thread could be made to wait for something."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.graph import Graph, Stretches


class CutExperiment(Experiment):
    """A trace whose graph has further borders; its replay without a change is the same.

    Args:
        experiment: the same trace.
        lanes, times: threads and moments of the borders; shape (n,).
    """

    def __init__(self, experiment: Experiment, lanes: npt.NDArray[np.int32], times: Times) -> None:
        super().__init__(
            experiment.trace,
            activity=experiment.activity,
            attribution=lambda: experiment.attribution,
            steps=experiment.steps,
        )
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
