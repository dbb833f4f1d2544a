"""What a report says about the ranks of a job together: their table, their exchanges, and what a step waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.job import JobSteps
from stepscope.diagnosis.rank_groups import Exchanges, exchanges
from stepscope.diagnosis.rank_summary import RankRecord
from stepscope.report.document import Block, Section, Table, Text, texts
from stepscope.report.format import count, duration, share
from stepscope.report.words import is_cut, rank_name, rank_table
from stepscope.whatif.job import BEGIN, TRANSFER

if TYPE_CHECKING:
    pass

_ALIKE: Final = 0.0005
_SHOWN_RANKS: Final = 12
MOST_RANKS: Final = 16
"""So many ranks each have a row; of more, those that are late or differ most from the others."""
_SPEED: Final = ("algorithm", "algorithm_gb_per_s", "bus_gb_per_s", "link_share", "exposed_ns", "overlapped_share",
                 "most_exposed")  # fmt: skip
_MOST_PARTS: Final = 6
_ON_PATH: Final = {
    TRANSFER: "data moved after the last rank had come",
    BEGIN: "its recorded steps had not begun",
    "busy": "its device worked, or its host beside a collective",
    "compute": "operators computed",
}
_NOTICEABLE: Final = 0.01


def ranks_blocks(diagnoses: Sequence[Diagnosis], job: JobSteps | None) -> tuple[Block, ...]:
    """A row for each rank; of many, first those that are late or not whole, then those that differ."""
    apart = () if job is None else job.apart
    table = rank_table(diagnoses, apart)
    if len(diagnoses) <= MOST_RANKS:
        return (Table(table),)
    late = set() if job is None else set(job.holders["rank"].drop_nulls())
    first = [rank_name(each) in late or rank_name(each) in apart or is_cut(each) for each in diagnoses]
    shares = [pl.col(name) for name, kind in table.schema.items() if kind == pl.Float64]
    steps = pl.col("step_ns") / pl.col("step_ns").median()
    apart_by = pl.sum_horizontal((each - each.median()).abs().fill_null(0) for each in (steps, *shares))
    order = table.with_columns(pl.Series("first", first), apart=apart_by.round(3))
    order = order.sort("first", "apart", descending=True, maintain_order=True)
    shown = order.head(max(min(sum(first), MOST_RANKS) + 1, _SHOWN_RANKS)).drop("first", "apart")
    rest = len(diagnoses) - shown.height
    return (Table(shown), Text(f"{count(rest)} more ranks differ less from the middle one."))


def exchanges_blocks(records: Sequence[RankRecord]) -> Iterator[Block]:
    if len(records) < 2:
        return
    found = exchanges(records)
    if not found.count:
        yield Text("No exchange was recorded on all its ranks, so that nothing tells how their clocks compare.")
        return
    title = "What ranks exchange: waiting for the last one, and the transfer after it"
    yield Section(title, (_told_table(found.table.drop(_SPEED)), Text(clock_sentence(found))))
    title = "How fast the transfers are, and what of the exchanges no computation overlaps"
    yield Section(title, (_told_table(found.table.select("kind", "bytes", "ranks", *_SPEED)),))


def _told_table(frame: pl.DataFrame) -> Table:
    """Without columns that tell nothing."""
    empty = [name for name in frame.columns if not frame[name].cast(pl.String).replace("", None).count()]
    shown = frame.drop(empty).rename(lambda name: name.replace("_gb_per_s", " GB/s"))
    return Table(shown, "exchanges", shown.height, brief=tuple(shown.columns))


def job_section(job: JobSteps | None, cut: Collection[str] = ()) -> tuple[Section, ...]:
    """What the job's steps wait for; without a job nothing.

    Args:
        cut: ranks whose files are cut off.
    """
    if job is None:
        return ()
    of_all = job.parts.with_columns(rank=pl.when(pl.col("cause") != TRANSFER).then("rank").otherwise(pl.lit("all")))
    parts = Table(of_all.with_columns(_meaning(job.parts)), "parts", brief=(*job.parts.columns, "what_it_means"))
    if job.parts.height > _MOST_PARTS:
        parts = replace(parts, frame=parts.frame.head(_MOST_PARTS), total=job.parts.height)
    title = "What a step of the job waits for: the critical path across the ranks, per step"
    return (Section(title, (*texts(*job_sentences(job, cut)), parts)),)


def _meaning(parts: pl.DataFrame) -> pl.Series:
    return pl.Series("what_it_means", [_ON_PATH.get(cause) or CAUSES.get(cause, "") for cause in parts["cause"]])


def job_sentences(job: JobSteps, cut: Collection[str] = ()) -> Iterator[str]:
    """Who holds the job's steps up, and how far that can be trusted.

    Args:
        cut: names of ranks whose files are cut off.
    """
    off = job.error_share
    gives = "the recorded times" if off < _ALIKE else f"a step that is off by {share(off)}"
    yield (
        f"A step takes {duration(job.step_ns)}, that of the rank whose step takes longest ({job.last}). The replay of "
        f"{count(job.ranks)} ranks without a change gives {gives}."
    )
    steps = job.holders["rank"].null_count()
    if steps:
        where = _of_steps(job, steps).capitalize()
        yield f"{where} no rank comes noticeably later than the others."
    holders = job.holders.drop_nulls("rank").group_by("rank").agg(steps=pl.len())
    if holders.height:
        rank, steps = holders.sort("steps", "rank", descending=[True, False]).row(0)
        most = job.holders.filter(pl.col("rank") == rank)["cause"].value_counts().sort("count", "cause").row(-1)[0]
        what = _ON_PATH.get(most) or CAUSES.get(most, most)
        yield f"The others wait for {rank} {_of_steps(job, steps)}, mostly while {what}."
    if job.missing:
        yield missing_sentence(job.missing, names=job.absent)
    if ended := [name for name in job.apart if name in cut]:
        whose, are = ("trace", "is") if len(ended) == 1 else ("traces", "are")
        yield f"The {whose} of {_named(ended)} {are} cut off: the other ranks are compared without."
    if apart := [name for name in job.apart if name not in cut]:
        yield f"Not in the replay, because their collectives or some of their steps were not recorded: {_named(apart)}."
    if job.missing and job.open_ns >= _NOTICEABLE * job.step_ns:
        some = [*job.absent, *job.apart]
        shorter = job.open_ns - job.least_open_ns >= _NOTICEABLE * job.step_ns
        shortest = f" ({duration(job.least_open_ns)} if all were as short as the shortest)" if shorter else ""
        which = _named(some) if len(some) == job.missing else "a rank that is missing"
        yield (
            f"The others may be waiting for {which if len(some) < 2 else f'any of {which}'}: after the last rank here "
            f"has come, exchanges with missing ranks go on for {duration(job.open_ns)} a step{shortest}. No saving is "
            "promised of this time."
        )


def _of_steps(job: JobSteps, steps: int) -> str:
    return f"in {count(steps)} of {count(job.holders.height)} steps" if job.holders.height > 1 else "in the step"


def _named(names: Sequence[str]) -> str:
    more = f" and {count(len(names) - _MOST_PARTS)} more" if len(names) > _MOST_PARTS else ""
    return f"{', '.join(names[:_MOST_PARTS])}{more}"


def missing_sentence(missing: int, where: str = "", names: Sequence[str] = ()) -> str:
    """What ranks that are not here mean for the answer.

    Args:
        names: of those that were not recorded at all, where known; the others were not recorded whole.
    """
    which = f"One rank of the job{where} is" if missing == 1 else f"{count(missing)} ranks of the job{where} are"
    if names and len(names) <= missing:
        which = (
            f"{which} not here ({_named(names)})"
            if len(names) == missing
            else f"{which} not here ({_named(names)}), or not whole"
        )
    else:
        which = f"{which} not here, or not whole"
    return f"{which}: waits for {'it' if missing == 1 else 'them'} count as transfer."


def clock_sentence(found: Exchanges) -> str:
    """How the ranks' clocks were aligned, and the error that remains."""
    error, name = max((clock.error_ns, name) for name, clock in found.clocks)
    drift, whose = max((abs(clock.drift), name) for name, clock in found.clocks)
    drifts = f" That of {whose} drifts by {drift * 1e6:,.1f} us in a second, which is taken out." if drift else ""
    rows = found.table.iter_rows(named=True)
    wait = max((row["wait_ns"] / max(row["per_step"], 1) for row in rows), default=0.0)
    doubt = " That is no less than ranks wait in an exchange on average: these waits are not certain." if error else ""
    return (
        f"Clocks are aligned by the ends of {count(found.count)} exchanges; what remains is at most "
        f"{duration(error)} ({name}, median).{doubt if error >= wait else ''}{drifts}"
    )
