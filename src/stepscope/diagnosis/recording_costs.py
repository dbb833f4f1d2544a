"""What steps hold only because of how they were recorded: page faults, work for each event, and a busy machine.

A profiler works around each operator to record its name, its inputs' shapes and its memory, and Python runs slower
while lines are recorded. Steps with many small operators or much Python may take several times as long while they are
recorded, and a promise that is a share of such a step does not hold for unrecorded ones.

The extra length of recorded steps is measured in processor time, which other programs do not lengthen. It is divided
among the operators, up to what one costs; the rest goes to the time outside operators if lines were recorded; what then
remains is spread evenly. With a device, only operators are counted, since its work may hide the host's time.

The profiler keeps a record of each operator until the recording ends. The C library places these in blocks that the
program has just freed, so that a large tensor no longer fits there and gets new memory from the system, which maps and
clears every page of it. Steps that otherwise map hardly a page may map tens of thousands while they are recorded and
take twice as long, mostly where large tensors are created and soon freed, as in loops.

A busy machine, or a container's quota, keeps the thread from running. The operating system counts how long it was ready
and got no processor: replays leave that out of its own work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import host_time
from stepscope.trace import Metadata, Trace
from stepscope.trace.nesting import Rows
from stepscope.trace.program_facts import ProgramFacts, StepFacts
from stepscope.trace.window import Times, union
from stepscope.whatif import Change, Experiment, Graph
from stepscope.whatif.changes import scaled_cause

if TYPE_CHECKING:
    from stepscope.diagnosis.view import View

FAULT_NS: Final = 2_000
"""Longest time in the operating system that one mapped page explains if nothing else limits it."""
PAGE_BYTES: Final = 4_096
LEAST_OF_A_STEP: Final = 0.1
"""Time before the recording, as a share of a recorded step, below which no step ran before it."""


def without_recorded_faults(experiment: Experiment) -> Change | None:
    """Remove the page faults that only the recording caused; None if they are unknown or zero.

    The operating system's counts, in recorded steps and in earlier ones, give the number of pages and the time for
    each. The allocations' addresses show where they were mapped: in operators that took memory no allocation had used
    before. Applies only without a device, which would hide the host's time.
    """
    trace = experiment.trace
    if experiment.device is not None or trace.metadata.program is None:
        return None
    steps = facts_of_steps(experiment)
    pages, page_ns = _recorded_only(trace.metadata, steps, _slower_ns(experiment))
    if pages <= 0 or page_ns <= 0:
        return None
    rows, fresh = _fresh_pages(trace)
    starts = trace.operators["start_ns"].to_numpy()[rows]
    inside = (starts >= experiment.span.start_ns) & (starts < experiment.span.end_ns) & (fresh > 0)
    rows, starts, fresh = rows[inside], starts[inside], fresh[inside]
    if not len(rows):
        return None
    fresh *= min(pages * experiment.step_count / fresh.sum(), 1.0)
    page_ns *= waiting_factor(steps)
    durations = trace.operators["duration_ns"].to_numpy()[rows]
    # By name: a thread that waits for a processor waits long in a few operators.
    _, name = np.unique(trace.operators["name"].gather(rows).to_physical().to_numpy(), return_inverse=True)
    cost, total = (np.bincount(name.ravel(), each) for each in (fresh * page_ns, durations))
    factors = (1 - np.minimum(cost / np.maximum(total, 1), 1.0))[name.ravel()]
    lanes = trace.operators["lane"].to_numpy()[rows].astype(np.int32)

    def apply(_: Experiment, graph: Graph) -> Graph:
        return graph.with_host_time(lanes, starts, starts + durations, factors)

    return apply


def faults_before(metadata: Metadata, step_ns: float) -> float | None:
    """Pages mapped in an unrecorded step; None if no such step was counted.

    Counted in the run's other steps, or else in the warm-up before the recording. Recorded steps may take several times
    as long, so a warm-up shorter than a recorded step may still hold a whole step.

    Args:
        step_ns: duration of a recorded step.
    """
    if metadata.unrecorded is not None and metadata.unrecorded.faults is not None:
        return metadata.unrecorded.faults
    program = metadata.program or ProgramFacts()
    faults, length_ns = (program.process_figure(name) for name in ("warm_up_faults", "warm_up_ns"))
    if faults is None or length_ns is None:
        return None
    steps = length_ns / step_ns
    return faults / max(round(steps), 1) if steps >= LEAST_OF_A_STEP else None


def facts_of_steps(experiment: Experiment) -> list[StepFacts]:
    """The operating system's counts of the steps that savings refer to."""
    program, indexes = experiment.trace.metadata.program, set(experiment.steps["index"].to_list())
    steps = program.steps if program is not None else ()
    return [step for step in steps if step.index in indexes and step.duration_ns > 0]


