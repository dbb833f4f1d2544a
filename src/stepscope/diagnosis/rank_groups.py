"""What sets ranks of a job apart: their machine, their place in it, their groups' transfers, kernels and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Final

import polars as pl

from stepscope.analysis.lateness import Lateness
from stepscope.diagnosis.finding import Evidence, Figure, Finding
from stepscope.diagnosis.rank_summary import RankRecord
from stepscope.diagnosis.rule import severity
from stepscope.diagnosis.rules import slow_transfer

_CHANCE: Final = 0.05
"""Likelihood, at most, that ranks picked at random would have as much in common."""
_FEWEST_GROUPS: Final = 3
_TIMES: Final = 1.5
"""How many times as long as in the others a slow group's transfers take, at least."""
_SPREADS: Final = 6.0
"""The same in spreads of the groups."""
_LISTED: Final = 4


def shared_place(records: Sequence[RankRecord], chosen: Sequence[int]) -> str | None:
    """The machine, or the place in each machine, that these ranks and few others have in common; None if none is.

    Machines are told by their names, else by the devices that the traces say a machine has, in the order of ranks.
    """
    if len(chosen) < 2:
        return None
    hosts = [record.host for record in records]
    numbers = [record.collectives.rank for record in records]
    devices = max(record.devices for record in records)
    ways: list[tuple[str, list[object]]] = []
    if None not in hosts and len(set(hosts)) > 1:
        ways.append(("host", list(hosts)))
    if None not in numbers and 1 < devices < len(records):
        known = [number for number in numbers if number is not None]
        if not ways:
            ways.append(("node", [number // devices for number in known]))
        ways.append(("rail", [number % devices for number in known]))
    for word, places in ways:
        mine = {places[each] for each in chosen}
        if len(mine) > 1:
            continue
        place = mine.pop()
        size, sizes = places.count(place), len(set(places))
        likely = sizes * comb(size, len(chosen)) / comb(len(records), len(chosen))
        if len(chosen) * 2 >= size and likely <= _CHANCE:
            return f"{word} {place}"
    return None


def same_kernels(records: Sequence[RankRecord], place: int) -> tuple[float, int]:
    """How many times as long a rank's kernels take as the same ones (name and grid) of others, and how much longer."""
    mine = records[place].kernels
    others = [record.kernels for other, record in enumerate(records) if other != place and record.kernels is not None]
    if mine is None or not others:
        return 1.0, 0
    usual = pl.concat(others).filter(pl.col("name").is_in(mine["name"].unique().implode()))
    usual = usual.group_by("name", "grid").agg(usual=(pl.col("ns") / pl.col("count")).median())
    both = mine.join(usual, on=("name", "grid"), nulls_equal=True)
    own, usually = int(both["ns"].sum()), float((both["usual"] * both["count"]).sum())
    return (own / usually if usually else 1.0), int(own - usually)


def exchanged_bytes(records: Sequence[RankRecord], place: int) -> float:
    """How many times the others' mean a rank's all-to-all exchanges carry; 0 where unknown."""
    tables = [record.collectives.table.filter(pl.col("kind") == "all_to_all") for record in records]
    sums = [int(table["bytes"].sum()) for table in tables]
    others = sum(sums) - sums[place]
    return float(sums[place] * (len(sums) - 1) / others) if others else 0.0


def slow_groups(records: Sequence[RankRecord], matched: pl.DataFrame, late: Lateness) -> Finding | None:
    """Groups of ranks whose transfers take longer than the same ones of other groups."""
    steps = max(matched["step"].n_unique(), 1)
    alike = ["kind", "bytes", "size", "description"]
    taken = matched.with_columns(first=pl.col("ranks").list.first(), second=pl.col("ranks").list.last())
    groups = taken.group_by(*alike, "group", "first", "second").agg(
        pl.col("ranks").first(), pl.col("transfer_ns").median(), times=pl.len()
    )
    usual = pl.col("transfer_ns").median().over(alike)
    spread = (pl.col("transfer_ns") - usual).abs().median().over(alike)
    found = groups.with_columns(usual=usual, spread=spread, groups=pl.len().over(alike)).filter(
        (pl.col("groups") >= _FEWEST_GROUPS)
        & (pl.col("transfer_ns") > _TIMES * pl.col("usual"))
        & (pl.col("transfer_ns") > pl.col("usual") + _SPREADS * pl.col("spread"))
    )
    if found.is_empty():
        return None
    found = found.with_columns(lost=(pl.col("transfer_ns") - pl.col("usual")) * pl.col("times") / steps)
    found = found.sort("lost", "first", descending=[True, False])
    mine = found.join(found.head(1), on=alike, how="semi", nulls_equal=True, maintain_order="left")
    kind = str(mine["kind"][0])
    step_ns = max(record.step_ns for record in records)
    saved = min(int(mine["lost"][0]), max(record.exposed_ns for record in records), step_ns)
    share, limit = saved / step_ns, slow_transfer.RULE.thresholds["share"].value
    if saved <= 0 or share < limit:
        return None
    ranks = mine["ranks"][0].to_list()
    times = mine["transfer_ns"][0] / max(mine["usual"][0], 1)
    names = ", ".join(records[each].name.removeprefix("rank ") for each in ranks[:_LISTED])
    others = int(mine["groups"][0]) - mine.height
    place = shared_place(records, sorted({each for one in mine["ranks"].to_list() for each in one}))
    title = (
        f"{kind.replace('_', '-')} among ranks {names}{', …' if len(ranks) > _LISTED else ''} takes {times:.1f} times "
        f"as long as in {others} other groups"
    )
    return Finding(
        slow_transfer.RULE.id,
        title + (f"; these ranks share {place}" if place else ""),
        severity(share),
        saved,
        share,
        "from the last rank's arrival to the end, beyond the median of the same exchanges of other groups",
        "medium",
        Evidence(
            (
                Figure("share of the step that transfers as fast as the others' would save", share, "share", limit),
                Figure("time of these transfers over that of other groups", times),
                Figure("groups that are as fast as most", others, "count"),
                Figure("groups that are slow", mine.height, "count"),
            )
        ),
        slow_transfer.REMEDY,
    )
