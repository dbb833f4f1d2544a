"""Larger changes to the steps: CUDA graphs, overlapped communication, bucket sizes, worker processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import collectives
from stepscope.analysis.input_pipeline import Batches, batches
from stepscope.analysis.module_paths import BACKWARD, OPTIMIZER
from stepscope.analysis.rows import at
from stepscope.errors import UsageError
from stepscope.trace.nesting import Rows
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.window import Times
from stepscope.whatif.build import loader_calls
from stepscope.whatif.experiment import Change, Experiment
from stepscope.whatif.graph import Edges, Graph, Works, concatenated, previous_in

__all__ = ["bucket_size", "graphs", "loader_workers", "overlap_communication"]


RECEIVED_NS: Final = 1_000_000
"""Time to receive a batch from a worker, for traces without workers."""
PREFETCHED: Final = 2
"""Batches that each worker may prefetch: the default of torch's DataLoader."""


def loader_workers(workers: int) -> Change:
    """Load batches in this many worker processes; with 0 the main process loads them itself.

    Each worker loads one batch after the other, for as long as a batch took in the trace, and stays at most two batches
    ahead of the program. A call for a batch waits until its batch is ready, and then takes the time to receive it.

    Raises:
        UsageError: the number is negative; when applied to a trace without a data loader or without the time to load a
            batch.
    """
    if workers < 0:
        raise UsageError(f"there cannot be {workers} workers")

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        calls = loader_calls(experiment.trace)
        if calls.is_empty():
            raise UsageError("the trace has no data loader that gives batches, so that no workers can be tried")
        stretches = graph.stretches
        start, length = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
        lanes = calls["lane"].to_numpy().astype(np.int32)
        after = stretches.at(lanes, start + length)
        known = (after >= 0) & (stretches.start[np.maximum(after, 0)] == start + length)
        known &= stretches.previous[np.maximum(after, 0)] >= 0
        if not known.any():
            raise UsageError(
                "the trace does not show a thread that waits for its batches alone: no workers can be tried"
            )
        program = experiment.trace.metadata.program or ProgramFacts()
        made = batches(program, " ".join(calls["name"].unique()))
        loading = _loading_ns(made, length)
        own = stretches.own_ns.copy()
        if workers == 0:
            own[after[known]] = loading[known]
            return replace(graph, stretches=replace(stretches, own_ns=own))
        received = int(np.median(length)) if made.workers else RECEIVED_NS
        own[after[known]] = np.minimum(received, np.minimum(length, loading)[known])
        busy = _slowed(loading, made, workers, program)[known]
        received_quickly = replace(graph, stretches=replace(stretches, own_ns=own))
        return _with_batches(received_quickly, after[known], start[known], busy, workers)

    return apply


def _loading_ns(made: Batches, length: Times) -> Times:
    """Time to load each batch in one process."""
    if made.clock_ns is not None:
        return np.full(len(length), round(made.clock_ns), np.int64)
    if made.workers == 0:
        return length
    raise UsageError(
        "the trace does not tell how long a batch takes to load, as workers load them: record it with stepscope run"
    )


def _slowed(loading: Times, made: Batches, workers: int, program: ProgramFacts) -> Times:
    """Loading times with fewer processors than workers."""
    usable = program.process.get("usable_processors")
    if not isinstance(usable, int) or usable < 1 or made.processor_ns is None:
        return loading
    return np.maximum(loading, round(made.processor_ns * workers / usable))


