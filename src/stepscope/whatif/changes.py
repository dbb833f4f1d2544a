"""Changes to a step: each function returns a `Change` to apply to a dependency graph.

Intervals of host threads are given as `lanes`, `starts` and `ends` (thread, and nanoseconds), arrays of shape (n,).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSES, DEVICE_CAUSES
from stepscope.errors import UsageError
from stepscope.trace.nesting import Rows, at, inherit, inside, outermost, row_numbers
from stepscope.trace.window import Times, union
from stepscope.whatif.experiment import Change, Experiment
from stepscope.whatif.graph import Edges, Graph, nothing


def without_waits_inside(graph: Graph, lanes: npt.NDArray[np.int32], starts: Times, ends: Times) -> Graph:
    """Remove the waits of pauses that lie entirely inside these host intervals.

    A thread that gets its work from others still waits for it.
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
    """Remove host waits for these rows of `device_work`."""
    return replace(graph, host_waits=graph.host_waits.select(~np.isin(graph.host_waits.source, works)))


Lanes = npt.NDArray[np.int32]
Factors = npt.NDArray[np.float64]

Matcher = Callable[[str], object]

_BUSY: Final = ("dispatch", "compute", "optimizer", "python", "untraced", "graph_tracing", "step_marker", "once")
"""Causes of a thread's own work; waits inside it, for queue space or another thread, stay."""
_LAUNCHING: Final = ("launch", "graph_launch", "copy", "set")
_LINE: Final = re.compile(r"(?P<file>.+):(?P<line>\d{1,9})")


def together(*changes: Change) -> Change:
    """Apply all of these changes in order."""

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        for change in changes:
            graph = change(experiment, graph)
        return graph

    return apply


def scaled_host_time(lanes: Lanes, starts: Times, ends: Times, factor: float | Factors) -> Change:
    """Scale host time in these intervals by one factor or one each; factor 0 also removes the waits inside."""
    factors = np.broadcast_to(np.asarray(factor, np.float64), starts.shape)
    gone = factors <= 0

    def apply(_: Experiment, graph: Graph) -> Graph:
        changed = graph.with_host_time(lanes, starts, ends, factors)
        return without_waits_inside(changed, lanes[gone], starts[gone], ends[gone]) if gone.any() else changed

    return apply


def scaled_pieces(pieces: pl.DataFrame, factor: float) -> Change:
    """Scale these pieces of host time; factor 0 also removes the waits inside.

    Args:
        pieces: columns lane (null for the device's own pieces, which stay), start_ns, duration_ns, as from `idle_time`.
    """
    host = pieces.filter(pl.col("lane").is_not_null())
    starts = host["start_ns"].to_numpy()
    lanes = host["lane"].to_numpy().astype(np.int32)
    return scaled_host_time(lanes, starts, starts + host["duration_ns"].to_numpy(), factor)


def scaled_slices(slices: Rows, factor: float) -> Change:
    """Scale these host slices (indices into the trace's `HostActivity`) with everything inside them.

    Device work launched in them does not change. Factor 0 also removes the waits inside.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        activity, chosen = experiment.activity, np.unique(slices[slices >= 0])
        lanes, starts, ends = activity.lane[chosen], activity.start[chosen], activity.end[chosen]
        return scaled_host_time(*joined(lanes, starts, ends), factor)(experiment, graph)

    return apply


def joined(lanes: Lanes, starts: Times, ends: Times) -> tuple[Lanes, Times, Times]:
    """Merge host intervals that overlap or touch."""
    parts = [(lane, union(starts[lanes == lane], ends[lanes == lane])) for lane in np.unique(lanes).tolist()]
    whole = [(np.full(len(each.starts), lane, np.int32), each.starts, each.ends) for lane, each in parts]
    none = np.zeros(0, np.int64)
    columns = zip((none.astype(np.int32), none, none), *whole, strict=True)
    lane, start, end = (np.concatenate(column) for column in columns)
    return lane, start, end


def without_waits(launches: Rows) -> Change:
    """Remove the wait and the duration of these calls, rows of `launches`."""

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        changed = graph.with_host_time(*_times(experiment.trace.launches, launches), np.zeros(len(launches)))
        return changed.without_waits(launches)

    return apply


def moved_host_time(lanes: Lanes, starts: Times, ends: Times, moments: Times) -> Change:
    """Move host time in these intervals to these later times on the same threads; waits inside are removed."""

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        changed = scaled_host_time(lanes, starts, ends, 0.0)(experiment, graph)
        places, which = np.unique(np.column_stack([lanes, moments]), axis=0, return_inverse=True)
        added = np.bincount(which.ravel(), (ends - starts).astype(np.float64), len(places))
        lengths = (1.0 + added).astype(np.float64)
        return changed.with_host_time(places[:, 0].astype(np.int32), places[:, 1], places[:, 1] + 1, lengths)

    return apply


def scaled_work(rows: Rows, factor: float | Factors) -> Change:
    """Scale these rows of `device_work` by one factor or one each."""
    return lambda _, graph: graph.with_work(rows, factor)


def fewer_works(rows: Rows, factor: float) -> Change:
    """Scale the number of these rows of `device_work`: their time, and their queue's pauses before them."""
    return lambda _, graph: graph.with_fewer_works(rows, factor)


