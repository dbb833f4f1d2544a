"""Two jobs of several ranks side by side: what their steps wait for, and which ranks got slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.compare.statistics import compare_samples, joint_confidence
from stepscope.diagnosis.job import JobSteps, job_of, job_steps
from stepscope.diagnosis.rank_summary import RankSummary, recorded_once

_DIFFERENCES: Final = {"before_ns": pl.Float64, "after_ns": pl.Float64, "difference_ns": pl.Float64}
PATH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {"cause": pl.String, **_DIFFERENCES}
"""Per step, what the critical path across the ranks is made of; the largest difference first."""
RANK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.String,
    **_DIFFERENCES,  # of a step besides waits for the end of collectives; null where only one job has the rank
    "verdict": pl.String,  # as in `SampleComparison`, for the largest differences; else null
}
_MOST_JUDGED: Final = 16


@dataclass(frozen=True, slots=True)
class JobComparison:
    """Two jobs, by the critical path across their ranks and each rank's own work.

    Attributes:
        path: columns as in PATH_SCHEMA; sums to the difference of the jobs' steps.
        ranks: columns as in RANK_SCHEMA, the largest difference first.
    """

    before: JobSteps
    after: JobSteps
    path: pl.DataFrame
    ranks: pl.DataFrame


def compared_jobs(
    before: Sequence[RankSummary], after: Sequence[RankSummary], confidence: float = 0.95
) -> JobComparison | None:
    """Compare two jobs; None where no collective joins the ranks of one of them."""
    sides = (sorted(side, key=lambda each: each.order) for side in (before, after))
    before, after = (recorded_once(side, lambda each: each)[0] for side in sides)
    ours, theirs = job_of(before), job_of(after)
    if ours is None or theirs is None:
        return None
    steps = job_steps(ours, before), job_steps(theirs, after)
    now, then = (side.parts.group_by("cause").agg(pl.col("ns").sum().cast(pl.Float64)) for side in steps)
    return JobComparison(*steps, _differences(now, then, "cause", 0.0), _ranks(before, after, confidence))


def _differences(before: pl.DataFrame, after: pl.DataFrame, key: str, missing: float | None) -> pl.DataFrame:
    """Join two tables of a key and its nanoseconds."""
    table = before.join(after, on=key, how="full", coalesce=True, suffix="_after")
    table = table.select(key, before_ns="ns", after_ns="ns_after")
    table = table if missing is None else table.fill_null(missing)
    table = table.with_columns(difference_ns=pl.col("after_ns") - pl.col("before_ns"))
    return table.sort(pl.col("difference_ns").abs(), key, descending=[True, False], nulls_last=True)


def _ranks(before: Sequence[RankSummary], after: Sequence[RankSummary], confidence: float) -> pl.DataFrame:
    steps = [{each.record.name: _own_steps(each) for each in side} for side in (before, after)]
    now, then = (
        pl.DataFrame(
            [(name, sum(own) / len(own)) for name, own in side.items() if own],
            schema={"rank": pl.String, "ns": pl.Float64},
            orient="row",
        )
        for side in steps
    )
    table = _differences(now, then, "rank", None)
    both = table.drop_nulls()["rank"].head(_MOST_JUDGED).to_list()
    of_all = joint_confidence(confidence, len(table.drop_nulls()))
    verdicts = {name: compare_samples([steps[0][name]], [steps[1][name]], confidence=of_all).verdict for name in both}
    return table.with_columns(verdict=pl.col("rank").replace_strict(verdicts, default=None, return_dtype=pl.String))


def _own_steps(summary: RankSummary) -> list[float]:
    """Each step of a rank without its waits for the end of collectives."""
    index, wait = np.array(summary.steps.index, np.int64), summary.waits["wait_ns"].to_numpy()
    own = np.array(summary.steps.step_ns, np.float64)
    step = summary.record.collectives.table["step"].to_numpy()
    order = np.argsort(index, kind="stable")
    place = np.searchsorted(index[order], step)
    known = (place < len(index)) & (index[order][np.minimum(place, len(index) - 1)] == step) if len(index) else step < 0
    np.subtract.at(own, order[place[known]], wait[known])
    return [float(ns) for ns in np.maximum(own, 0.0)]