def _with_batches(graph: Graph, after: Times, asked: Times, loading: Times, workers: int) -> Graph:
    """Add one work per batch, on one queue per worker, that the calls for batches wait for."""
    works, count = graph.works, len(graph.works.start)
    number = np.arange(len(after))
    before = number - workers * PREFETCHED
    queue = int(works.queue.max(initial=-1)) + 1 + number % workers
    stretches = graph.stretches
    # The first batches are already being loaded when the recording begins, staggered by worker.
    ready = asked[0] + number * loading[0] // workers - loading[0]
    source = np.where(before >= 0, stretches.previous[after[np.maximum(before, 0)]], -1)
    launched = np.where(before >= 0, asked[np.maximum(before, 0)], 0)
    start = np.where(before >= 0, launched, ready)
    start = np.minimum(start, asked)  # a batch starts before the call that waits for it
    none = np.zeros(len(number), np.int64)
    previous = np.where(number >= workers, count + number - workers, -1)
    added = Works(start, loading, queue, source, launched, none, previous, none)
    return replace(
        graph,
        works=concatenated(works, added),
        host_waits=graph.host_waits.with_edges(Edges.without_delay(count + number, after)),
        rendezvous=np.concatenate([graph.rendezvous, np.full(len(number), -1)]),
        unexplained_ns=np.concatenate([graph.unexplained_ns, none]),
        work_scale=np.concatenate([graph.work_scale, np.ones(len(number))]),
    )


GRAPH_GAP_NS: Final = 1_000
"""Longest gap between kernels of a graph."""
_GRADIENTS: Final = ("all_reduce", "reduce_scatter")
_STAYS: Final = ("input", "host_to_device_copy", "synchronisation", "communication", "logging", "checkpoint")
"""Causes of host time that a graph does not remove."""


def graphs() -> Change:
    """Launch everything between two waits of a step at once, as one graph.

    Host time from the first to the last of these launches is removed, except for loading data, copies, communication
    and logging, and kernels run back to back as in a graph.

    Raises:
        UsageError: when applied to a trace without launched device work.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        launched = np.flatnonzero(graph.works.stretch[: experiment.trace.device_work.height] >= 0)
        if not len(launched):
            raise UsageError("nothing in the trace was launched on a device, so that nothing can be one graph")
        segments = _segments(experiment, graph, launched)
        for (lane,), mine in segments.group_by("lane", maintain_order=True):
            graph = _without_dispatch(experiment, graph, int(lane), mine)
        inside = np.zeros(len(graph.works.start), np.bool_)
        inside[np.concatenate([[], *segments["works"].to_list()]).astype(np.int64)] = True
        gap, late = graph.works.gap_ns, graph.unexplained_ns
        close = np.where(inside, np.minimum(gap, np.minimum(gap - late, GRAPH_GAP_NS) + late), gap)
        return replace(graph, works=replace(graph.works, gap_ns=close))

    return apply


def _segments(experiment: Experiment, graph: Graph, launched: Rows) -> pl.DataFrame:
    """Launches per stretch and step: columns lane, start, end (of the launch calls), works."""
    starts = np.sort(experiment.steps["start_ns"].to_numpy())
    calls, launch = experiment.trace.launches, experiment.trace.device_work["launch"].cast(pl.Int64).fill_null(-1)
    row = launch.to_numpy()[launched]
    launched, row = launched[row >= 0], row[row >= 0]
    begin = calls["start_ns"].to_numpy()[row]
    stretch = graph.works.stretch[launched]
    table = pl.DataFrame(
        {
            "lane": graph.stretches.lane[stretch],
            "stretch": stretch,
            "step": np.searchsorted(starts, begin, side="right"),
            "begin": begin,
            "finish": begin + calls["duration_ns"].to_numpy()[row],
            "work": launched,
        }
    )
    grouped = table.sort("begin").group_by("lane", "stretch", "step", maintain_order=True)
    segments = grouped.agg(
        calls=pl.col("begin").n_unique(),
        start=pl.col("finish").first(),
        end=pl.col("finish").max(),
        works=pl.col("work"),
    )
    return segments.filter((pl.col("calls") > 1) & (pl.col("end") > pl.col("start")))


def _without_dispatch(experiment: Experiment, graph: Graph, lane: int, segments: pl.DataFrame) -> Graph:
    pieces = experiment.activity.cut(lane, segments["start"].to_numpy(), segments["end"].to_numpy())
    gone = pieces.filter(~pl.col("cause").cast(pl.String).is_in(_STAYS))
    return _with_host_time(graph, lane, gone, 0.0)


def _with_host_time(graph: Graph, lane: int, pieces: pl.DataFrame, factor: float) -> Graph:
    lanes, factors = np.full(pieces.height, lane, np.int32), np.full(pieces.height, factor)
    return graph.with_host_time(lanes, pieces["start"].to_numpy(), pieces["end"].to_numpy(), factors)


def overlap_communication() -> Change:
    """Overlap gradient communication with computation: only the optimizer's work waits for it.

    On a machine without a device the collectives run beside the backward pass, as far as it is long enough.

    Raises:
        UsageError: when applied to a trace without gradient communication.
    """

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        found = _gradient_collectives(experiment)
        if found.is_empty():
            raise UsageError(
                "the trace has no all-reduce or reduce-scatter, so that no communication can be overlapped"
            )
        if not found["on_device"][0]:
            return _beside_backward(experiment, graph)
        return _own_queue(experiment, graph, found["row"].to_numpy())

    return apply


def _gradient_collectives(experiment: Experiment) -> pl.DataFrame:
    return collectives(experiment.trace).filter(pl.col("kind").is_in(_GRADIENTS))


def _own_queue(experiment: Experiment, graph: Graph, rows: Rows) -> Graph:
    """Move the collectives to queues of their own, awaited only by the optimizer's first work of the step."""
    works, count = graph.works, experiment.trace.device_work.height
    moved = np.zeros(len(works.start), np.bool_)
    moved[rows] = True
    device = experiment.trace.device_work["device"].rank("dense").cast(pl.Int64).to_numpy()
    group = np.where(moved[:count], -device, works.queue[:count])
    start, end = works.start[:count], (works.start + works.duration)[:count]
    previous = np.append(previous_in(group, start, end), works.previous[count:])
    place = graph.places[1]  # where clocks disagree, work that began earlier may be replayed later
    previous = np.where((previous >= 0) & (place[previous] < place), previous, -1)
    waits = graph.queue_waits
    free = waits.select(~(moved[waits.source] & ~moved[waits.target]))
    ready, sent = _what_they_send(graph, rows, moved)
    source, target = _optimizer_after(experiment, graph, rows)
    source, target = np.concatenate([ready, source]), np.concatenate([sent, target])
    known = place[source] < place[target]
    source, target = source[known], target[known]
    return replace(
        graph,
        works=replace(works, previous=previous),
        queue_waits=free.with_edges(Edges(source, target, works.gap_ns[target], np.zeros(len(source), np.int64))),
    )


