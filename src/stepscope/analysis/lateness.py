"""Who holds ranks up that wait for each other, followed back through the exchanges that passed it on.

A rank is compared with its peers: those whose exchanges in a step are the same, such as one pipeline stage's. What it
does between two exchanges is its own time. It comes late to an exchange because of its own time, or because it left the
one before late, which ended late for all: the cause is then that exchange's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.matching import RankCollectives, participants
from stepscope.trace.window import Times

BETWEEN_TWO: Final = "send_receive"
_FEW: Final = 3
"""So many peers are compared by the mean of the others, more by the median of all."""
_NOISE: Final = 0.1
"""Spread of own times, at most, that is noise: beyond it ranks differ."""
_PART: Final = 0.5
"""Part of a delay that a rank's own time, or a transfer, must make up for it to begin there."""
_PER_DEVIATION: Final = 1.4826
"""Standard deviation of what is normally distributed over the median distance from its median."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Parts of ranks in exchanges, and what ranks wait for.

    Attributes:
        parts: a row for each exchange of each rank, also those that did not match. Columns rank (index), row (in its
            table), step, peers (that it was compared with, itself among them), place (number of the place in the step
            that they share), usual_ns (time since it left the exchange before, median of the peers), more_ns (its own
            beyond that of the others) and held_ns (the same, or how much later it came where nothing is known of the
            one before).
        root: for each matched exchange, the row of `parts` where the delay of the rank that came last begins.
        is_network: whether that is the transfer before it, not what its rank did.
        noise: relative spread of own times from step to step, at most 10 %.
    """

    parts: pl.DataFrame
    root: npt.NDArray[np.int64]
    is_network: npt.NDArray[np.bool_]
    noise: float

    @property
    def deviations(self) -> npt.NDArray[np.float64]:
        """How many deviations of the noise each part's own time is longer than its peers'."""
        usual = np.maximum(self.parts["usual_ns"].to_numpy(), 1)
        found: npt.NDArray[np.float64] = self.parts["held_ns"].to_numpy() / (usual * max(self.noise, 1e-3))
        return found


def lateness(ranks: Sequence[RankCollectives], matched: pl.DataFrame) -> Lateness:
    """Where the waiting in each of the matched exchanges begins; `matched` as from `matched_collectives`."""
    parts, before = _parts(ranks)
    taken = participants(matched)
    offsets = np.cumsum([0, *(rank.table.height for rank in ranks[:-1])])
    place = taken["row"].to_numpy() + offsets[taken["rank"].to_numpy()]
    exchange, arrival = np.full(parts.height, -1), np.zeros(parts.height, np.int64)
    exchange[place], arrival[place] = taken["exchange"].to_numpy(), taken["arrival_ns"].to_numpy()
    transfer = np.where(exchange >= 0, matched["transfer_ns"].to_numpy()[exchange], 0)
    parts = parts.with_columns(
        pl.Series("arrival_ns", arrival), pl.Series("transfer_ns", transfer), pl.Series("is_matched", exchange >= 0)
    )
    parts = parts.with_columns(
        _beyond("own_ns", "place").alias("more_ns"),
        pl.col("own_ns").median().over("place").cast(pl.Int64).alias("usual_ns"),
        pl.when("is_matched").then(_beyond("arrival_ns", "place", "is_matched")).alias("late_ns"),
        _beyond("transfer_ns", "place", "is_matched").alias("slower_ns"),
    )
    is_first = (before < 0) | (exchange[before] < 0)
    held = np.where(is_first, np.maximum(parts["late_ns"].fill_null(0), parts["more_ns"]), parts["more_ns"])
    parts = parts.with_columns(held_ns=pl.Series(held))
    last = np.full(matched.height, -1)
    is_last = taken["rank"].to_numpy() == matched["last"].to_numpy()[taken["exchange"].to_numpy()]
    last[taken["exchange"].to_numpy()[is_last]] = place[is_last]
    root, is_network = _roots(parts, last, before, exchange)
    columns = ("rank", "row", "step", "peers", "place", "usual_ns", "more_ns", "held_ns")
    return Lateness(parts.select(columns), root, is_network, _noise(parts))


