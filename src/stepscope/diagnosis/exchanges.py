"""What the ranks of a job exchange: how much, how fast, and how much of it no computation hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import bus_bytes
from stepscope.analysis.matching import Clock, clocks, matched_collectives, participants
from stepscope.diagnosis.rank_groups import parallelism
from stepscope.diagnosis.rank_summary import RankRecord, cut_places

EXCHANGE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "bytes": pl.Int64,  # message of one rank; null where unknown
    "group": pl.String,  # what the program calls the groups of ranks; "" where unknown
    "parallel": pl.String,  # tensor, data, pipeline, expert or context parallelism; "" where unknown
    "ranks": pl.Int64,  # in a group
    "groups": pl.Int64,  # groups of so many ranks that exchange this, among these ranks
    "per_step": pl.Float64,  # exchanges of one group in a step
    "wait_ns": pl.Int64,  # mean wait of one of these ranks for the last one, per step
    "transfer_ns": pl.Int64,  # from the last rank's arrival to the end, per step; mean of the groups
    "algorithm": pl.String,  # by the kernels' names, such as "tree"; "" where they do not tell
    "algorithm_gb_per_s": pl.Float64,  # message by transfer; null where unknown
    "bus_gb_per_s": pl.Float64,  # what each link carried in the transfers, as nccl-tests counts; null where unknown
    "link_share": pl.Float64,  # of the peak of the device's links to others of its machine; null where unknown
    "exposed_ns": pl.Int64,  # mean time of one of these ranks in it without computation, per step
    "overlapped_share": pl.Float64,  # of the time in it, computed meanwhile
    "most_exposed": pl.String,  # the rank with most time in it without computation
    "last": pl.String,  # the rank that most often comes last by more than its clock's error; null if none does
    "last_share": pl.Float64,  # how often
}
_ALIKE: Final = ["kind", "bytes", "description", "size"]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What ranks exchange with each other.

    Attributes:
        table: exchanges, by kind, size and group, the longest first; columns as in EXCHANGE_SCHEMA.
        count: how many exchanges that are.
        clocks: of the ranks that took part in one, in the order of the records.
    """

    table: pl.DataFrame
    count: int
    clocks: tuple[tuple[str, Clock], ...]


def exchanges(records: Sequence[RankRecord], matched: pl.DataFrame | None = None) -> Exchanges:
    """What these ranks exchange.

    Args:
        matched: of `matched_collectives` of the records, if it is known.
    """
    records, matched = whole_exchanges(records, matched)
    steps = max(matched["step"].n_unique(), 1)
    links = {record.link_gb_per_s for record in records}
    link = links.pop() if len(links) == 1 else None
    aligned = clocks(matched)
    errors = {rank: clock.error_ns for rank, clock in aligned.items()}
    bare, parallel = _exposed(records, matched), parallelism(matched)
    rows = []
    for key, mine in matched.group_by(_ALIKE, maintain_order=True):
        kind, size, described, ranks = str(key[0]), key[1], key[2], int(str(key[3]))
        groups = mine.unique(["group", "source", pl.col("ranks").list.first()])["ranks"].list.len()
        taken = int(mine["transfer_ns"].sum())
        carries = size is not None and taken and kind != "send_receive"
        algorithm_rate = int(str(size)) * mine.height / taken if carries else None
        rate = None if algorithm_rate is None else bus_bytes(kind, 1, ranks) * algorithm_rate
        exposed, spent, most, how = bare[key]
        lasts = mine.filter(pl.col("late_ns") > pl.col("last").replace_strict(errors, return_dtype=pl.Int64))["last"]
        counted = lasts.value_counts().sort("count", "last", descending=[True, False])
        last, times = counted.row(0) if counted.height else (None, None)
        waited = int(mine["waits_ns"].list.sum().sum()) // int(groups.sum())
        role, per_step = parallel.get((described, ranks), ""), mine.height / steps / len(groups)
        rows.append((kind, size, described, role, ranks, len(groups), per_step, waited // steps,
                     taken // len(groups) // steps, how, algorithm_rate, rate, rate and link and rate / link,
                     exposed // int(groups.sum()) // steps, 1 - exposed / max(spent, 1), records[most].name,
                     None if last is None else records[last].name, times and times / mine.height))  # fmt: skip
    table = pl.DataFrame(rows, schema=EXCHANGE_SCHEMA, orient="row")
    table = table.sort(pl.col("wait_ns") + pl.col("transfer_ns"), descending=True, maintain_order=True)
    told = tuple((records[rank].name, clock) for rank, clock in aligned.items())
    return Exchanges(table, matched.height, told)


def whole_exchanges(
    records: Sequence[RankRecord], matched: pl.DataFrame | None
) -> tuple[Sequence[RankRecord], pl.DataFrame]:
    """The records, without exchanges of ranks that were cut, and the exchanges that then match."""
    cut = cut_places(records)
    records = [each.without_collectives if place in cut else each for place, each in enumerate(records)]
    if matched is None or cut:
        matched = matched_collectives([record.collectives for record in records])
    return records, matched


def _exposed(
    records: Sequence[RankRecord], matched: pl.DataFrame
) -> dict[tuple[object, ...], tuple[int, int, int, str]]:
    """By what tells exchanges apart: time in them without computation and in all, the rank with most, and how."""
    taken = participants(matched)
    if taken.is_empty():
        return {}
    tables = [record.collectives.table for record in records]
    first = pl.Series(np.cumsum([0, *(table.height for table in tables[:-1])]))
    own = pl.concat(table.select("exposed_ns", "duration_ns", "algorithm") for table in tables)
    own = own[taken["row"] + first.gather(taken["rank"])]
    whole = pl.concat([taken.select("exchange", "rank"), own], how="horizontal")
    whole = whole.join(matched.select(_ALIKE, exchange=pl.int_range(pl.len())), on="exchange", nulls_equal=True)
    sums = whole.group_by(*_ALIKE, "rank").agg(
        pl.col("exposed_ns", "duration_ns").sum(), pl.col("algorithm").unique().sort().str.join(", ")
    )
    sums = sums.sort("exposed_ns", "rank", descending=[True, False])
    found = sums.group_by(_ALIKE, maintain_order=True).agg(
        pl.col("exposed_ns", "duration_ns").sum(), pl.col("rank").first(), pl.col("algorithm").first()
    )
    return {tuple(row[:4]): row[4:] for row in found.iter_rows()}
