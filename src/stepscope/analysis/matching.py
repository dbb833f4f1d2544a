"""Exchanges between ranks, put together from the traces of those that took part in them, on one clock.

A collective matches by step, kind, group and order in the step among the members of its group, a send with the
receive of the same two ranks. It ends on all its ranks at nearly the same time, which tells how their clocks compare.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.window import Times

MATCHED_SCHEMA: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    "step": pl.Int64,
    "kind": pl.String,
    "group": pl.String,  # "" where unknown
    "description": pl.String,  # what the program calls the group; "" where unknown
    "size": pl.Int64,  # ranks in the group, with those that are not here
    "bytes": pl.Int64,
    "source": pl.Int64,  # of a send and its receive, the index of the rank that sends; else null
    "last": pl.Int64,  # index of the rank that arrived last, in the given order of ranks
    "late_ns": pl.Int64,  # its delay after the second to last
    "waiting_ns": pl.Int64,  # wait of the rank that arrived first
    "transfer_ns": pl.Int64,  # from the last arrival to the end
    "ranks": pl.List(pl.Int64),  # indices of those that took part, in their order; the lists below have one for each
    "waits_ns": pl.List(pl.Int64),  # wait of each rank
    "arrivals_ns": pl.List(pl.Int64),  # of each rank, on the first rank's clock
    "rows": pl.List(pl.Int64),  # of each rank, in its table
    "shifts_ns": pl.List(pl.Int64),  # how far each rank's clock is ahead of the first one's there
    "apart_ns": pl.List(pl.Int64),  # how much later each rank ends than the median of all, on the first rank's clock
}
_LISTS: Final = ("ranks", "waits_ns", "arrivals_ns", "rows", "shifts_ns", "apart_ns")
_TABLE: Final = {
    "step": pl.Int64, "kind": pl.String, "group": pl.String, "description": pl.String, "group_size": pl.Int64,
    "members": pl.String, "source": pl.Int64, "target": pl.Int64, "bytes": pl.Int64, "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
}  # fmt: skip
_KEYS: Final = ("step", "kind", "group", "members", "source", "target")
_EVERY_GROUP: Final = ("{", "[")
"""XLA's names of groups begin so: they list the devices of all groups, which several are of one rank."""