def scaled_work_of(rows: Rows, factor: float | Factors) -> Change:
    """Scale the device work launched by these rows of `operators` and those inside them, by one factor or one each.

    For nested operators the inner factor counts. Host time stays, except on a machine without a device: there host time
    is the work, and the outer factor counts.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        table = experiment.trace.operators
        factors = np.broadcast_to(np.asarray(factor, np.float64), (len(rows),))
        chosen = np.full(table.height, -1, np.int64)
        chosen[rows] = np.arange(len(rows))
        parent = row_numbers(table["parent"])
        if experiment.trace.device_work.is_empty():
            outer = outermost(np.unique(rows), parent)
            return graph.with_host_time(*_times(table, outer), factors[chosen[outer]])
        work, position = _work_under(experiment, inherit(chosen, parent))
        return graph.with_work(work, factors[position])

    return apply


def _work_under(experiment: Experiment, number: Rows) -> tuple[Rows, Rows]:
    """Rows of the work launched by operators with a number other than -1, and those numbers."""
    operator = row_numbers(experiment.trace.launches["operator"])
    launch = row_numbers(experiment.trace.device_work["launch"])
    numbers = at(number, at(operator, launch))
    work = np.flatnonzero(numbers >= 0)
    return work, numbers[work]


def scaled_operators(rows: Rows, factor: float) -> Change:
    """Scale these rows of `operators`, with everything inside them, on the host and on the device.

    The queues' pauses before their work are scaled too. Factor 0 also removes their waits.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        table = experiment.trace.operators
        parent = row_numbers(table["parent"])
        times = _times(table, outermost(np.unique(rows), parent))
        changed = scaled_host_time(*times, factor)(experiment, graph)
        work, _ = _work_under(experiment, np.where(inside(rows, parent), 0, -1))
        return changed.with_fewer_works(work, factor)

    return apply


def _times(table: pl.DataFrame, rows: Rows) -> tuple[Lanes, Times, Times]:
    start = table["start_ns"].to_numpy()[rows]
    return table["lane"].to_numpy()[rows], start, start + table["duration_ns"].to_numpy()[rows]


def scaled_cause(cause: str, factor: float) -> Change:
    """Scale host time of this cause; factor 0 also removes its waits.

    Args:
        cause: one of the host's CAUSES, or "compute" for operators of a machine without a device.

    Raises:
        UsageError: the cause is unknown, or belongs to the device.
    """
    if cause not in (*CAUSES, "compute") or cause in DEVICE_CAUSES:
        raise UsageError(f"there is no cause {cause!r} of host time")
    return lambda experiment, graph: _scaled_host_cause(experiment, graph, cause, factor)


def without_cause(cause: str) -> Change:
    """Remove all time of this cause: one of CAUSES, or "compute" for operators of a machine without a device.

    Raises:
        UsageError: the cause is unknown.
    """
    if cause not in (*CAUSES, "compute"):
        raise UsageError(f"there is no cause {cause!r}; causes are {', '.join((*CAUSES, 'compute'))}")

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        if cause == "dependency":
            return replace(graph, queue_waits=nothing(Edges))
        if cause == "launch_latency":
            latency, gap = np.minimum(graph.works.latency_ns, 0), np.minimum(graph.works.gap_ns, 0)
            return replace(graph, works=replace(graph.works, latency_ns=latency, gap_ns=gap))
        if cause == "unknown":
            return _without_unexplained(graph)
        changed = _scaled_host_cause(experiment, graph, cause, 0.0)
        kind = {"communication": "communication", "host_to_device_copy": "copy_in"}.get(cause)
        if kind is None:
            return changed
        work = (experiment.trace.device_work["kind"] == kind).fill_null(False).to_numpy()
        return changed.with_work(np.flatnonzero(work), 0.0)

    return apply


