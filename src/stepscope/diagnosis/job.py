"""The steps of a job, which end when the last rank's do: who holds them up, and what fixing a rank's findings saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.matching import matched_collectives
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Confidence, Figure, Finding
from stepscope.diagnosis.rank_groups import open_exchanges
from stepscope.diagnosis.rank_summary import RankRecord, RankSummary, cut_places
from stepscope.diagnosis.rule import severity
from stepscope.diagnosis.rules import exposed_communication
from stepscope.whatif.job import Job, Saved

MOST_OFF: Final = 0.01
"""Share of the step by which the replay without a change may differ from it, to be believed."""

_TIE: Final = 0.01
"""Share of a step by which a rank must come later than the others to be the one that they wait for."""

PART_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.String,  # that the others wait for; of a transfer, the one that came last
    "cause": pl.String,  # of idle or host time, "busy", "transfer" or "begin"
    "ns": pl.Int64,  # per step
    "share": pl.Float64,  # of the critical path
}
HOLDER_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "step": pl.Int64,
    "rank": pl.String,  # with the largest part of the critical path in this step; null if the others hardly wait for it
    "cause": pl.String,  # the largest on that rank
    "ns": pl.Int64,  # of this cause
    "switches": pl.Int64,  # how often the path goes from one rank to another
}


@dataclass(frozen=True, slots=True)
class JobSteps:
    """What the steps of a job wait for.

    Attributes:
        step_ns: mean step of the rank whose steps take longest.
        last: that rank; of several, the one that they wait for most.
        ranks: how many ranks were replayed.
        missing: how many more the job has, with those of `apart`.
        error_share: how far the replay without a change is from the step.
        wait_ns: how long a rank waits for later ones per step, in the mean.
        transfer_ns: how long data then moves per step, in the mean of the ranks.
        apart: ranks that meet no other in a collective, or were cut: they lack a step that most have.
        absent: ranks of the job that are not here, as far as numbers tell which.
        open_ns: the part of `transfer_ns` in exchanges with ranks that are missing, which may be a wait for these.
        least_open_ns: the same if each took as long as the shortest of its kind, size and group.
        parts: the critical path by rank and cause, the longest part first; columns as in PART_SCHEMA.
        holders: who holds each step up; columns as in HOLDER_SCHEMA.
    """

    step_ns: float
    last: str
    ranks: int
    missing: int
    error_share: float
    wait_ns: int
    transfer_ns: int
    apart: tuple[str, ...]
    absent: tuple[str, ...]
    open_ns: int
    least_open_ns: int
    parts: pl.DataFrame
    holders: pl.DataFrame

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are there and their replay gives what was recorded."""
        return not self.missing and self.error_share <= MOST_OFF


def job_of(summaries: Sequence[RankSummary], matched: pl.DataFrame | None = None) -> Job | None:
    """The job of these ranks; None where no collective joins them.

    Args:
        matched: of `matched_collectives` of the ranks, if it is known.
    """
    if len(summaries) < 2:
        return None
    cut = cut_places([summary.record for summary in summaries])
    whole = [each.without_collectives if place in cut else each for place, each in enumerate(summaries)]
    if matched is None or cut:
        matched = matched_collectives([summary.record.collectives for summary in whole])
    if matched.is_empty():
        return None
    job = Job(
        [summary.times for summary in whole], matched, is_open=open_exchanges([each.record for each in whole], matched)
    )
    return job if job.joined.any() else None


