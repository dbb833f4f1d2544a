"""The answer to "what if": how long a step would take with changes, alone and together, and what limits it then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from stepscope.errors import UsageError
from stepscope.trace import TraceWarning
from stepscope.whatif.causes import cause_table
from stepscope.whatif.changes import together
from stepscope.whatif.critical_path import critical_path, resources
from stepscope.whatif.experiment import Change, Experiment, Outcome
from stepscope.whatif.ranks import RankProspect
from stepscope.whatif.replay import Replay


@dataclass(frozen=True, slots=True)
class NamedChange:
    """A change with the words that asked for it, such as "--remove input"."""

    name: str
    change: Change


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a step would take with a change.

    Attributes:
        name: the words that asked for it.
        step_ns: the mean step's length with the change.
        saving_ns: what it loses; negative where it becomes longer.
        saving_share: the same as a share of the measured step.
    """

    name: str
    step_ns: float
    saving_ns: float
    saving_share: float

    @classmethod
    def of(cls, name: str, outcome: Outcome) -> Prospect:
        """What a replay gives."""
        return cls(name, outcome.step_ns, outcome.saving_ns, outcome.saving_share)


@dataclass(frozen=True, slots=True)
class AsMeasured:
    """The steps as they are, and how far a replay of them can be believed.

    Attributes:
        path, format: of the trace.
        stepped: whether there are steps; else the whole recording counts as one.
        step_count: number of complete steps; 1 where there are none.
        step_ns: the mean step's length in the trace.
        replayed_step_ns: the same in the replay without a change.
        device: the busiest device; None where the trace has none.
        unexplained_share: of the steps' time, in which the device waited for what the trace does not show.
        why_not: why replays promise nothing here, in one sentence; None where they do.
        resources: what the critical path consists of, columns as in `critical_path.RESOURCE_SCHEMA`, of all steps.
        warnings: what was skipped or repaired while reading the trace.
    """

    path: str
    format: str
    stepped: bool
    step_count: int
    step_ns: float
    replayed_step_ns: float
    device: str | None
    unexplained_share: float
    why_not: str | None
    resources: pl.DataFrame
    warnings: tuple[TraceWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step would take, and why.

    Attributes:
        measured: the steps as they are.
        alone: each change by itself.
        together: all of them; None where nothing is changed.
        resources: what the critical path consists of with the changes; None where nothing is changed.
        causes: what a step would save without each cause, columns as in `causes.CAUSE_SCHEMA`; None with changes.
        ranks: what a step of each rank takes with the changes, where several that meet in collectives were given.
        path: the critical path, with the changes where there are any, as `critical_path` gives it; None if not asked.
        slack: as `slack_of_operators` gives it, of the steps as measured; None if not asked.
        curve: as `speed_up_curve` gives it, of the steps as measured; None if not asked.
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
    """What a step would take with all of these changes, or, where there are none, without each cause.

    Returns:
        The answer, and the replay that its critical path is of.

    Raises:
        UsageError: nothing was recorded that takes time, or a change does not fit the trace.
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
    """The steps as they are."""
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
    """What stands on the critical path, pieces of one name together, the longest first.

    Returns:
        Columns kind, cause, name, pieces, ns, share (of the path).
    """
    total = max(int(path["duration_ns"].sum()), 1)
    table = path.group_by("kind", "cause", "name").agg(pieces=pl.len(), ns=pl.col("duration_ns").sum())
    table = table.with_columns(share=pl.col("ns") / total)
    return table.sort(["ns", "kind", "cause", "name"], descending=[True, False, False, False])