def _scaled_host_cause(experiment: Experiment, graph: Graph, cause: str, factor: float) -> Graph:
    on_host = "dispatch" if cause == "compute" else cause
    activity = experiment.activity
    told = _overhead(experiment) if cause == "profiler_overhead" else (np.zeros(0, np.int64),) * 2
    for lane in activity.timelines:
        mine = activity.pieces(lane).filter(pl.col("cause") == on_host)
        whole = union(np.append(told[0], mine["start"]), np.append(told[1], mine["end"]))
        lanes = np.full(len(whole.starts), lane, np.int32)
        if cause in _BUSY:
            graph = graph.with_host_time(lanes, whole.starts, whole.ends, np.full(len(lanes), factor))
        else:
            graph = scaled_host_time(lanes, whole.starts, whole.ends, factor)(experiment, graph)
    if cause == "communication":
        first = experiment.trace.device_work.height
        graph = graph.with_work(first + np.arange(len(graph.on_host)), factor)
    return graph


def _overhead(experiment: Experiment) -> tuple[Times, Times]:
    """Intervals of the profiler's own work, which stops every thread."""
    overhead = experiment.trace.annotations.filter((pl.col("kind") == "overhead") & (pl.col("duration_ns") > 0))
    return overhead["start_ns"].to_numpy(), (overhead["start_ns"] + overhead["duration_ns"]).to_numpy()


def _without_unexplained(graph: Graph) -> Graph:
    works, late = graph.works, graph.unexplained_ns
    return replace(
        graph,
        works=replace(works, latency_ns=works.latency_ns - late, gap_ns=works.gap_ns - late),
        queue_waits=replace(graph.queue_waits, delay_ns=graph.queue_waits.delay_ns - late[graph.queue_waits.target]),
    )