def job_steps(job: Job, summaries: Sequence[RankSummary]) -> JobSteps:
    """What the steps of the job wait for."""
    names = [summary.record.name for summary in summaries]
    path = job.critical_path()
    open_ns, least_ns = _open(job)
    per_step = int(job.joined.sum()) * job.steps
    named = path.with_columns(pl.Series("rank", names).gather(path["rank"]).alias("rank"))
    whole, met = max(int(path["ns"].sum()), 1), job.meeting >= 0
    parts = named.group_by("rank", "cause").agg(total=pl.col("ns").sum())
    return JobSteps(
        step_ns=job.recorded_ns,
        last=names[job.last(job.measured)],
        ranks=int(job.joined.sum()),
        missing=max(max(summary.record.ranks for summary in summaries) - int(job.joined.sum()), 0),
        error_share=job.error_share,
        wait_ns=int((job.end - job.start - job.transfer)[met].sum()) // per_step,
        transfer_ns=int(job.transfer[met].sum()) // per_step,
        apart=tuple(name for name, is_joined in zip(names, job.joined, strict=True) if not is_joined),
        absent=_absent([summary.record for summary in summaries]),
        open_ns=open_ns // per_step,
        least_open_ns=least_ns // per_step,
        parts=parts.sort("total", "rank", "cause", descending=[True, False, False]).select(
            "rank", "cause", ns=pl.col("total") // job.steps, share=pl.col("total") / whole
        ),
        holders=_holders(named, _late(job, names), _TIE * job.recorded_ns),
    )


def _absent(records: Sequence[RankRecord]) -> tuple[str, ...]:
    """Ranks of the job that have no record, if all records have a number."""
    here = {record.collectives.rank for record in records}
    size = max(record.ranks for record in records)
    if None in here or len(here) < len(records):
        return ()
    return tuple(f"rank {number}" for number in range(size) if number not in here)


def _open(job: Job) -> tuple[int, int]:
    """Transfers of exchanges with ranks that are missing: their sum over ranks, and if each were the shortest alike."""
    table = job.table.select("kind", "group", "bytes", ns=pl.Series(job.transfer))
    table = table.filter(pl.Series(job.is_open[job.meeting] & (job.meeting >= 0)))
    least = pl.col("ns").min().over("kind", "group", "bytes")
    return int(table["ns"].sum()), int(table.select(least).to_series().sum())


def _late(job: Job, names: Sequence[str]) -> pl.DataFrame:
    """By step and rank, how much later it came than the rank before it, where it came last."""
    met = np.flatnonzero(job.meeting >= 0)
    rows = pl.DataFrame(
        {
            "step": job.table["step"].gather(met),
            "rank": pl.Series(names).gather(job.rank[met]),
            "meeting": job.meeting[met],
            "start": job.start[met],
        }
    ).sort("meeting", "start")
    lasts = rows.with_columns(late=pl.col("start").diff().over("meeting")).group_by("meeting").last()
    return lasts.group_by("step", "rank").agg(pl.col("late").sum())


def _holders(path: pl.DataFrame, late: pl.DataFrame, least_ns: float) -> pl.DataFrame:
    moved = path.filter(pl.col("ns") > 0).with_columns(is_new=pl.col("rank") != pl.col("rank").shift(1))
    switches = moved.group_by("step").agg(switches=pl.col("is_new").sum().cast(pl.Int64))
    sums = path.group_by("step", "rank", "cause").agg(ns=pl.col("ns").sum())
    sums = sums.with_columns(whole=pl.col("ns").sum().over("step", "rank"))
    order = ["step", "whole", "rank", "ns", "cause"]
    first = sums.sort(order, descending=[False, True, False, True, False]).group_by("step", maintain_order=True).first()
    first = first.join(late, on=["step", "rank"], how="left", maintain_order="left")
    first = first.with_columns(rank=pl.when(pl.col("late") >= least_ns).then("rank"))
    return first.join(switches, on="step", maintain_order="left").select(*HOLDER_SCHEMA)


