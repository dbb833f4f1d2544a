"""What sets ranks of a job apart: their machine, their place in it, their groups' transfers, kernels and bytes;
and what they exchange.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import bus_bytes
from stepscope.analysis.matching import Clock, clocks, matched_collectives, participants
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Remedy
from stepscope.diagnosis.rank_summary import RankRecord, cut_places
from stepscope.diagnosis.rule import severity
from stepscope.diagnosis.rules import pipeline_bubbles, slow_transfer

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


_WORDS: Final = (
    ("pipeline", r"(?:^|[^a-z])(?:pp|pipe|pipeline)(?:[^a-z]|$)"),
    ("expert", r"(?:^|[^a-z])(?:ep|expert|experts|moe)(?:[^a-z]|$)"),
    ("context", r"(?:^|[^a-z])(?:cp|context|ulysses|ring)(?:[^a-z]|$)"),
    ("tensor", r"(?:^|[^a-z])(?:tp|tensor|mp)(?:[^a-z]|$)"),
    ("data", r"(?:^|[^a-z])(?:dp|ddp|fsdp|hsdp|data|replicate|shard)(?:[^a-z]|$)"),
)
"""What frameworks call the groups of a kind of parallelism: PyTorch's meshes, Megatron, DeepSpeed."""
_EARLY, _LATE, _OFTEN = 0.2, 0.4, 4


def parallelism(matched: pl.DataFrame) -> dict[tuple[str, int], str]:
    """What groups are for, by description and size: "tensor", "data", "pipeline", "expert" or "context".

    Groups are told by their names; else by their exchanges: sends and receives are a pipeline's, and of two sizes of
    groups that reduce, the one does so in all layers (tensor) and the other only later in the step (data). Those that
    nothing tells are left out.
    """
    last = pl.col("arrivals_ns").list.max()
    place = (last - last.min().over("step")) / (last.max().over("step") - last.min().over("step"))
    groups = matched.with_columns(place=place).group_by("description", "size", maintain_order=True).agg(
        is_between=pl.col("source").is_not_null().all(),
        reduces=pl.col("kind").is_in(["all_reduce", "reduce_scatter", "all_gather"]).all(),
        first=pl.col("place").quantile(0.05),
        often=pl.len() / pl.struct("step", "group", pl.col("ranks").list.first()).n_unique(),
    )  # fmt: skip
    found: dict[tuple[str, int], str] = {}
    reducing: dict[str, list[tuple[str, int]]] = {"tensor": [], "data": []}
    for described, size, is_between, reduces, first, often in groups.iter_rows():
        word = next((kind for kind, pattern in _WORDS if re.search(pattern, described.lower())), None)
        if word or is_between:
            found[described, size] = word or "pipeline"
        elif reduces and first is not None and (first >= _LATE or (first <= _EARLY and often >= _OFTEN)):
            reducing["data" if first >= _LATE else "tensor"].append((described, size))
    if all(len(each) == 1 for each in reducing.values()):
        found |= {key: kind for kind, keys in reducing.items() for key in keys}
    return found


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


def slow_groups(records: Sequence[RankRecord], matched: pl.DataFrame) -> Finding | None:
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


def pipeline_stages(matched: pl.DataFrame) -> dict[int, int]:
    """The stage of each rank of a pipeline, by its index; empty where activations come back to the first stage.

    In each step a pair's first message goes forward, to the next stage.
    """
    pairs = matched.filter(pl.col("source").is_not_null() & (pl.col("ranks").list.len() == 2)).select(
        "step", "source", target=pl.col("ranks").list.sum() - pl.col("source")
    )
    pair = (pl.min_horizontal("source", "target"), pl.max_horizontal("source", "target"))
    forward = pairs.unique(["step", *(each.alias(name) for name, each in zip("ab", pair, strict=True))],
                           keep="first", maintain_order=True).select("source", "target").unique()  # fmt: skip
    before = dict(forward.select("target", "source").iter_rows())
    if len(before) < forward.height:
        return {}
    stages: dict[int, int] = {}
    for rank in sorted({*before, *before.values()}):
        way = [rank]
        while way[-1] in before and way[-1] not in stages:
            way.append(before[way[-1]])
            if len(way) > len(before) + 1:
                return {}
        first = stages.get(way[-1], 0)
        stages |= {each: first + place for place, each in enumerate(reversed(way))}
    return stages


