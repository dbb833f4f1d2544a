"""Answers to "what if": the step time with changes, alone and together, its limits, and larger scenarios."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import collectives
from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import host_time
from stepscope.analysis.input_pipeline import HANDED_OVER_NS, Batches, batches
from stepscope.analysis.module_paths import BACKWARD, OPTIMIZER
from stepscope.analysis.operators import kernel_table, operator_table
from stepscope.analysis.places import line_table, module_table, place_costs
from stepscope.errors import UsageError
from stepscope.trace import TraceWarning
from stepscope.trace.model import Displayed
from stepscope.trace.nesting import Rows, at
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.window import Times
from stepscope.whatif.build import device_numbers, loader_calls
from stepscope.whatif.changes import scaled, together, without_cause
from stepscope.whatif.critical_path import path_in_sum, resources
from stepscope.whatif.experiment import Change, Experiment, Outcome
from stepscope.whatif.graph import Edges, Graph, Replay, Works, concatenated, previous_in
from stepscope.whatif.job import JobProspect

__all__ = ["bucket_size", "graphs", "loader_workers", "overlap_communication"]

CAUSE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "cause": pl.String,
    "attributed_ns": pl.Int64,  # per step: device idle time of this cause; without a device, main-thread time
    "attributed_share": pl.Float64,  # share of the step
    "saving_ns": pl.Int64,  # per step: saving of a replay without the cause
    "saving_share": pl.Float64,
}
SMALLEST_SHARE: Final = 0.001
"""Least share of the span for a cause to be replayed, and then for its time or saving to be shown."""
_WORK_OF: Final = {"communication": ("communication",), "host_to_device_copy": ("copy_in",)}
"""Device work that a cause includes: without the cause it goes away too."""


def cause_table(experiment: Experiment) -> pl.DataFrame:
    """Time of each cause per step and the saving without it, largest saving first.

    Device communication and copies that no computation overlaps count for those causes.

    Returns:
        Columns as in CAUSE_SCHEMA. Savings overlap: they do not add up.
    """
    attributed, count = _attributed(experiment), experiment.step_count
    host = _by_cause(host_time(experiment.trace, window=experiment.span, activity=experiment.activity))
    least = SMALLEST_SHARE * experiment.measured_ns
    rows = []
    for cause in sorted(attributed.keys() | host.keys()):
        mine = attributed.get(cause, 0)
        if max(mine, host.get(cause, 0)) < least:
            continue
        saved = experiment.run(without_cause(cause)(experiment, experiment.graph))
        if max(mine, abs(saved.saving_ns) * count) < least:
            continue
        share = mine / max(experiment.measured_ns, 1)
        rows.append((cause, round(mine / count), share, round(saved.saving_ns), saved.saving_share))
    table = pl.DataFrame(rows, schema=CAUSE_SCHEMA, orient="row")
    return table.sort(["saving_ns", "attributed_ns", "cause"], descending=[True, True, False])


def _attributed(experiment: Experiment) -> dict[str, int]:
    if experiment.device is None:
        return _by_cause(host_time(experiment.trace, window=experiment.span, activity=experiment.activity))
    span, idle = experiment.view.window, experiment.view.idle_in_steps
    result = _by_cause(idle.filter(pl.col("device") == experiment.device))
    table = experiment.trace.device_work
    mine = table.filter(pl.col("device") == experiment.device)
    compute = busy_intervals(mine.filter(pl.col("kind") == "compute"), span)
    for cause, kinds in _WORK_OF.items():
        busy = busy_intervals(mine.filter(pl.col("kind").is_in(kinds)), span)
        alone = busy.total_ns - busy.overlap_ns(compute)
        if alone:
            result[cause] = result.get(cause, 0) + alone
    return result


def _by_cause(pieces: pl.DataFrame) -> dict[str, int]:
    return dict(pieces.group_by("cause").agg(pl.col("duration_ns").sum()).iter_rows())


@dataclass(frozen=True, slots=True)
class NamedChange:
    """A change with the option that requested it, such as "--remove input"."""

    name: str
    change: Change


@dataclass(frozen=True, slots=True)
class Prospect:
    name: str  # the option that requested it
    step_ns: float  # mean step with the change
    saving_ns: float  # negative where the step becomes longer
    saving_share: float  # share of the measured step

    @classmethod
    def of(cls, name: str, outcome: Outcome) -> Prospect:
        return cls(name, outcome.step_ns, outcome.saving_ns, outcome.saving_share)


@dataclass(frozen=True, slots=True)
class AsMeasured:
    """The steps as measured, and how reliable a replay of them is."""

    path: str
    format: str
    stepped: bool  # whether the trace has steps; else the whole recording counts as one
    step_count: int  # complete steps; 1 without steps
    step_ns: float  # mean step in the trace
    replayed_step_ns: float  # mean step in the replay without a change
    device: str | None  # busiest device; None where the trace has none
    unexplained_share: float  # share of the steps' time in which the device waited for something outside the trace
    why_not: str | None  # why replays are not reliable, in one sentence; None where they are
    # parts of the critical path of all steps, columns as in `critical_path.RESOURCE_SCHEMA`
    resources: pl.DataFrame
    warnings: tuple[TraceWarning, ...] = ()  # what was skipped or repaired while reading the trace


@dataclass(frozen=True, slots=True, repr=False)
class Answer(Displayed):
    """Predicted step time, and its explanation.

    Attributes:
        measured: the steps as measured.
        alone: each change by itself.
        together: all changes; None without changes.
        resources: parts of the critical path with the changes; None without changes.
        causes: saving per step without each cause, columns as in `causes.CAUSE_SCHEMA`; None with changes.
        job: the job's step with the changes, if several ranks that meet in collectives were given.
        path: critical path with any changes, as from `critical_path`; None if not requested.
        slack: as from `slack_of_operators`, for the measured steps; None if not requested.
        curve: as from `speed_up_curve`, for the measured steps; None if not requested.
        contended_share: part of the measured steps in which their thread waited for a processor, if noticeable.
    """

    measured: AsMeasured
    alone: tuple[Prospect, ...] = ()
    together: Prospect | None = None
    resources: pl.DataFrame | None = None
    causes: pl.DataFrame | None = None
    job: JobProspect | None = None
    path: pl.DataFrame | None = None
    slack: pl.DataFrame | None = None
    curve: pl.DataFrame | None = None
    contended_share: float = 0.0


@dataclass
class Tried:
    """What is known of one experiment, so that a further question replays only what is new.

    Attributes:
        causes: the table without changes.
        changes: by the cause or rule that is removed.
        alone: results of single changes by the options that asked for them.
    """

    measured: AsMeasured | None = None
    causes: pl.DataFrame | None = None
    changes: dict[str, Change] = field(default_factory=dict)
    alone: dict[str, Prospect] = field(default_factory=dict)


def what_if(
    experiment: Experiment, changes: Sequence[NamedChange], tried: Tried | None = None
) -> tuple[Answer, Replay]:
    """Predict the step with all of these changes or, without changes, without each cause.

    Args:
        tried: earlier results for this experiment; new ones are added.

    Returns:
        The answer, and the replay behind its critical path.

    Raises:
        UsageError: nothing recorded takes time, or a change does not fit the trace.
    """
    graph = experiment.graph
    if not len(graph.stretches.start) and not len(graph.works.start):
        raise UsageError("the trace contains nothing that takes time: there is nothing to replay")
    tried = Tried() if tried is None else tried
    measured = tried.measured = tried.measured or as_measured(experiment)
    if not changes:
        tried.causes = cause_table(experiment) if tried.causes is None else tried.causes
        return Answer(measured, causes=tried.causes), experiment.measured
    if len(changes) > 1:
        for each in changes:
            if each.name not in tried.alone:
                tried.alone[each.name] = Prospect.of(each.name, experiment.run(each.change(experiment, graph)))
    whole = experiment.run(together(*(each.change for each in changes))(experiment, graph))
    if len(changes) == 1:
        tried.alone[changes[0].name] = Prospect.of(changes[0].name, whole)
    after = resources(path_in_sum(experiment, whole.replay))
    alone = tuple(tried.alone[each.name] for each in changes)
    return Answer(measured, alone, Prospect.of("together", whole), after), whole.replay


def as_measured(experiment: Experiment) -> AsMeasured:
    metadata, count = experiment.trace.metadata, experiment.step_count
    return AsMeasured(
        path=metadata.path,
        format=metadata.format,
        stepped=experiment.steps.height > 0,
        step_count=count,
        step_ns=experiment.recorded_ns / count,
        replayed_step_ns=experiment.measured_ns / count,
        device=experiment.device,
        unexplained_share=experiment.unexplained_share,
        why_not=experiment.why_not,
        resources=resources(path_in_sum(experiment)),
        warnings=experiment.trace.warnings,
    )


def path_by_name(path: pl.DataFrame) -> pl.DataFrame:
    """Pieces of the critical path combined by name, longest first.

    Returns:
        Columns kind, cause, name, pieces, ns, share (of the path).
    """
    total = max(int(path["duration_ns"].sum()), 1)
    table = path.group_by("kind", "cause", "name").agg(pieces=pl.len(), ns=pl.col("duration_ns").sum())
    table = table.with_columns(share=pl.col("ns") / total)
    return table.sort(["ns", "kind", "cause", "name"], descending=[True, False, False, False])


CURVE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "name": pl.String,  # operator, kernel or module, or FILE:LINE
    "factor": pl.Float64,  # factor on its time: 0.5 is twice as fast, 0 removes it
    "step_ns": pl.Float64,
    "saving_share": pl.Float64,  # of the measured step, 0 to 1
}
CurveKind: TypeAlias = Literal["operators", "kernels", "modules", "lines"]
FACTORS: Final = (0.75, 0.5, 0.25, 0.0)


def speed_up_curve(
    experiment: Experiment, kind: CurveKind, *, top: int = 10, factors: Sequence[float] = FACTORS
) -> pl.DataFrame:
    """Step time with each of the costliest operators, kernels, modules or lines scaled by these factors.

    Args:
        top: number of the costliest to try.

    Returns:
        Columns as in CURVE_SCHEMA, the largest saving at the smallest factor first.
    """
    rows = []
    for name in _costliest(experiment, kind, top):
        for factor in factors:
            outcome = experiment.run(scaled(glob.escape(name), factor)(experiment, experiment.graph))
            rows.append((name, factor, outcome.step_ns, outcome.saving_share))
    table = pl.DataFrame(rows, schema=dict(CURVE_SCHEMA), orient="row")
    largest = pl.col("saving_share").max().over("name")
    return table.sort([largest, "name", "factor"], descending=[True, False, True])


def _costliest(experiment: Experiment, kind: CurveKind, top: int) -> list[str]:
    trace = experiment.trace
    if kind == "operators":
        return operator_table(trace)["name"].unique(maintain_order=True).head(top).to_list()
    if kind == "kernels":
        return kernel_table(trace)["name"].unique(maintain_order=True).head(top).to_list()
    costs = place_costs(trace, attribution=experiment.attribution)
    if kind == "modules":
        return module_table(trace, costs=costs)["module"].drop_nulls().head(top).to_list()
    lines = line_table(trace, costs=costs).drop_nulls(["file", "line"]).head(top)
    return [f"{file}:{line}" for file, line in lines.select("file", "line").iter_rows()]


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
        raise UsageError(f"the number of workers cannot be {workers}")

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        calls = loader_calls(experiment.trace)
        if calls.is_empty():
            raise UsageError("the trace has no data loader that returns batches, so workers cannot be tried")
        stretches = graph.stretches
        start, length = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
        lanes = calls["lane"].to_numpy().astype(np.int32)
        after = stretches.at(lanes, start + length)
        known = (after >= 0) & (stretches.start[np.maximum(after, 0)] == start + length)
        known &= stretches.previous[np.maximum(after, 0)] >= 0
        if not known.any():
            raise UsageError("no thread of the trace waits only for its batches, so workers cannot be tried")
        program = experiment.trace.metadata.program or ProgramFacts()
        made = batches(program, " ".join(calls["name"].unique()))
        loading = _loading_ns(made, length)
        own = stretches.own_ns.copy()
        if workers == 0:
            own[after[known]] = loading[known]
            return replace(graph, stretches=replace(stretches, own_ns=own))
        received = int(np.median(length)) if made.workers else HANDED_OVER_NS
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
        "workers load the batches, so the trace does not show how long one takes: record it with stepscope run"
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
            raise UsageError("nothing in the trace was launched on a device, so nothing can become a graph")
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
            raise UsageError("the trace has no all-reduce or reduce-scatter, so no communication can be overlapped")
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
    device = device_numbers(experiment.trace)
    group = np.where(moved[:count], -device, works.queue[:count])
    start, end = works.start[:count], (works.start + works.duration)[:count]
    previous = np.append(previous_in(group, start, end), works.previous[count:])
    place = graph.places[1]  # where clocks disagree, work that began earlier may be replayed later
    previous = np.where((previous >= 0) & (place[previous] < place), previous, -1)
    waits = graph.queue_waits
    free = waits.select(~(moved[waits.source] & ~moved[waits.target]))
    ready, sent = _sent_results(graph, rows, moved)
    source, target = _optimizer_after(experiment, graph, rows)
    source, target = np.concatenate([ready, source]), np.concatenate([sent, target])
    known = place[source] < place[target]
    source, target = source[known], target[known]
    return replace(
        graph,
        works=replace(works, previous=previous),
        queue_waits=free.with_edges(Edges(source, target, works.gap_ns[target], np.zeros(len(source), np.int64))),
    )


def _sent_results(graph: Graph, rows: Rows, moved: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """For each collective, the computation before it in its old queue, whose result it sends, if any."""
    before = graph.works.previous[rows]
    while ((before >= 0) & moved[before]).any():
        before = np.where((before >= 0) & moved[before], graph.works.previous[before], before)
    return before[before >= 0], rows[before >= 0]


def _optimizer_after(experiment: Experiment, graph: Graph, rows: Rows) -> tuple[Rows, Rows]:
    """For each collective, the optimizer's first work launched after it, if any."""
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
            raise UsageError("the trace does not have two all-reduces of known size on a device, so none can be joined")
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
        return replace(graph, work_scale=scale, queue_waits=_waits_for_carriers(graph, rows, carrier))

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


def _waits_for_carriers(graph: Graph, rows: Rows, carrier: Rows) -> Edges:
    """Turn waits for parts of a bucket into waits for the bucket, unless that goes backwards in time."""
    waits = graph.queue_waits
    to = np.arange(len(graph.works.start))
    to[rows] = carrier
    source = to[waits.source]
    order = graph.places[1]
    return replace(waits, source=source).select(order[source] < order[waits.target])