def promised(
    diagnoses: Sequence[Diagnosis],
    saved: Sequence[Sequence[Saved | None]],
    job: Job,
    steps: JobSteps,
    *,
    minimum_share: float,
) -> list[Diagnosis]:
    """Promise for each rank's findings what the job saves, with the cause gone on every rank that has it.

    Args:
        diagnoses: of the job's ranks.
        saved: for each finding of each diagnosis what a replay of the rank alone tells; None where there is none.
        minimum_share: findings that then save less of the step are counted but not kept.
    """
    alike: dict[tuple[object, ...], dict[int, Saved]] = {}
    for place, (diagnosis, changes) in enumerate(zip(diagnoses, saved, strict=True)):
        for finding, change in zip(diagnosis.findings, changes, strict=True):
            if finding.saving_ns_per_step > 0 and job.joined[place]:
                of_ranks = alike.setdefault(_cause(finding), {})
                here = change or _spread(job, place, finding)
                of_ranks[place] = of_ranks[place].with_saved(here) if place in of_ranks else here
    savings = {cause: max(job.saving_ns(of_ranks), 0.0) for cause, of_ranks in alike.items()}
    result = []
    for place, (diagnosis, changes) in enumerate(zip(diagnoses, saved, strict=True)):
        kept, hidden = [], 0
        if not job.joined[place]:
            result.append(diagnosis)
            continue
        for finding, change in zip(diagnosis.findings, changes, strict=True):
            if finding.saving_ns_per_step <= 0:
                kept.append(finding)
                continue
            cause = _cause(finding)
            new = _promise(finding, savings[cause], len(alike[cause]), steps, is_replayed=change is not None)
            if new.saving_share >= minimum_share or new.ends_run_in_ns is not None:
                kept.append(new)
            else:
                hidden += 1
        kept.sort(key=lambda finding: finding.rank)
        result.append(
            replace(
                diagnosis,
                findings=tuple(kept),
                hidden=diagnosis.hidden + hidden,
                together=None,
                afterwards=(),
                job_step_ns=round(steps.step_ns),
            )
        )
    return result


def _cause(finding: Finding) -> tuple[object, ...]:
    """What the same finding of another rank shares with it."""
    place = finding.where[0] if finding.where else None
    return (finding.rule, place.file, place.line) if place is not None else (finding.rule,)


def _spread(job: Job, place: int, finding: Finding) -> Saved:
    """A saving that was not replayed, spread over the rank's own work; of communication, its transfers."""
    if finding.rule == exposed_communication.RULE.id:
        return job.without_transfers(place)
    return job.spread(place, finding.saving_ns_per_step * job.ranks[place].steps)


def _promise(finding: Finding, saving_ns: float, alike: int, steps: JobSteps, *, is_replayed: bool) -> Finding:
    saving = min(round(saving_ns), round(steps.step_ns))
    share = saving / max(steps.step_ns, 1)
    on = "on this rank" if alike == 1 else f"on the {alike:,} ranks that have it"
    basis = (
        f"what the slowest of {steps.ranks:,} ranks saves when all are replayed without it {on}; this rank's trace "
        f"alone promises {finding.saving_ns_per_step / 1e6:,.1f} ms"
    )
    if not is_replayed:
        basis += ", added up and spread evenly over its own work"
    if steps.missing:
        basis += f"; {'one more was' if steps.missing == 1 else f'{steps.missing:,} more were'} not recorded whole"
    figures = (
        Figure("saving by this rank's trace alone, per step", finding.saving_ns_per_step, "ns"),
        Figure("ranks in the replay", steps.ranks, "count"),
        Figure("ranks that have this", alike, "count"),
        *([Figure("ranks that were not recorded whole", steps.missing, "count")] if steps.missing else []),
    )
    return replace(
        finding,
        severity=severity(share) if finding.severity != "note" else "note",
        saving_ns_per_step=saving,
        saving_share=share,
        saving_basis=basis,
        saving_from="replayed",
        confidence=_confidence(finding.confidence, steps, is_replayed=is_replayed),
        evidence=replace(finding.evidence, figures=(*finding.evidence.figures, *figures)),
    )


def _confidence(own: Confidence, steps: JobSteps, *, is_replayed: bool) -> Confidence:
    if not steps.is_whole:
        return "low"
    return "medium" if own == "high" and not is_replayed else own