def scaled(pattern: str, factor: float) -> Change:
    """Scale everything with a matching name.

    Args:
        pattern: the name of an operator, kernel or module, with * and ? as in file names, or FILE:LINE of the user's
            code; case-sensitive.

    Raises:
        UsageError: when applied to a trace without a match.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        matches = re.compile(fnmatch.translate(pattern)).fullmatch
        trace = experiment.trace
        operators = _rows_named(trace.operators["name"], matches)
        work = _rows_named(trace.device_work["name"], matches)
        places, written = _at_place(experiment, pattern, matches)
        if not len(operators) and not len(work) and not places.any() and not len(written):
            raise UsageError(f"the trace has no operator, kernel, module or line {pattern!r}")
        within = _slices_inside(experiment, operators)
        places &= ~within  # nested matches count once
        told = np.append(within | places, False)[experiment.attribution.work_slices]
        changed = scaled_operators(operators, factor)(experiment, graph) if len(operators) else graph
        changed = changed.with_work(np.union1d(work[~told[work]], written[~told[written]]), factor)
        return _scaled_innermost(experiment, changed, places, factor) if places.any() else changed

    return apply


def _slices_inside(experiment: Experiment, operators: Rows) -> npt.NDArray[np.bool_]:
    """Whether each slice is one of these rows of `operators` or inside one."""
    slices = experiment.activity.slices_of("operators")[operators]
    return inside(slices[slices >= 0], experiment.activity.parent)


def _rows_named(names: pl.Series, matches: Matcher) -> Rows:
    different = names.unique().drop_nulls()
    chosen = [name for name in different if matches(name)]
    return np.flatnonzero(names.is_in(chosen).fill_null(False).to_numpy())


def _at_place(experiment: Experiment, pattern: str, matches: Matcher) -> tuple[npt.NDArray[np.bool_], Rows]:
    """Slices in a matching module or line, and rows of `device_work` compiled from there."""
    attribution = experiment.attribution
    modules = [number for number, path in enumerate(attribution.modules) if matches(path)]
    for number, above in enumerate(attribution.module_parents.tolist()):
        if above in modules and number not in modules:
            modules.append(number)
    places: list[int] = []
    line = _LINE.fullmatch(pattern)
    if line is not None:
        wanted, number = line["file"], int(line["line"])
        places = [
            index
            for index, place in enumerate(attribution.places)
            if place.line == number and (place.file == wanted or place.file.endswith("/" + wanted))
        ]
    slices = np.isin(attribution.module, modules) | np.isin(attribution.place, places)
    written = np.isin(attribution.own_work_module, modules) | np.isin(attribution.own_work_place, places)
    return slices, np.flatnonzero(written).astype(np.int64)


def _scaled_innermost(experiment: Experiment, graph: Graph, chosen: npt.NDArray[np.bool_], factor: float) -> Graph:
    """Scale host time whose innermost slice is chosen, and the work launched in those slices."""
    for lane, timeline in experiment.activity.timelines.items():
        slices = timeline.slices
        mine = np.flatnonzero((slices >= 0) & chosen[np.maximum(slices, 0)])
        mine = mine[mine + 1 < len(timeline.times)]
        lanes = np.full(len(mine), lane, np.int32)
        graph = scaled_host_time(lanes, timeline.times[mine], timeline.times[mine + 1], factor)(experiment, graph)
    slices = experiment.attribution.work_slices
    return graph.with_work(np.flatnonzero((slices >= 0) & chosen[np.maximum(slices, 0)]), factor)


def launch_overhead(ns: int) -> Change:
    """Set the duration of every launch call, nanoseconds."""

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        calls = experiment.trace.launches
        waits = graph.stretches.launch[graph.host_waits.target]
        kinds = calls["kind"].is_in(_LAUNCHING).to_numpy() & (calls["duration_ns"] > 0).to_numpy()
        kinds[waits[waits >= 0]] = False
        rows = np.flatnonzero(kinds)
        lanes, starts, ends = _times(calls, rows)
        return graph.with_host_time(lanes, starts, ends, ns / (ends - starts))

    return apply


def synchronise_every(steps: int) -> Change:
    """Wait for the device only in every n-th step, starting with the first.

    Raises:
        UsageError: the number is below 1; when applied to a trace without steps.
    """
    if steps < 1:
        raise UsageError(f"waiting every {steps} steps is not possible; the number must be 1 or more")

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        if experiment.steps.is_empty():
            raise UsageError("the trace has no steps, so nothing can happen every few of them")
        calls = experiment.trace.launches
        launches = graph.stretches.launch[graph.host_waits.target]
        launches = np.unique(launches[launches >= 0])
        kinds = calls["kind"].to_numpy()[launches]
        launches = launches[(kinds == "synchronise") | (kinds == "copy")]
        starts = np.sort(experiment.steps["start_ns"].to_numpy())
        number = np.searchsorted(starts, calls["start_ns"].to_numpy()[launches], side="right") - 1
        return without_waits(launches[(number >= 0) & (number % steps != 0)])(experiment, graph)

    return apply


def without_waits_in(lanes: Lanes, starts: Times, ends: Times) -> Change:
    """Remove host waits in these intervals; the threads' own work stays."""
    return lambda _, graph: without_waits_inside(graph, lanes, starts, ends)


def without_waits_for_work(rows: Rows) -> Change:
    """Remove host waits for these rows of `device_work`."""
    return lambda _, graph: without_waits_for(graph, rows)


def scaled_stretches(lanes: Lanes, starts: Times, ends: Times, factor: float) -> Change:
    """Scale host time in these intervals, and the device work launched there.

    Factor 0 also removes the waits inside.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        calls = experiment.trace.launches
        launch = row_numbers(experiment.trace.device_work["launch"])
        calling, called = calls["lane"].to_numpy(), calls["start_ns"].to_numpy()
        graph = scaled_host_time(*joined(lanes, starts, ends), factor)(experiment, graph)
        given = np.zeros(calls.height + 1, np.bool_)
        for lane in np.unique(lanes).tolist():
            mine = np.flatnonzero(calling == lane)
            covered = union(starts[lanes == lane], ends[lanes == lane])
            given[mine] = covered.overlap_of(called[mine], called[mine] + 1) > 0
        return graph.with_work(np.flatnonzero((launch >= 0) & given[launch]), factor)

    return apply


def overlapped(rows: Rows) -> Change:
    """Shorten these rows of `device_work` to the time in which their device computes beside them."""

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