_OF_ALL: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on no rank before all ranks have begun, as each needs something of every other."""
_PIECE_ROWS: Final = 400_000
_FEWEST_FOR_DRIFT: Final = 20
_LONG_ENOUGH_NS: Final = 1_000_000_000
"""Collectives, and time between the first and the last one, from which clocks that drift are told from noise."""
_BETTER: Final = 0.5
"""What is left of the error with a drift, at most, if the drift is to be believed."""


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """Collectives of one rank.

    Attributes:
        table: columns step, kind, group, bytes, start_ns, duration_ns, in order of time; where known also group_size,
            members, description, source and target, as `collectives` has them.
        before: what the rank did before each of them, since it left the one before or its steps began: columns
            begin_ns, works (pieces of device work), and nanoseconds by cause; None where unknown.
        rank: its number in the job.
    """

    table: pl.DataFrame
    clock_ns: int = 0  # offset to the wall clock; 0 where unknown
    before: pl.DataFrame | None = None
    rank: int | None = None


def matched_collectives(ranks: Sequence[RankCollectives]) -> pl.DataFrame:
    """Match the exchanges of all ranks, and of groups of them.

    A group's exchange is there if all its members took part that are among these ranks, at least two of them. Where
    nothing tells who they are, as many as the group has; where that is unknown too, all ranks.

    Ranks' clocks differ; an exchange ends on all its ranks at nearly the same time, so each rank's clock is shifted by
    the median difference of its ends from the first rank's, or along a line where the differences grow. Ranks that
    share no exchange with the first one are aligned by way of others. See `clocks`. A collective in which every rank
    needs something of every other is left out if, beyond the clocks' error, it ended on one before it began on another.

    Returns:
        Columns as in MATCHED_SCHEMA, in order of time; see `participants` for a row each rank.
    """
    found = _together(ranks) if len(ranks) > 1 and any(rank.table.height for rank in ranks) else pl.DataFrame()
    if found.is_empty():
        return pl.DataFrame(schema=dict(MATCHED_SCHEMA))
    count = found["ranks"].list.len().cast(pl.Int64).to_numpy()
    begin, final = np.cumsum(count) - count, np.cumsum(count) - 1
    exchange = np.repeat(np.arange(len(count)), count)
    rank, starts, lengths = (found[name].explode().to_numpy() for name in ("ranks", "start_ns", "duration_ns"))
    shift = _shifts(exchange, rank, starts + lengths, found["source"].is_not_null().to_numpy())
    arrivals, ends = starts - shift, starts + lengths - shift
    order = np.lexsort((-rank, arrivals, exchange))
    first, before, last = (arrivals[order][place] for place in (begin, final - 1, final))
    sorted_ends = ends[np.lexsort((ends, exchange))]
    end = (sorted_ends[begin + (count - 1) // 2] + sorted_ends[begin + count // 2]) // 2
    flat = pl.DataFrame(
        {
            "waits_ns": np.repeat(last, count) - arrivals,
            "arrivals_ns": arrivals,
            "shifts_ns": shift,
            "apart_ns": ends - np.repeat(end, count),
        }
    )
    lists = flat.group_by(pl.Series("exchange", exchange), maintain_order=True).agg(pl.all())
    figures = {
        "last": rank[order][final],
        "late_ns": last - before,
        "waiting_ns": np.minimum(last - first, np.maximum.reduceat(ends - arrivals, begin)),
        "transfer_ns": np.maximum(end - last, 0),
        "begin": first,
    }
    columns = [*lists.drop("exchange"), *(pl.Series(name, values) for name, values in figures.items())]
    error = pl.DataFrame({"rank": rank, "apart": np.abs(flat["apart_ns"].to_numpy())})
    error_ns = error.select(pl.col("apart").median().over("rank")).to_series().to_numpy()
    gap = last - np.minimum.reduceat(ends, begin)
    is_apart = gap > np.maximum(2 * np.maximum.reduceat(error_ns, begin), 0)
    together = ~(is_apart & found["kind"].is_in(_OF_ALL).to_numpy())
    whole = found.with_columns(columns).filter(together).sort("begin", maintain_order=True)
    return whole.select(pl.col(name).cast(kind) for name, kind in MATCHED_SCHEMA.items())


def participants(matched: pl.DataFrame) -> pl.DataFrame:
    """Who took part in each exchange of `matched_collectives`.

    Returns:
        Columns exchange (row in `matched`), rank (its index), wait_ns, arrival_ns, row (in its table), shift_ns and
        apart_ns; in the order of the exchanges.
    """
    names = ["rank", "wait_ns", "arrival_ns", "row", "shift_ns", "apart_ns"]
    rows = matched.select(pl.int_range(pl.len()).alias("exchange"), *_LISTS).explode(list(_LISTS))
    return rows.rename(dict(zip(_LISTS, names, strict=True)))


def _together(ranks: Sequence[RankCollectives]) -> pl.DataFrame:
    """The exchanges that all who should took part in, with lists of the ranks, and of their rows and times."""
    tables = [rank.table.select(name for name in _TABLE if name in rank.table.columns) for rank in ranks]
    present = sum(table.height > 0 for table in tables)
    tables = [table.with_columns(row=pl.int_range(pl.len())) for table in tables]
    steps = pl.concat([table["step"].cast(pl.Int64) for table in tables]).value_counts().sort("step")
    piece = (steps["count"].cum_sum() - 1) // _PIECE_ROWS  # few rows at once, whose texts take much memory
    found = [
        _together_in(ranks, [table.filter(pl.col("step").is_between(first, last)) for table in tables], present)
        for first, last in steps.group_by(piece, maintain_order=True)
        .agg(first=pl.col("step").min(), last=pl.col("step").max())
        .select("first", "last")
        .iter_rows()
    ]
    return pl.concat(found) if found else pl.DataFrame()


def _together_in(ranks: Sequence[RankCollectives], tables: Sequence[pl.DataFrame], present: int) -> pl.DataFrame:
    """`_together` in some steps, of which the tables have the rows; so many ranks have exchanges in any step."""
    counts = [table.height for table in tables]
    place = {rank.rank: index for index, rank in enumerate(ranks) if rank.rank is not None}
    between = pl.col("source").is_not_null() | pl.col("target").is_not_null()
    whole = (
        pl.concat([pl.DataFrame(schema=_TABLE), *tables], how="diagonal_relaxed")
        .select("row", *(pl.col(name).cast(kind) for name, kind in _TABLE.items()))
        .with_columns(
            pl.col("group", "description", "members").fill_null(""),
            pl.col("start_ns") + np.repeat([rank.clock_ns for rank in ranks], counts),
            rank=np.repeat(np.arange(len(ranks)), counts),
            own=np.repeat([-1 if rank.rank is None else rank.rank for rank in ranks], counts),
        )
        .with_columns(pl.when(between).then(pl.coalesce(name, "own")).alias(name) for name in ("source", "target"))
        .sort("rank", "start_ns", "row")
        .with_columns(order=pl.int_range(pl.len()).over("rank", *_KEYS))
    )
    here = {text: _here(text, place) for text in whole["members"].unique().to_list()}
    known = pl.coalesce(
        pl.col("members").replace_strict(here, return_dtype=pl.Int64),
        pl.when(~pl.col("group").str.slice(0, 1).is_in(_EVERY_GROUP)).then("size"),
        pl.lit(present),
    )
    expected = pl.when(pl.col("source").is_not_null()).then(2).otherwise(known.clip(2, max(present, 2)))
    return (
        whole.group_by(*_KEYS, "order", maintain_order=True)
        .agg(
            pl.col("description", "bytes").first(),
            pl.col("row", "start_ns", "duration_ns"),
            ranks="rank",
            size=pl.col("group_size").max(),
        )
        .filter(pl.col("ranks").list.len() == expected)
        .with_columns(
            pl.col("size").fill_null(pl.col("ranks").list.len()),
            pl.col("source").replace_strict(place, default=None, return_dtype=pl.Int64),
        )
        .rename({"row": "rows"})
    )


def _here(members: str, place: dict[int, int]) -> int | None:
    """How many of a group's members are among these ranks; None if the list is not whole."""
    if not members or "..." in members:
        return None
    return sum(int(number) in place for number in re.findall(r"(?<!\d)\d{1,18}(?!\d)", members))


