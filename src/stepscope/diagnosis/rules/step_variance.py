"""# What it finds
Steps that take much longer than others.

# Why it costs time
The mean step time, not the typical one, determines the run's length. A few steps that stop for a checkpoint, a slow
batch, a garbage collection or a busy neighbour raise the mean.

# How it is measured
The mean of the complete steps is compared with their median, and the longest step with the typical one, cause by cause.
No saving is claimed: what slow steps did that others did not has its own finding, and the rest is chance or another
program's load.

# Known false positives
A few steps show little; the first recorded step includes the profiler's start, the last one its end.

# What to do
Look at the longest steps' idle time by cause: `stepscope idle TRACE --steps N`.

# Reference
SageMaker Debugger's StepOutlier; nsys-ai calls a step slow from 1.5 times the median.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View


def check(view: View, limits: Limits) -> Answers:
    summary = view.summary
    if summary.count < limits["steps"] or not summary.mean_ns or _serves_in_phases(view):
        return
    excess = (summary.mean_ns - summary.median_ns) / summary.mean_ns
    if excess <= 0 or excess < limits["share"]:
        return
    slow = view.complete_steps.sort(["duration_ns", "index"], descending=[True, False]).head(3)
    shortest, longest = summary.shortest_ns / 1e6, summary.longest_ns / 1e6
    digits = 1 if shortest >= 1 else 3
    span = f"{shortest:,.{digits}f} ms to {longest:,.{digits}f} ms"
    cause, more_ns = _largest_excess(view, int(slow["index"][0]))
    yield Found(
        f"steps take from {span}; the typical one is {excess:.0%} shorter than the mean",
        0,
        basis="no saving of its own: what made a step slow is in other findings, or was chance",
        confidence="medium" if summary.count >= 10 else "low",
        severity="note",
        figures=[
            limits.figure("share", excess),
            Figure("mean step", summary.mean_ns, "ns"),
            Figure("median step", summary.median_ns, "ns"),
            Figure("number of the longest step", int(slow["index"][0]), "count"),
            Figure("shortest step", summary.shortest_ns, "ns"),
            Figure("longest step", summary.longest_ns, "ns"),
            Figure("steps compared", summary.count, "count"),
            Figure(f"longest step above the typical one, {cause}", more_ns, "ns"),
        ],
        intervals=tuple(
            Interval(start, duration, f"step {index}")
            for index, start, duration in slow.select(pl.col("index", "start_ns", "duration_ns")).iter_rows()
        ),
        remedy=Remedy(
            f"See what the longest step ({slow['index'][0]}) does that others do not.",
            f"stepscope diagnose TRACE {_selection(slow.row(0, named=True), summary.source)}",
        ),
    )


def _serves_in_phases(view: View) -> bool:
    """Whether the steps are iterations over prompts and others, whose lengths differ for that reason."""
    starts = view.complete_steps["start_ns"].implode()
    return view.iterations.filter(pl.col("start_ns").is_in(starts))["phase"].drop_nulls().n_unique() > 1


def _largest_excess(view: View, index: int) -> tuple[str, int]:
    """The cause by which a step most exceeds the typical step, in words, and its extra time in nanoseconds."""
    steps = view.complete_steps.sort("start_ns")
    of_step = np.searchsorted(steps["start_ns"].to_numpy(), view.pieces["start_ns"].to_numpy(), side="right") - 1
    sums = view.pieces.with_columns(step=pl.Series(of_step, dtype=pl.Int64)).filter(pl.col("step") >= 0)
    causes = sorted(sums["cause"].unique().to_list())
    table = np.zeros((steps.height, len(causes) + 1), np.int64)
    for position, cause, ns in sums.group_by("step", "cause").agg(pl.col("duration_ns").sum()).iter_rows():
        table[position, causes.index(cause)] = ns
    table[:, -1] = steps["duration_ns"].to_numpy() - table[:, :-1].sum(axis=1)
    slowest = int(np.flatnonzero(steps["index"].to_numpy() == index)[0])
    excess = table[slowest] - np.median(table, axis=0)
    largest = int(np.argmax(excess))
    busy = "while the device worked" if view.device is not None else "of unknown cause"
    name = busy if largest == len(causes) else f"by the cause {causes[largest].replace('_', ' ')}"
    return name, int(excess[largest])


def _selection(step: dict[str, int], source: str) -> str:
    """The option that selects one step; inferred steps have no number in the file and are selected by time."""
    if source == "annotation":
        return f"--steps {step['index']}"
    end_ns = step["start_ns"] + step["duration_ns"]
    return f"--window {step['start_ns'] // 1000}us:{-(-end_ns // 1000)}us"


RULE: Final = Rule(
    id="step-variance",
    title="Some steps take much longer than others",
    thresholds={
        "share": Threshold(0.05, "share", "mean step above the median, as a share of the mean"),
        "steps": Threshold(3, "count", "complete steps needed for a judgement"),
    },
    check=check,
    needs=("steps",),
)
