"""Changes that take something out of a step: waits, parts of a thread's time, work that nothing overlaps."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.trace.intervals import Times, union
from stepscope.trace.nesting import Rows
from stepscope.whatif.changes import Lanes, scaled_host_time
from stepscope.whatif.experiment import Change, Experiment
from stepscope.whatif.graph import Graph
from stepscope.whatif.waits import without_waits_for, without_waits_inside


def without_waits_in(lanes: Lanes, starts: Times, ends: Times) -> Change:
    """Threads wait for nothing in these intervals; what they do there themselves stays.

    Args:
        lanes: the thread of each interval; shape (n,).
        starts, ends: nanoseconds; shape (n,).
    """
    return lambda _, graph: without_waits_inside(graph, lanes, starts, ends)


def without_waits_for_work(rows: Rows) -> Change:
    """No thread waits for these rows of `device_work`."""
    return lambda _, graph: without_waits_for(graph, rows)


def scaled_stretches(lanes: Lanes, starts: Times, ends: Times, factor: float) -> Change:
    """Host time in these intervals, and the device work launched there, takes so many times as long.

    With factor 0 waits inside go too.

    Args:
        lanes: the thread of each interval; shape (n,). Intervals of a thread that overlap count as one.
        starts, ends: nanoseconds; shape (n,).
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        calls = experiment.trace.launches
        launch = experiment.trace.device_work["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
        calling, called = calls["lane"].to_numpy(), calls["start_ns"].to_numpy()
        for lane in np.unique(lanes).tolist():
            whole = union(starts[lanes == lane], ends[lanes == lane])
            its = np.full(len(whole.starts), lane, np.int32)
            graph = scaled_host_time(its, whole.starts, whole.ends, factor)(experiment, graph)
            inside = (calling == lane) & (whole.overlap_of(called, called + 1) > 0)
            graph = graph.with_work(np.flatnonzero((launch >= 0) & np.append(inside, False)[launch]), factor)
        return graph

    return apply


def overlapped(rows: Rows) -> Change:
    """Of these rows of `device_work` only what runs beside a computation of their device still takes time."""

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        table = experiment.trace.device_work
        device, computes = table["device"].to_numpy(), (table["kind"] == "compute").fill_null(False).to_numpy()
        start, duration = table["start_ns"].to_numpy(), table["duration_ns"].to_numpy()
        end = start + duration
        for name in np.unique(device[rows]).tolist():
            its, others = rows[device[rows] == name], computes & (device == name)
            beside = union(start[others], end[others]).overlap_of(start[its], end[its])
            graph = graph.with_work(its, beside / np.maximum(duration[its], 1))
        return graph

    return apply