def _noise(parts: pl.DataFrame) -> float:
    """Relative spread of own times from step to step, or, of fewer than three steps, from peer to peer."""
    told = parts.filter((pl.col("peers") > 1) & (pl.col("own_ns") > 0) & (pl.col("usual_ns") > 0))
    more = pl.col("more_ns") / pl.col("usual_ns")
    usual = pl.when(pl.len().over("rank", "slot") >= _FEW).then(more.median().over("rank", "slot")).otherwise(0)
    spread = told.select((more - usual).abs().median()).item()
    return min(_PER_DEVIATION * (spread or 0.0), _NOISE)


def left_before(starts: Times, ends: Times) -> Times:
    """For each of a rank's exchanges, which one it left last before it came to this one; -1 for none."""
    order = np.argsort(ends, kind="stable")
    place = np.searchsorted(ends[order], starts, side="right") - 1
    return np.where(place >= 0, order[place], -1) if len(ends) else ends


def _parts(ranks: Sequence[RankCollectives]) -> tuple[pl.DataFrame, Times]:
    """Each rank's exchanges with its own time before, and the row of the exchange that it left last before, or -1."""
    tables, own, before = [], [], []
    offset = 0
    for number, rank in enumerate(ranks):
        table = rank.table
        starts = table["start_ns"].to_numpy()
        ends = starts + table["duration_ns"].to_numpy()
        left = left_before(starts, ends)
        begin = starts if rank.before is None else rank.before["begin_ns"].to_numpy()
        own.append(np.where(left >= 0, starts - ends[left], starts - begin) if len(ends) else ends)
        before.append(np.where(left >= 0, left + offset, -1))
        known = [name for name in ("group_size", "description", "source", "target") if name in table.columns]
        tables.append(table.select("step", "kind", *known, rank=pl.lit(number), row=pl.int_range(pl.len())))
        offset += len(ends)
    empty = pl.DataFrame(schema={"step": pl.Int64, "kind": pl.String, "group_size": pl.Int64, "description": pl.String,
                                 "source": pl.Int64, "target": pl.Int64})  # fmt: skip
    parts = pl.concat([empty, *tables], how="diagonal_relaxed")
    parts = parts.with_columns(
        pl.Series("own_ns", np.concatenate(own)), slot=pl.int_range(pl.len()).over("rank", "step")
    )
    what = pl.struct(
        "kind", "group_size", "description", pl.col("source").is_null(), pl.col("target").is_null(), "slot"
    )
    parts = parts.with_columns(signature=what.hash().sum().over("rank", "step"))
    place = pl.struct("step", "signature", "slot").rank("dense").cast(pl.Int64) - 1
    parts = parts.with_columns(place=place).with_columns(peers=pl.len().over("place").cast(pl.Int64))
    return parts.drop("signature", "group_size", "description", "source", "target"), np.concatenate(before)


def _beyond(name: str, *keys: str) -> pl.Expr:
    """How much larger a value is than that of the others in a place."""
    value, count = pl.col(name), pl.len().over(keys)
    others = (value.sum().over(keys) - value) / (count - 1).clip(1)
    usual = pl.when(count <= _FEW).then(others).otherwise(value.median().over(keys))
    return pl.when(count > 1).then((value - usual).cast(pl.Int64)).otherwise(0)


def _roots(
    parts: pl.DataFrame, last: Times, before: Times, exchange: Times
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each exchange, the part where the delay of its last rank begins, and whether the network is the cause."""
    more, late, slower, arrival = (
        parts[name].fill_null(0).to_list() for name in ("more_ns", "late_ns", "slower_ns", "arrival_ns")
    )
    lasts, befores, exchanges = last.tolist(), before.tolist(), exchange.tolist()
    root, is_network = list(lasts), [False] * len(lasts)
    for number in sorted(range(len(lasts)), key=lambda each: arrival[lasts[each]]):
        part = lasts[number]
        left = befores[part]
        inherited = late[part] - more[part]
        if left < 0 or exchanges[left] < 0 or more[part] >= _PART * late[part] or inherited <= 0:
            continue
        if slower[left] >= _PART * inherited:
            root[number], is_network[number] = left, True
        else:
            earlier = exchanges[left]
            root[number], is_network[number] = root[earlier], is_network[earlier]
    return np.array(root, np.int64), np.array(is_network, np.bool_)