def waiting_factor(steps: Sequence[StepFacts]) -> float:
    """How many times its processor time a thread's work takes because it waits for a processor; 1 or more."""
    waiting = sum(step.thread_waiting_ns or 0 for step in steps)
    worked = sum(step.thread_processor_ns or 0 for step in steps)
    return 1 + waiting / worked if worked > 0 else 1.0


CONTENDED: Final = 0.1
"""Share of the steps in which their thread was ready and got no processor from which the recording is disturbed."""
MOST_CONTENDED: Final = 0.75
"""Share from which too little of the steps is left to predict from."""
_FEWEST_STEPS: Final = 3
_THREAD_WORK: Final = (
    "python", "dispatch", "optimizer", "untraced", "garbage_collection", "logging", "graph_tracing", "step_marker",
)  # fmt: skip
"""Causes of time in which the thread runs or is ready to; "dispatch" has the operators where there is no device."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Time in which the steps' thread was ready and got no processor, but not because of the program itself.

    Attributes:
        share: of the steps' time, 0 to 1.
        ns_per_step: the same in nanoseconds.
        by_quota: whether a container's quota stopped the program for most of it.
        other_cores: processors that other programs kept busy meanwhile; None if unknown.
        usable_processors: processors that the program may use; None if unknown.
    """

    share: float
    ns_per_step: int
    by_quota: bool = False
    other_cores: float | None = None
    usable_processors: int | None = None

    @property
    def is_too_much(self) -> bool:
        """Whether too little of the steps is left to predict from."""
        return self.share > MOST_CONTENDED

    def change(self, experiment: Experiment, graph: Graph) -> Graph:
        """Take it out of a graph: as much of the thread's own work, each part of it in proportion."""
        factor = self._left(experiment)
        for cause in _worked_causes(experiment):
            graph = scaled_cause(cause, factor)(experiment, graph)
        return graph

    def _left(self, experiment: Experiment) -> float:
        steps = facts_of_steps(experiment)
        waited = sum(step.thread_waiting_ns or 0 for step in steps)
        counted = waited + sum(step.thread_processor_ns or 0 for step in steps)
        causes = host_time(experiment.trace, window=experiment.span, activity=experiment.activity)
        worked = causes.filter(pl.col("cause").is_in([*_worked_causes(experiment), "compute"]))
        return 1 - waited / max(int(worked["duration_ns"].sum()), counted, 1)


