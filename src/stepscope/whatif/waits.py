"""Leaving out of a graph what threads wait for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stepscope.trace.intervals import Times, union
from stepscope.trace.nesting import Rows
from stepscope.whatif.graph import Graph


def without_waits_inside(graph: Graph, lanes: npt.NDArray[np.int32], starts: Times, ends: Times) -> Graph:
    """Without what the pauses that lie whole in these intervals of threads' time wait for.

    A thread that others give its work goes on waiting for that.

    Args:
        lanes: the thread of each interval; shape (n,).
        starts, ends: nanoseconds; shape (n,). Intervals that touch count as one.
    """
    stretches = graph.stretches
    pauses = np.flatnonzero((stretches.previous >= 0) & ~stretches.is_given)
    begin, end = stretches.end[stretches.previous[pauses]], stretches.start[pauses]
    gone = np.zeros(len(stretches.start), np.bool_)
    for lane in np.unique(lanes).tolist():
        mine, its = np.flatnonzero(stretches.lane[pauses] == lane), lanes == lane
        covered = union(starts[its], ends[its])
        position = np.searchsorted(covered.starts, begin[mine], side="right") - 1
        inside = (position >= 0) & (end[mine] <= covered.ends[np.maximum(position, 0)]) & (end[mine] > begin[mine])
        gone[pauses[mine[inside]]] = True
    return replace(
        graph,
        host_waits=graph.host_waits.select(~gone[graph.host_waits.target]),
        handovers=graph.handovers.select(~gone[graph.handovers.target]),
    )


def without_waits_for(graph: Graph, works: Rows) -> Graph:
    """Without the waits of threads for these rows of `device_work`."""
    return replace(graph, host_waits=graph.host_waits.select(~np.isin(graph.host_waits.source, works)))
