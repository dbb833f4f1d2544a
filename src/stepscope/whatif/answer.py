"""Answers to "what if": the step time with changes, alone and together, and its limits."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import host_time
from stepscope.analysis.kernels import kernel_table
from stepscope.analysis.operators import operator_table
from stepscope.analysis.places import line_table, module_table, place_costs
from stepscope.errors import UsageError
from stepscope.trace import TraceWarning
from stepscope.whatif.changes import scaled, together, without_cause
from stepscope.whatif.critical_path import critical_path, resources
from stepscope.whatif.experiment import Change, Experiment, Outcome, RankProspect
from stepscope.whatif.graph import Replay

CAUSE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "cause": pl.String,
    "attributed_ns": pl.Int64,  # per step: device idle time of this cause; without a device, main-thread time
    "attributed_share": pl.Float64,  # share of the step
    "saving_ns": pl.Int64,  # per step: saving of a replay without the cause
    "saving_share": pl.Float64,
}
SMALLEST_SHARE: Final = 0.001
"""Least share of the span, on the device or the main thread, for which a cause is replayed; causes below it with a
saving as small are left out.
"""
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
    """Predicted step with a change."""

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
    unexplained_share: float  # share of the steps' time in which the device waited for something outside of the trace
    why_not: str | None  # why replays are not reliable, in one sentence; None where they are
    # parts of the critical path of all steps, columns as in `critical_path.RESOURCE_SCHEMA`
    resources: pl.DataFrame
    warnings: tuple[TraceWarning, ...] = ()  # what was skipped or repaired while reading the trace


@dataclass(frozen=True, slots=True)
class Answer:
    """Predicted step time, and its explanation.

    Attributes:
        measured: the steps as measured.
        alone: each change by itself.
        together: all changes; None without changes.
        resources: parts of the critical path with the changes; None without changes.
        causes: saving per step without each cause, columns as in `causes.CAUSE_SCHEMA`; None with changes.
        ranks: step of each rank with the changes, if several ranks that meet in collectives were given.
        path: critical path with any changes, as from `critical_path`; None if not requested.
        slack: as from `slack_of_operators`, for the measured steps; None if not requested.
        curve: as from `speed_up_curve`, for the measured steps; None if not requested.
    """

    measured: AsMeasured
    alone: tuple[Prospect, ...] = ()
    together: Prospect | None = None
    resources: pl.DataFrame | None = None
    causes: pl.DataFrame | None = None
    ranks: tuple[RankProspect, ...] = ()
    path: pl.DataFrame | None = None
    slack: pl.DataFrame | None = None
    curve: pl.DataFrame | None = None


def what_if(experiment: Experiment, changes: Sequence[NamedChange]) -> tuple[Answer, Replay]:
    """Predict the step with all of these changes or, without changes, without each cause.

    Returns:
        The answer, and the replay behind its critical path.

    Raises:
        UsageError: nothing recorded takes time, or a change does not fit the trace.
    """
    graph = experiment.graph
    if not len(graph.stretches.start) and not len(graph.works.start):
        raise UsageError("nothing was recorded in this trace that takes time: there is nothing to replay")
    measured = as_measured(experiment)
    if not changes:
        return Answer(measured, causes=cause_table(experiment)), experiment.measured
    outcomes = [experiment.run(each.change(experiment, graph)) for each in changes]
    alone = tuple(Prospect.of(each.name, outcome) for each, outcome in zip(changes, outcomes, strict=True))
    if len(changes) == 1:
        [whole] = outcomes
    else:
        whole = experiment.run(together(*(each.change for each in changes))(experiment, graph))
    after = resources(critical_path(experiment, whole.replay))
    return Answer(measured, alone, Prospect.of("together", whole), after), whole.replay


def as_measured(experiment: Experiment) -> AsMeasured:
    """Summarise the steps as measured."""
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
        resources=resources(critical_path(experiment)),
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