def contention_of(experiment: Experiment) -> Contention | None:
    """How much the recorded steps were held up; None if it is little, unknown, or the program's own doing.

    The program contends with itself if it has more threads, loader workers or ranks than it may use processors, or if
    other programs used less than what the thread did not get.
    """
    steps, program = facts_of_steps(experiment), experiment.trace.metadata.program or ProgramFacts()
    length_ns = sum(step.duration_ns for step in steps)
    waited = [step.thread_waiting_ns for step in steps if step.thread_waiting_ns is not None]
    if len(waited) < max(len(steps), _FEWEST_STEPS):
        return None
    share = min(sum(waited) / length_ns, 1.0)
    throttled = [step.throttled_ns for step in steps if step.throttled_ns is not None]
    by_quota = len(throttled) == len(steps) and sum(throttled) > sum(waited) / 2
    others, usable = program.other_cores, program.process_figure("usable_processors")
    is_unexplained = not by_quota and others is not None and others < share
    if share < CONTENDED or contends_with_itself(program) or is_unexplained:
        return None
    return Contention(share, sum(waited) // len(steps), by_quota, others, usable)


def contends_with_itself(program: ProgramFacts) -> bool:
    """Whether the program has more threads, loader workers or ranks than it may use processors."""
    usable, threads = program.process_figure("usable_processors"), program.torch.get("threads")
    workers = max((loader.workers or 0 for loader in program.loaders), default=0)
    own = max(threads if isinstance(threads, int) else 0, workers)
    return (usable is not None and own > usable) or (program.process_figure("local_world_size") or 1) > 1


def _worked_causes(experiment: Experiment) -> tuple[str, ...]:
    """Causes of the thread's own work; loading batches is some if no worker processes do it."""
    program = experiment.trace.metadata.program or ProgramFacts()
    loads = bool(program.loaders) and not any(loader.workers for loader in program.loaders)
    return (*_THREAD_WORK, "input") if loads else _THREAD_WORK


def _recorded_only(metadata: Metadata, steps: Sequence[StepFacts], slower_ns: float) -> tuple[float, float]:
    """Pages per step that only recorded steps map, and nanoseconds per page; both 0 if unknown.

    A page takes the steps' time in the operating system, up to FAULT_NS, or where it is known how much slower recorded
    steps are up to that: of huge pages, which take longer, there are fewer.
    """
    faults = [step.minor_faults for step in steps if step.minor_faults is not None]
    system = [step.thread_system_ns for step in steps if step.thread_system_ns is not None]
    if not steps or len(faults) < len(steps) or len(system) < len(steps) or not sum(faults):
        return 0.0, 0.0
    before = faults_before(metadata, sum(step.duration_ns for step in steps) / len(steps))
    if before is None:
        return 0.0, 0.0
    pages = sum(faults) / len(steps) - before
    most_ns = slower_ns / pages if slower_ns > 0 and pages > 0 else FAULT_NS
    return pages, min(sum(system) / sum(faults), most_ns)


def _fresh_pages(trace: Trace) -> tuple[Rows, npt.NDArray[np.float64]]:
    """Rows of the outermost operators, and the number of never-used pages each took; shape (operators,)."""
    operators = trace.operators
    outermost = np.flatnonzero(operators["parent"].is_null().to_numpy())
    pages = np.zeros(len(outermost))
    taken = trace.memory.filter((pl.col("device") == "cpu") & (pl.col("bytes") > 0) & pl.col("address").is_not_null())
    taken = taken.sort("start_ns", maintain_order=True)
    fresh = fresh_bytes(taken["address"].to_numpy(), taken["bytes"].to_numpy()) / PAGE_BYTES
    lanes, times = taken["lane"].to_numpy(), taken["start_ns"].to_numpy()
    lane = operators["lane"].to_numpy()[outermost]
    start = operators["start_ns"].to_numpy()[outermost]
    end = start + operators["duration_ns"].to_numpy()[outermost]
    for number in np.unique(lanes).tolist():
        its, mine = np.flatnonzero(lane == number), np.flatnonzero(lanes == number)
        if not len(its):
            continue
        its = its[np.argsort(start[its], kind="stable")]
        position = np.searchsorted(start[its], times[mine], side="right") - 1
        around = its[np.maximum(position, 0)]
        inside = (position >= 0) & (times[mine] <= end[around])
        np.add.at(pages, around[inside], fresh[mine[inside]])
    return outermost, pages


def fresh_bytes(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes of each block that no earlier block covered; blocks in order of time, shape of `sizes`."""
    begins: list[int] = []  # addresses covered so far, as disjoint intervals
    ends: list[int] = []
    found = np.zeros(len(sizes))
    for index, (begin, size) in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
        end = begin + size
        first, last = bisect_left(ends, begin), bisect_right(begins, end)
        known = sum(max(min(end, ends[each]) - max(begin, begins[each]), 0) for each in range(first, last))
        found[index] = size - known
        if first < last:
            begin, end = min(begin, begins[first]), max(end, ends[last - 1])
        begins[first:last], ends[first:last] = [begin], [end]
    return found


OPERATOR_NS: Final = 700.0
"""Usual cost of recording an operator with shapes and allocations; each run's own cost is measured."""
MOST_SCALE: Final = 1.5
"""Largest multiple of OPERATOR_NS that counts as an operator's cost."""
MOST_OF_PYTHON: Final = 0.8
"""Largest share of time outside operators due to recording lines, which makes Python five times as slow."""
_MOST_OF_A_PIECE: Final = 0.95


@dataclass(frozen=True, slots=True)
class RecordedEvents:
    """What recording the events cost.

    Attributes:
        operator_ns: cost of recording an operator.
        change: removes the cost of all events.
    """

    operator_ns: float
    change: Change


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A thread's time, cut at the borders of operators and lines; arrays of shape (n,)."""

    start: Times
    end: Times
    cost_ns: npt.NDArray[np.float64]  # for recording the operators that begin or end at its borders
    is_python: npt.NDArray[np.bool_]  # outside operators


def recorded_events(experiment: Experiment, graph: Graph) -> RecordedEvents | None:
    """Measure what recording each event of the steps cost.

    Returns None if no other steps were timed, or if they took as long.

    Args:
        graph: the steps' graph without other costs of recording, which count towards the difference.
    """
    wanted_ns = _slower_ns(experiment)
    pieces = _pieces(experiment)
    if wanted_ns <= 0 or not len(pieces.start):
        return None
    wanted_ns -= experiment.measured_ns / experiment.step_count - experiment.run(graph).step_ns
    wanted_ns *= experiment.step_count
    if wanted_ns <= 0:
        return None
    lanes = np.full(len(pieces.start), experiment.lane, np.int32)
    length_ns = np.maximum(graph.host_scale.length(lanes, pieces.start, pieces.end), 1).astype(np.float64)
    factors, scale = np.ones(len(length_ns)), 0.0
    if pieces.cost_ns.any():
        scale = min(wanted_ns / float(pieces.cost_ns.sum()), MOST_SCALE * waiting_factor(facts_of_steps(experiment)))
        factors = np.maximum(1 - scale * pieces.cost_ns / length_ns, 1 - _MOST_OF_A_PIECE)
    if experiment.device is None:
        parts = (pieces.is_python, MOST_OF_PYTHON), (np.ones(len(factors), np.bool_), _MOST_OF_A_PIECE)
        for some, most in parts if experiment.trace.lines.height else parts[1:]:
            left_ns = wanted_ns - float(((1 - factors) * length_ns).sum())
            theirs_ns = max(float((factors * length_ns)[some].sum()), 1.0)
            factors[some] *= 1 - min(max(left_ns / theirs_ns, 0.0), most)
    return RecordedEvents(
        scale * OPERATOR_NS, lambda _, graph: graph.with_host_time(lanes, pieces.start, pieces.end, factors)
    )


def _slower_ns(experiment: Experiment) -> float:
    """How much longer the median recorded step takes than the median other step, waits for a processor included.

    Means would count what comes in one step of several, such as an evaluation, as a cost of recording.
    """
    unrecorded = experiment.trace.metadata.unrecorded
    if unrecorded is None or not experiment.steps.height:
        return 0.0
    if experiment.device is not None:
        return float(unrecorded.recorded_step_ns - unrecorded.step_ns)
    steps = facts_of_steps(experiment)
    recorded_ns = [step.thread_processor_ns for step in steps if step.thread_processor_ns is not None]
    if unrecorded.processor_ns is None or not recorded_ns or len(recorded_ns) < len(steps):
        return 0.0
    return (median(recorded_ns) - unrecorded.processor_ns) * waiting_factor(steps)


def _pieces(experiment: Experiment) -> _Pieces:
    """The steps' pieces on their thread; recording an operator costs the same at each of its borders."""
    trace, lane, span = experiment.trace, experiment.lane, experiment.span
    begins, ends = _borders(trace, "operators", lane)
    at = np.concatenate([begins, ends, _borders(trace, "lines", lane)[0]])
    inside = (at >= span.start_ns) & (at <= span.end_ns)
    half_ns = np.repeat([OPERATOR_NS / 4, 0.0], [2 * len(begins), len(at) - 2 * len(begins)])[inside]
    ends_of_span = np.array([span.start_ns, span.end_ns], np.int64)
    borders, which = np.unique(np.concatenate([at[inside], ends_of_span]), return_inverse=True)
    near_ns = np.bincount(which.ravel(), np.append(half_ns, [0.0, 0.0]), len(borders)).astype(np.float64)
    covered = union(begins, ends)
    around = np.searchsorted(covered.starts, borders[:-1], side="right") - 1
    is_inside = (around >= 0) & (covered.ends[np.maximum(around, 0)] > borders[:-1]) if len(begins) else around >= 0
    return _Pieces(borders[:-1], borders[1:], near_ns[:-1] + near_ns[1:], ~is_inside)


def _borders(trace: Trace, table: str, lane: int) -> tuple[Times, Times]:
    rows = getattr(trace, table)
    mine = rows["lane"].to_numpy() == lane
    begins: Times = rows["start_ns"].to_numpy()[mine]
    return begins, begins + rows["duration_ns"].to_numpy()[mine]


MOST_SUBTRACTED_NS: Final = 600.0
"""Most to subtract per operator: recording one with shapes costs at least this, and some twice as much."""


def unrecorded_ns(view: View, pieces: pl.DataFrame) -> int:
    """Time that pieces of the main thread's time would cost without the profiler, scaled to `view.length_ns`.

    The profiler's overhead per operator is subtracted from both the pieces and the steps. This needs a recorder that
    timed faster steps before it recorded, and no device, which would hide the host's time; otherwise the pieces' time
    is returned unchanged.

    Args:
        pieces: columns start_ns and duration_ns; they do not overlap.
    """
    own = int(pieces["duration_ns"].sum())
    begins = view.operators.filter(pl.col("lane") == view.lane)["start_ns"].to_numpy()
    each = _operator_ns(view, len(begins))
    pieces = pieces.sort("start_ns")
    starts, ends = pieces["start_ns"].to_numpy(), (pieces["start_ns"] + pieces["duration_ns"]).to_numpy()
    if not each or not len(starts):
        return own
    piece = np.searchsorted(starts, begins, side="right") - 1
    inside = int(((piece >= 0) & (begins < ends[piece])).sum())
    return int(max(own - inside * each, 0.0) * view.length_ns / max(view.length_ns - len(begins) * each, 1.0))


def _operator_ns(view: View, operators: int) -> float:
    """Overhead of recording an operator, measured on the other steps or MOST_SUBTRACTED_NS at most; 0 if unknown."""
    if view.recorded_events is not None and view.device is None:
        return view.recorded_events.operator_ns
    warm_up = view.program.process_figure("warm_up_ns")
    if not operators or not warm_up or view.device is not None:
        return 0.0
    slower = view.step_ns - warm_up / max(round(warm_up / view.step_ns), 1)
    return min(max(slower * view.step_count / operators, 0.0), MOST_SUBTRACTED_NS)