def bubbles(records: Sequence[RankRecord], matched: pl.DataFrame) -> Finding | None:
    """What pipeline stages wait for each other, by phase, and the stage that computes longest."""
    stages = pipeline_stages(matched)
    if not stages:
        return None
    steps, step_ns = max(matched["step"].n_unique(), 1), max(record.step_ns for record in records)
    taken = participants(matched).join(
        matched.select("step", "source", exchange=pl.int_range(pl.len())), on="exchange"
    ).filter(pl.col("source").is_not_null())  # fmt: skip
    number = pl.col("rank").replace_strict(stages, default=None, return_dtype=pl.Int64)
    sender = pl.col("source").replace_strict(stages, default=None, return_dtype=pl.Int64)
    taken = taken.with_columns(stage=number, is_received=pl.col("source") != pl.col("rank"), sender=sender)
    taken = taken.sort("rank", "step", "arrival_ns", maintain_order=True)
    target = pl.col("stage").sum().over("exchange") - pl.col("sender")
    taken = taken.with_columns(is_forward=target > pl.col("sender"))
    place = pl.int_range(pl.len()).over("rank", "step")
    returns = pl.when(pl.col("is_received") & ~pl.col("is_forward")).then(place).min().over("rank", "step")
    arrives = pl.when(pl.col("is_received")).then(place).min().over("rank", "step")
    final = pl.when(pl.col("is_forward")).then(place).max().over("rank", "step")
    phase = (
        pl.when(place <= pl.coalesce(returns, arrives)).then(pl.lit("warm-up")).when(place > final)
        .then(pl.lit("drain")).otherwise(pl.lit("steady"))
    )  # fmt: skip
    waited = taken.with_columns(phase=phase).filter("is_received")
    by_phase = dict(waited.group_by("phase").agg(pl.col("wait_ns").sum()).iter_rows())
    ranks, count = len(stages), max(stages.values()) + 1
    mean = {name: by_phase.get(name, 0) // ranks // steps for name in ("warm-up", "steady", "drain")}
    saved = min(sum(mean.values()), step_ns)
    share, limit = saved / step_ns, pipeline_bubbles.RULE.thresholds["share"].value
    if saved <= 0 or share < limit:
        return None
    sent = taken.filter(~pl.col("is_received") & pl.col("is_forward") & (pl.col("stage") == 0))
    batches = sent.height / steps / max(sum(stage == 0 for stage in stages.values()), 1)
    bubble = (count - 1) / (batches + count - 1)
    figures = [
        Figure("share of the step that stages wait", share, "share", limit),
        Figure("mean wait of a stage per step", saved, "ns"),
        *(
            Figure(f"of it in {name}" if name == "steady" else f"of it in the {name}", ns, "ns")
            for name, ns in mean.items()
        ),
        Figure("stages", count, "count"),
        Figure("micro-batches in a step", batches, "count"),
        Figure("share of the step that so many stages and micro-batches leave idle", bubble, "share"),
    ]
    title = f"pipeline stages wait {saved / 1e6:,.1f} ms a step for each other in the mean"
    remedy, slow = pipeline_bubbles.REMEDY, _slowest_stage(records, stages)
    if slow is not None:
        stage, more, longer = slow
        title += f"; stage {stage} computes {more:.0%} longer than the mean stage"
        figures += [
            Figure(f"how much longer stage {stage} computes than the mean", more, "share"),
            Figure("the same per step", longer, "ns"),
            Figure("number of the stage", stage, "count"),
        ]
        remedy = Remedy(
            f"Move layers from stage {stage} to the others until all compute as long; the embedding and the loss count "
            "too.",
            "stage = PipelineStage(part, index, stages, device)      # from split points that balance measured times",
        )
    else:
        title += f": {batches:,.0f} micro-batches for {count} stages"
    return Finding(
        pipeline_bubbles.RULE.id, title, severity(share), saved, share,
        "time from when a stage begins to receive until its peer sends, mean of all", "low", Evidence(tuple(figures)),
        remedy,
    )  # fmt: skip


def _slowest_stage(records: Sequence[RankRecord], stages: dict[int, int]) -> tuple[int, float, int] | None:
    """The stage whose devices compute longest, how much beyond the mean, and the same per step."""
    computes: dict[int, list[float]] = {}
    for rank, stage in stages.items():
        kernels = records[rank].kernels
        if kernels is None:
            return None
        computes.setdefault(stage, []).append(int(kernels["ns"].sum()) / records[rank].steps)
    times = {stage: float(np.median(each)) for stage, each in computes.items()}
    mean = sum(times.values()) / len(times)
    stage = max(times, key=lambda each: times[each])
    more = times[stage] / mean - 1 if mean else 0.0
    return (stage, more, int(times[stage] - mean)) if more >= pipeline_bubbles.RULE.thresholds["more"].value else None


def missing_ranks(records: Sequence[RankRecord]) -> int:
    """How many ranks the job has beyond those with exchanges here."""
    here = sum(record.collectives.table.height > 0 for record in records)
    return max(max((record.ranks for record in records), default=0) - here, 0)


def open_exchanges(records: Sequence[RankRecord], matched: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Which collectives have members that are missing: what looks like their transfer may be a wait for these."""
    if not missing_ranks(records):
        return np.zeros(matched.height, np.bool_)
    is_open = pl.col("source").is_null() & (pl.col("size") > pl.col("ranks").list.len())
    return matched.select(is_open).to_series().to_numpy()


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