class _Fit(NamedTuple):
    """A rank's clock: `ahead_ns` ahead of the first one's when it shows `at_ns`, and by so much more as time passes."""

    ahead_ns: int
    drift: float
    at_ns: int

    def shift(self, times: Times) -> Times:
        """How far it is ahead when it shows these times."""
        if not self.drift:
            return np.full(len(times), self.ahead_ns)
        passed = (times - self.at_ns).astype(np.float64)
        shifts: Times = self.ahead_ns + (passed * (self.drift / (1 + self.drift))).astype(np.int64)
        return shifts


def _shifts(exchange: Times, rank: Times, ends: Times, is_between: npt.NDArray[np.bool_]) -> Times:
    """How far each rank's clock is ahead of the first one's at each of its exchanges, all flat arrays.

    Ranks that were together are found by a sum of random numbers, one a rank. Beginning with the first rank, the
    largest set of ranks that has one whose clock is known tells the others' clocks; pairs come after larger sets.
    """
    signs = np.random.default_rng(0).integers(1, 1 << 62, int(rank.max()) + 1, dtype=np.uint64)
    sums = np.add.reduceat(signs[rank], np.flatnonzero(np.diff(exchange, prepend=-1)))
    _, set_of = np.unique(sums, return_inverse=True)
    by_set = np.lexsort((rank, exchange, set_of[exchange]))
    bounds = np.flatnonzero(np.diff(set_of[exchange][by_set], prepend=-1, append=-1))
    sets = []
    for low, high in pairwise(bounds.tolist()):
        rows = by_set[low:high]
        count = int((exchange[rows] == exchange[rows[0]]).sum())
        sets.append(rows.reshape(-1, count).T)
    of_rank: dict[int, list[int]] = defaultdict(list)
    for number, rows in enumerate(sets):
        for each in rank[rows[:, 0]].tolist():
            of_rank[each].append(number)
    fits: dict[int, _Fit] = {}
    shift = np.zeros_like(ends)
    for root in sorted(of_rank):  # the first rank, then those whom no exchange joins with it
        if root not in fits:
            fits[root] = _Fit(0, 0.0, 0)
            _spread(root, sets, of_rank, fits, rank, ends, is_between[exchange])
    for rows in sets:
        for row in rows:
            shift[row] = fits[int(rank[row[0]])].shift(ends[row])
    return shift