def _what_they_send(graph: Graph, rows: Rows, moved: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """For each collective the preceding computation in its old queue, whose result it sends, if there is one."""
    before = graph.works.previous[rows]
    while ((before >= 0) & moved[before]).any():
        before = np.where((before >= 0) & moved[before], graph.works.previous[before], before)
    return before[before >= 0], rows[before >= 0]


def _optimizer_after(experiment: Experiment, graph: Graph, rows: Rows) -> tuple[Rows, Rows]:
    """For each collective the optimizer's first work launched after it, if there is one."""
    works = graph.works
    phase = experiment.attribution.work_phase
    mine = np.flatnonzero((phase == OPTIMIZER) & (works.stretch[: len(phase)] >= 0))
    mine = mine[~np.isin(mine, rows)]
    mine = mine[np.argsort(works.launched[mine], kind="stable")]
    position = np.searchsorted(works.launched[mine], works.launched[rows], side="right")
    fits = (works.stretch[rows] >= 0) & (position < len(mine))
    target = mine[np.minimum(position, len(mine) - 1)] if len(mine) else rows
    fits &= works.start[target] >= (works.start + works.duration)[rows]
    return rows[fits], target[fits]


def _beside_backward(experiment: Experiment, graph: Graph) -> Graph:
    lane, span = experiment.lane, experiment.span
    pieces = experiment.activity.cut(lane, np.array([span.start_ns]), np.array([span.end_ns]))
    pieces = pieces.with_columns(phase=at(experiment.attribution.phase, pieces["slice"].to_numpy()))
    waiting, length = pl.col("cause") == "communication", (pl.col("end") - pl.col("start")).sum()
    exposed = pieces.filter(waiting).select(length).item()
    beside = pieces.filter(~waiting & (pl.col("phase") == BACKWARD)).select(length).item()
    factor = max(1.0 - beside / exposed, 0.0) if exposed else 1.0
    return _with_host_time(graph, lane, pieces.filter(waiting), factor)


def bucket_size(megabytes: float) -> Change:
    """Send gradients in buckets of at least this size, in MB (10^6 bytes), except for the last of a step.

    The time of a bucket follows from the trace's own collectives: the fixed time of the shortest, the rate of the
    quickest per byte, and the wait for other ranks in the longest of its parts. A bucket is sent when its last part is
    ready; whatever waited for a part waits for its bucket. Recorded messages are never split.

    Raises:
        UsageError: the size is not above 0; when applied to a trace without the sizes of its collectives.
    """
    if not megabytes > 0:
        raise UsageError(f"a bucket of {megabytes:g} MB holds nothing")

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        found = _gradient_collectives(experiment).filter(pl.col("on_device") & pl.col("bytes").is_not_null())
        if found.height < 2:
            raise UsageError("the trace has no two all-reduces of known size on a device, so that none can be joined")
        each_ns, byte_ns = _cost(found["bytes"].to_numpy(), found["duration_ns"].to_numpy())
        starts = np.sort(experiment.steps["start_ns"].to_numpy())
        step = np.searchsorted(starts, found["start_ns"].to_numpy(), side="right")
        bucket = _buckets(step, found["bytes"].to_numpy(), megabytes * 1e6)
        rows = found["row"].to_numpy()
        last = np.flatnonzero(np.append(bucket[1:] != bucket[:-1], True))
        carrier = rows[last][np.searchsorted(last, np.arange(len(rows)))]
        size, measured = found["bytes"].to_numpy(), found["duration_ns"].to_numpy()
        waiting = np.full(int(bucket.max()) + 1, -np.inf)  # for other ranks: the longest wait of any part remains
        np.maximum.at(waiting, bucket, measured - each_ns - byte_ns * size)
        total = np.bincount(bucket, weights=size)
        scale = graph.work_scale.copy()
        scale[rows] = 0.0
        lasts = each_ns + byte_ns * total + waiting
        scale[rows[last]] = lasts[bucket[last]] / np.maximum(graph.works.duration[rows[last]], 1)
        return replace(graph, work_scale=scale, queue_waits=_of_carriers(graph, rows, carrier))

    return apply


def _cost(size: npt.NDArray[np.int64], duration: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Nanoseconds per collective and per byte, from the quickest ones, since others include waiting for other ranks."""
    each = float(duration.min())
    large = size >= np.median(size)
    rate = np.maximum(duration[large] - each, 0.0) / np.maximum(size[large], 1)
    return each, float(rate[rate > 0].min(initial=np.inf)) if (rate > 0).any() else 0.0


def _buckets(step: Rows, size: npt.NDArray[np.int64], limit: float) -> Rows:
    """Bucket index of each collective, in order of time."""
    result, number, filled = np.zeros(len(step), np.int64), 0, 0.0
    for index in range(len(step)):
        if index and (step[index] != step[index - 1] or filled >= limit):
            number, filled = number + 1, 0.0
        filled += size[index]
        result[index] = number
    return result


def _of_carriers(graph: Graph, rows: Rows, carrier: Rows) -> Edges:
    """Waits for parts of a bucket as waits for the bucket, where that does not go backwards in time."""
    waits = graph.queue_waits
    to = np.arange(len(graph.works.start))
    to[rows] = carrier
    source = to[waits.source]
    order = graph.places[1]
    return replace(waits, source=source).select(order[source] < order[waits.target])
