"""Start and end of each step, from annotations or from repetition; and one-off work of a process.

One-off work is first launches, initialisation, compilation inside an operator and capture of graphs. None of it happens
in later steps, so it belongs to no typical step. A call is one-off if its name says so, or if it lasts many times as
long as the others of its name, in one step only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.serving import PUT_ASIDE, iteration_table, trains
from stepscope.trace import Trace, Window
from stepscope.trace.model import XLA_FORMATS
from stepscope.trace.window import Times

STEP_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "index": pl.Int64,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "complete": pl.Boolean,  # whether it lies entirely inside the recording
    "source": pl.String,  # "annotation" or "inferred"
}

PARTIAL_SHARE: Final = 0.5
"""A first or last step below this share of the other steps' median was cut off by the recording."""
MINIMUM_REPETITIONS: Final = 3
MATCHING_SHARE: Final = 0.98
"""Share of a sequence that must repeat one period later to make it periodic."""
ENOUGH: Final = 10
"""Fewest complete steps that tell a single unusual one from a regular event."""
UNLIKE: Final = 3.0
"""A step this many times as long as the median is an outlier."""
DISTORTING: Final = 0.25
"""Share of the mean step that outliers must account for to be set apart."""
ONE_OF_A_KIND: Final = 0.5
"""If another step is at least this share as long as the longest, the longest is no exception."""
MANY_ITERATIONS: Final = 2
"""With this many iterations of an engine in each marked step, the iterations are the steps."""
_PROGRAM: Final = r"^[\w.<>-]+\(\d+\)$"
"""XLA's name for the execution of a compiled program on a device, with the program's number."""
_LONGEST_SEQUENCE: Final = 200_000
_CANDIDATES: Final = 200


@dataclass(frozen=True, slots=True)
class StepSummary:
    source: str  # "annotation", "inferred" or "none"
    count: int  # complete steps
    median_ns: int  # over the complete steps; 0 without any
    shortest_ns: int
    longest_ns: int
    mean_ns: float  # over the complete steps
    spread: float  # standard deviation over mean, 0 without steps


def step_table(trace: Trace, iterations: pl.DataFrame | None = None) -> pl.DataFrame:
    """Steps in order; columns as in STEP_SCHEMA. Empty if neither annotations nor repetition show steps.

    Iterations of an engine that serves are steps, unless the program trains, or marked steps that each hold one, or the
    iterations are inferred from a recording of stepscope, whose facts and times are about the marked steps. A marked
    step in which graphs were captured or the engine warmed up is none; where nothing else happened, there are no steps.

    Args:
        iterations: as from `iteration_table`, if already known.
    """
    iterations = iteration_table(trace) if iterations is None else iterations
    aside = pl.col("phase").is_in(PUT_ASIDE).fill_null(False)
    served = iterations.filter(~aside)
    steps = _without_most_of(_annotated(trace, "host"), iterations.filter(aside))
    are_kept = steps.height > 0 and trace.metadata.program is not None and "inferred" in iterations["source"]
    are_steps = iterations.height and served.height >= MANY_ITERATIONS * steps.height and not are_kept
    if are_steps and not trains(trace):
        return _with_complete(_of_iterations(served), trace.metadata.window, may_be_cut=False)
    for find in (
        partial(_annotated, kind="device"),
        _inferred_from_marks,
        _inferred_from_programs,
        _inferred_from_period,
    ):
        if steps.is_empty():
            steps = find(trace)
    return _with_complete(steps.sort("start_ns"), trace.metadata.window)


def span_of(steps: pl.DataFrame) -> Window | None:
    """Window from the first start to the last end of these steps; None without steps."""
    if steps.is_empty():
        return None
    starts = steps["start_ns"].to_numpy()
    return Window(int(starts.min()), int((starts + steps["duration_ns"].to_numpy()).max()))


def are_of_a_device(trace: Trace, steps: pl.DataFrame) -> bool:
    """Whether steps are device times, however long before the work was launched.

    Steps inferred from what a device does begin with its work. XLA's hosts run many steps ahead, and their unmarked
    steps are visible only on devices.

    Args:
        steps: as from `step_table`.
    """
    if "inferred" not in steps["source"]:
        return False
    starts = trace.device_work["start_ns"].implode()
    return trace.metadata.format in XLA_FORMATS or bool(steps["start_ns"].is_in(starts).all())