def _spread(
    root: int,
    sets: Sequence[Times],
    of_rank: dict[int, list[int]],
    fits: dict[int, _Fit],
    rank: Times,
    ends: Times,
    is_between: npt.NDArray[np.bool_],
) -> None:
    """Fit the clocks of all ranks that exchanges join with one."""

    def waiting(number: int) -> tuple[bool, int, int]:
        rows = sets[number]
        return (bool(is_between[rows[0, 0]]), -rows.size, number)

    heap = [waiting(number) for number in of_rank[root]]
    heapq.heapify(heap)
    done = set()
    while heap:
        number = heapq.heappop(heap)[2]
        if number in done:
            continue
        done.add(number)
        rows = sets[number]
        members = rank[rows[:, 0]].tolist()
        known = next(place for place, each in enumerate(members) if each in fits)
        reference = ends[rows[known]] - fits[members[known]].shift(ends[rows[known]])
        for place, each in enumerate(members):
            if each in fits:
                continue
            fits[each] = _fit(ends[rows[place]] - reference, reference)
            for other in of_rank[each]:
                if other not in done:
                    heapq.heappush(heap, waiting(other))


def _fit(ahead: Times, time: Times) -> _Fit:
    """A clock that is so far ahead at these times of the first rank's clock."""
    median, begin = int(np.median(ahead)), int(time[0])
    passed = time - begin
    if len(time) < _FEWEST_FOR_DRIFT or passed.max() < _LONG_ENOUGH_NS:
        return _Fit(median, 0.0, begin)
    third = len(time) // 3
    early, late = (np.median(ahead[part]) for part in (slice(None, third), slice(-third, None)))
    drift = float((late - early) / (np.median(passed[-third:]) - np.median(passed[:third])))
    line = drift * passed
    ahead_ns = float(np.median(ahead - line))
    left, before = np.median(np.abs(ahead - line - ahead_ns)), np.median(np.abs(ahead - median))
    return _Fit(int(ahead_ns), drift, begin + int(ahead_ns)) if left <= _BETTER * before else _Fit(median, 0.0, begin)


class Clock(NamedTuple):
    """How a rank's clock compares with the first rank's.

    Attributes:
        ahead_ns: at the first exchange.
        drift: how much faster it runs, as a share; 0 unless the exchanges show it.
        error_ns: median distance of the ends of its exchanges from those of all ranks in them, which remains.
    """

    ahead_ns: int
    drift: float
    error_ns: int


def clocks(matched: pl.DataFrame) -> dict[int, Clock]:
    """The clock of each rank that took part in an exchange, by its index."""
    rows = participants(matched).group_by("rank").agg(
        ahead=pl.col("shift_ns").first(),
        more=pl.col("shift_ns").last() - pl.col("shift_ns").first(),
        length=(pl.col("arrival_ns").last() - pl.col("arrival_ns").first()).clip(1),
        error=pl.col("apart_ns").abs().median(),
    )  # fmt: skip
    return {
        rank: Clock(ahead, more / length, int(error))
        for rank, ahead, more, length, error in rows.sort("rank").iter_rows()
    }