def typical_run(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps to measure: all of them, or those on the longer side of a stretch of outliers.

    A stretch of consecutive steps around the longest is set apart if each is at least UNLIKE times as long as the
    median, no other step is nearly as long, and the mean falls by DISTORTING or more without it. What happens twice
    may happen regularly, and so may what happens in one of fewer than ENOUGH steps.
    """
    if steps.height < ENOUGH:
        return steps
    steps = steps.sort("start_ns")
    durations = steps["duration_ns"].to_numpy()
    unlike = np.flatnonzero(durations >= UNLIKE * np.median(durations))
    longest = int(durations.argmax())
    stretch = np.array([longest])
    while len(wider := np.intersect1d(unlike, np.arange(stretch[0] - 1, stretch[-1] + 2))) > len(stretch):
        stretch = wider
    others = np.delete(durations, stretch)
    if longest not in unlike or float(others.mean()) > (1 - DISTORTING) * float(durations.mean()):
        return steps
    if float(others.max()) >= ONE_OF_A_KIND * float(durations[stretch].max()):
        return steps
    before, after = steps.head(stretch[0]), steps.tail(steps.height - stretch[-1] - 1)
    return before if before.height > after.height else after


def step_summary(steps: pl.DataFrame) -> StepSummary:
    """Summarise the steps of `step_table`."""
    complete = steps.filter(pl.col("complete"))["duration_ns"].to_numpy()
    source = steps["source"][0] if steps.height else "none"
    if not complete.size:
        return StepSummary(source, 0, 0, 0, 0, 0.0, 0.0)
    mean = float(complete.mean())
    return StepSummary(
        source=source,
        count=len(complete),
        median_ns=int(np.median(complete)),
        shortest_ns=int(complete.min()),
        longest_ns=int(complete.max()),
        mean_ns=mean,
        spread=float(complete.std() / mean) if mean else 0.0,
    )


def _steps(index: npt.NDArray[np.int64], start: Times, end: Times, source: str) -> pl.DataFrame:
    return pl.DataFrame(
        {"index": index, "start_ns": start, "duration_ns": end - start},
        schema={"index": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64},
    ).with_columns(complete=pl.lit(True), source=pl.lit(source))


def _annotated(trace: Trace, kind: str) -> pl.DataFrame:
    """Steps marked by the program on the host, or by XLA on devices if the host was not recorded."""
    marks = trace.annotations.filter((pl.col("kind") == kind) & pl.col("step").is_not_null())
    if kind == "device" and marks.height:
        marks = marks.filter(pl.col("lane") == marks["lane"].mode().min())
    marks = _most_frequent_kind(marks).sort("start_ns").unique("step", keep="first", maintain_order=True)
    start = marks["start_ns"].to_numpy()
    return _steps(marks["step"].to_numpy(), start, start + marks["duration_ns"].to_numpy(), "annotation")


def _of_iterations(iterations: pl.DataFrame) -> pl.DataFrame:
    starts = iterations["start_ns"].to_numpy()
    ends = starts + iterations["duration_ns"].to_numpy()
    source = "inferred" if "inferred" in iterations["source"] else "annotation"
    return _steps(np.arange(len(starts)), starts, ends, source)


def _without_most_of(steps: pl.DataFrame, aside: pl.DataFrame) -> pl.DataFrame:
    """The steps without those that mostly consist of these stretches."""
    if steps.is_empty() or aside.is_empty():
        return steps
    starts, ends = steps["start_ns"].to_numpy(), (steps["start_ns"] + steps["duration_ns"]).to_numpy()
    covered = np.zeros(len(starts), np.int64)
    for begin, duration in aside.select("start_ns", "duration_ns").iter_rows():
        covered += np.maximum(np.minimum(ends, begin + duration) - np.maximum(starts, begin), 0)
    return steps.filter(pl.Series(2 * covered < ends - starts))


def _most_frequent_kind(marks: pl.DataFrame) -> pl.DataFrame:
    """Marks of one kind: those named "train" if there are also some named "evaluate"."""
    name = pl.col("name")
    numbered = pl.when(name.str.contains(r"#\d")).then(name.str.replace(r"#\d+", "#"))
    marks = marks.with_columns(kind_of_step=numbered.otherwise(name.str.replace_all(r"\d+", "#")))
    counts = marks.group_by("kind_of_step").agg(pl.len(), first=pl.col("start_ns").min())
    best = counts.sort("len", "first", descending=[True, False])["kind_of_step"].head(1)
    return marks.filter(pl.col("kind_of_step").is_in(best.implode()))


def _inferred_from_marks(trace: Trace) -> pl.DataFrame:
    """Steps between consecutive ends of the optimizer step, or between loads of batches."""
    marks = trace.annotations.filter(pl.col("kind") == "host")
    for pattern, at_end in (("^Optimizer.step#", True), ("^enumerate\\(DataLoader\\)", False)):
        found = marks.filter(pl.col("name").str.contains(pattern))
        if found.height < MINIMUM_REPETITIONS:
            continue
        busiest = found["lane"].mode().min()
        found = found.filter(pl.col("lane") == busiest).sort("start_ns")
        times = (found["start_ns"] + (found["duration_ns"] if at_end else 0)).to_numpy()
        if len(times) >= MINIMUM_REPETITIONS:
            return _steps(np.arange(len(times) - 1), times[:-1], times[1:], "inferred")
    return pl.DataFrame(schema=dict(STEP_SCHEMA))


def _inferred_from_programs(trace: Trace) -> pl.DataFrame:
    """Steps between executions of the compiled program with the most time on a device."""
    runs = trace.annotations.filter((pl.col("kind") == "device") & pl.col("name").str.contains(_PROGRAM))
    sums = runs.group_by("lane", "name").agg(pl.len(), ns=pl.col("duration_ns").sum())
    sums = sums.filter(pl.col("len") >= MINIMUM_REPETITIONS).sort("ns", "lane", "name", descending=[True, False, False])
    if sums.is_empty():
        return pl.DataFrame(schema=dict(STEP_SCHEMA))
    mine = runs.join(sums.head(1), on=["lane", "name"], how="semi").sort("start_ns")
    times = mine["start_ns"].to_numpy()
    return _steps(np.arange(len(times) - 1), times[:-1], times[1:], "inferred")


def _inferred_from_period(trace: Trace) -> pl.DataFrame:
    """Steps from the period of the busiest queue's work, or else of the busiest thread's operators."""
    work = trace.device_work.select("start_ns", "name", "lane")
    operators = trace.operators.filter(pl.col("parent").is_null()).select("start_ns", "name", "lane")
    for rows in (work, operators):
        if rows.height < 2 * MINIMUM_REPETITIONS:
            continue
        busiest = rows.group_by("lane").len().sort("len", "lane", descending=[True, False])["lane"][0]
        mine = rows.filter(pl.col("lane") == busiest).sort("start_ns").head(_LONGEST_SEQUENCE)
        period = _period(mine["name"].rank("dense").to_numpy().astype(np.int64))
        if period is None:
            continue
        times = mine["start_ns"].to_numpy()
        bounds = times[_phase(times, period) :: period]
        if len(bounds) >= MINIMUM_REPETITIONS and _are_alike(np.diff(bounds)):
            return _steps(np.arange(len(bounds) - 1), bounds[:-1], bounds[1:], "inferred")
    return pl.DataFrame(schema=dict(STEP_SCHEMA))


def _period(codes: npt.NDArray[np.int64]) -> int | None:
    """Shortest distance at which the sequence repeats itself nearly everywhere."""
    count = len(codes)
    numbers, occurrences = np.unique(codes, return_counts=True)
    regular = numbers[occurrences >= MINIMUM_REPETITIONS]
    if not regular.size:
        return None
    rarest = regular[np.argsort(occurrences[np.isin(numbers, regular)], kind="stable")][:20]
    candidates: set[int] = set()
    for code in rarest:
        distances = np.diff(np.flatnonzero(codes == code))
        candidates.update(np.unique(distances)[:_CANDIDATES].tolist())
    for period in sorted(candidates):
        if 1 < period <= count // MINIMUM_REPETITIONS:
            matching = float((codes[period:] == codes[:-period]).mean())
            if matching >= MATCHING_SHARE:
                return period
    return None


def _are_alike(durations: Times) -> bool:
    """Whether most of the durations lie within a factor of two of their median."""
    middle = float(np.median(durations))
    return bool(((durations >= middle / 2) & (durations <= middle * 2)).mean() > 0.5)


def _phase(times: Times, period: int) -> int:
    """Position of the longest pause in the period: a step begins after it."""
    pauses = np.diff(times, prepend=times[:1])
    whole = len(pauses) // period * period
    return int(np.median(pauses[:whole].reshape(-1, period), axis=0).argmax())


def _with_complete(steps: pl.DataFrame, read: Window | None, *, may_be_cut: bool = True) -> pl.DataFrame:
    """Mark complete steps: a step that exceeds what was read is not, nor a much shorter first or last, if `may_be_cut`.

    Iterations of an engine may have any length.
    """
    durations = steps["duration_ns"].to_numpy()
    complete = np.ones(len(durations), np.bool_)
    if len(durations) >= 2 and may_be_cut:
        for edge in (0, len(durations) - 1):
            others = np.delete(durations, edge)
            complete[edge] = durations[edge] >= PARTIAL_SHARE * float(np.median(others))
    if read is not None:
        starts = steps["start_ns"].to_numpy()
        complete &= (starts >= read.start_ns) & (starts + durations <= read.end_ns)
    return steps.with_columns(complete=pl.Series(complete, dtype=pl.Boolean)).select(
        [pl.col(name).cast(dtype) for name, dtype in STEP_SCHEMA.items()]
    )


ONCE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "what": pl.String,  # "graph capture", "initialisation", "first launch", or "operator": inside one, before its work
    "name": pl.String,  # of the call or operator
}

LONGER: Final = 100
"""A call that lasts this many times the median of its name is one-off."""
LEAST_CALL_NS: Final = 1_000_000
LEAST_OPERATOR_NS: Final = 20_000_000
"""Shorter operators are not one-off: many take milliseconds, for instance to compute on the host."""
_CAN_WAIT: Final = ("synchronise", "copy", "queue_wait")
"""Kinds of calls that last as long as the device takes."""
_BEGINS: Final = r"^(?:cuda|hip|cu)StreamBeginCapture"
_ENDS: Final = r"^(?:cuda|hip|cu)StreamEndCapture"
_INITIALISES: Final = (
    r"^(?:cu|cuda|hip)(?:Module|Library)Load|^(?:cu|cuda|hip)GraphInstantiate|^(?:cu|hip)Init$|^cu(?:Ctx|DevicePrimaryCtx)"
    r"|^(?:cudnn|cublas(?:Lt)?|cusolver\w*|cusparse|cufft|hipblas(?:Lt)?|miopen|rocblas_)[cC]reate(?:_handle)?(?:_v2)?$"
    r"|^(?:nccl|rccl)CommInit"
)


def once_table(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """One-off work of the host threads: columns as in ONCE_SCHEMA, sorted by lane and start; rows may overlap.

    Args:
        steps: as from `step_table`.
    """
    found = pl.concat([captures(trace.launches), _calls(trace.launches, steps), _operators(trace, steps)])
    return found.sort("lane", "start_ns")


def captures(launches: pl.DataFrame) -> pl.DataFrame:
    """From the start of a stream's capture to its end on the same thread."""
    begins = launches.filter(pl.col("name").str.contains(_BEGINS)).sort("start_ns")
    ends = launches.filter(pl.col("name").str.contains(_ENDS)).sort("start_ns")
    ends = ends.select("lane", end="start_ns", last=_end())
    pairs = begins.join_asof(
        ends, left_on="start_ns", right_on="end", by="lane", strategy="forward", check_sortedness=False
    )
    pairs = pairs.filter(pl.col("last").is_not_null())
    return _found(pairs.with_columns(duration_ns=pl.col("last") - pl.col("start_ns")), pl.lit("graph capture"))


def _calls(launches: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Calls that initialise something, and those that last far longer than the others of their name."""
    known = pl.col("name").str.contains(_INITIALISES)
    usual = pl.col("duration_ns").median().over("name")
    unlike = (pl.len().over("name") > 1) & (pl.col("duration_ns") >= LONGER * usual)
    long = launches.filter(~pl.col("kind").is_in(_CAN_WAIT)).filter(
        known | (unlike & (pl.col("duration_ns") >= LEAST_CALL_NS))
    )
    first = pl.col("kind").is_in(["launch", "graph_launch"]) & ~pl.col("name").str.contains(_INITIALISES)
    return _found(
        _in_one_step(long, steps), pl.when(first).then(pl.lit("first launch")).otherwise(pl.lit("initialisation"))
    )


def _operators(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Stretches of launching operators, before a launch, in which they call nothing for very long.

    A just-in-time compiler may work there. Only the time between the calls inside counts, so work that the
    operator does in other operators does not.
    """
    operators = trace.operators.with_row_index("operator").filter(pl.col("duration_ns") >= LEAST_OPERATOR_NS)
    operators = _with_next(operators, trace.launches, "call").filter(pl.col("call") < _end())
    if operators.is_empty():
        return _found(operators, pl.lit("operator"))
    calls = trace.launches.filter(pl.col("operator").is_in(operators["operator"].implode()))
    inner = trace.operators.filter(pl.col("parent").is_in(operators["operator"].implode()))
    inside = pl.concat(
        [
            calls.select("operator", "start_ns", "duration_ns"),
            inner.select(pl.col("parent").alias("operator"), "start_ns", "duration_ns"),
        ]
    ).sort("operator", "start_ns")
    ends = _end().cum_max().over("operator")
    stretches = (
        inside.join(operators.select("operator", "lane", "name", begin="start_ns"), on="operator", how="left")
        .with_columns(begin=pl.coalesce(ends.shift(1).over("operator"), "begin"), end="start_ns")
        .with_columns(start_ns="begin", duration_ns=pl.col("end") - pl.col("begin"))
    )
    long = stretches.filter(pl.col("duration_ns") >= LEAST_OPERATOR_NS)
    return _found(_in_one_step(_without_frames(long, trace.frames), steps), pl.lit("operator"))


def _without_frames(stretches: pl.DataFrame, frames: pl.DataFrame) -> pl.DataFrame:
    """The stretches in which no Python frame begins: Python code inside an operator may take any time."""
    return _with_next(stretches, frames, "frame").filter(pl.col("frame").is_null() | (pl.col("frame") >= _end()))


def _with_next(rows: pl.DataFrame, others: pl.DataFrame, name: str) -> pl.DataFrame:
    """The rows in order, with the start of the next of the others on their thread."""
    begins = others.select("lane", pl.col("start_ns"), pl.col("start_ns").alias(name)).sort("start_ns")
    rows = rows.sort("start_ns")
    return rows.join_asof(begins, on="start_ns", by="lane", strategy="forward", check_sortedness=False)


def _end() -> pl.Expr:
    return pl.col("start_ns") + pl.col("duration_ns")


def _in_one_step(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The rows whose name occurs in at most one complete step."""
    steps = steps.filter("complete").sort("start_ns").select(step=pl.int_range(pl.len()), begin="start_ns", end=_end())
    rows = rows.sort("start_ns").join_asof(steps, left_on="start_ns", right_on="begin", strategy="backward")
    inside = pl.when(pl.col("start_ns") < pl.col("end")).then("step")
    return rows.filter(inside.drop_nulls().n_unique().over("name") <= 1)


def _found(rows: pl.DataFrame, what: pl.Expr) -> pl.DataFrame:
    columns = rows.with_columns(what=what).select(*ONCE_SCHEMA)
    return columns.cast(pl.Schema(ONCE_SCHEMA))
