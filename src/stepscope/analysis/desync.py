"""Which ranks hold a job up, by logs of their collectives: calls that do not match, ranks that are missing or late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from stepscope.analysis.communication import bus_bytes, kind_of
from stepscope.readers.collective_logs import CollectiveLogs

_ALIKE: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})
"""Kinds of collectives in which every rank gives and takes as many numbers as the others."""
_FEWEST_GROUPS: Final = 3
_APART_NS: Final = 1 << 46
_SLOW: Final = 0.8
"""Share of the median rate of like groups below which a group is slow."""

ARRIVAL_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "process": pl.Int64,
    "calls": pl.Int64,  # that all ranks of their groups made and that tell who came last
    "last": pl.Int64,  # of them, those to which this rank came last
    "late_ns": pl.Int64,  # how much later than the rank before it, of all these together
    "waits_ns": pl.Int64,  # its waits for the last rank, of all calls together
}
RATE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "bytes": pl.Int64,
    "ranks": pl.Int64,  # of a group
    "calls": pl.Int64,
    "algorithm": pl.String,  # and protocol, where the log tells
    "transfer_ns": pl.Int64,  # median time after the last rank came
    "algorithm_gb_per_s": pl.Float64,
    "bus_gb_per_s": pl.Float64,
    "slowest_group": pl.String,
    "slowest_gb_per_s": pl.Float64,
}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first call of a group in which ranks differ.

    Attributes:
        what: "call", "number type" or "size".
        ranks: by what they called, processes.
        places: by what they called, the user's line; "" where unknown.
    """

    group: str
    number: int
    name: str
    what: str
    ranks: dict[str, tuple[int, ...]]
    places: dict[str, str]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The first collective of a group that is not done on all its ranks.

    Attributes:
        waiting: processes that are in it.
        missing: processes of the group that have not come to it.
        not_started: those of `waiting` whose device has not begun it, where others' have.
        unlogged: ranks of the group of which there is no log; None where it is not known who is in the group.
        calls: by process that waits, the name of its call and the user's line, "" where unknown.
        since_ns: when the first of `waiting` made its call, since 1970; None where unknown.
        is_cause: whether nothing else that is logged explains it.
    """

    group: str
    number: int
    name: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    not_started: tuple[int, ...]
    unlogged: tuple[int, ...] | None
    calls: dict[int, tuple[str, str]]
    since_ns: int | None
    is_cause: bool = True


@dataclass(frozen=True, slots=True)
class LastCall:
    """The last call that the log of a process has, and how many it has."""

    calls: int
    group: str
    number: int
    name: str
    place: str
    is_done: bool


@dataclass(frozen=True, slots=True)
class Desync:
    """What the logs of a job's collectives show.

    Attributes:
        arrivals: columns as in ARRIVAL_SCHEMA, the latest first.
        by: what tells who came last: "time on the device", "time of the call", or "" where nothing does.
        rates: columns as in RATE_SCHEMA, the longest together first.
        slow: groups that are slower than like ones: kind, bytes, group, its rate and the median of all.
        last_calls: by process.
        latest_ns: the latest call in any of the logs, since 1970; None where unknown.
    """

    mismatches: tuple[Mismatch, ...]
    unfinished: tuple[Unfinished, ...]
    arrivals: pl.DataFrame
    by: str
    rates: pl.DataFrame
    slow: tuple[tuple[str, int, str, float, float], ...]
    last_calls: dict[int, LastCall]
    latest_ns: int | None

    @property
    def causes(self) -> tuple[int, ...]:
        """Processes that others wait for and that wait for none."""
        return tuple(sorted(_behind(self.unfinished)))


def _behind(unfinished: Sequence[Unfinished]) -> set[int]:
    waiting = {process for each in unfinished for process in each.waiting}
    return {process for each in unfinished for process in each.missing} - waiting


def desync(logs: CollectiveLogs) -> Desync:
    calls = logs.calls.with_columns(
        kind=pl.col("name").replace_strict(
            {name: kind_of(name) for name in logs.calls["name"].unique()}, default="other"
        )
    )
    sizes = _sizes(logs, calls)
    calls = calls.with_columns(size=pl.coalesce("size", pl.col("group").replace_strict(sizes, default=None)))
    arrivals, by = _arrivals(calls)
    rates, slow = _rates(calls)
    # a log has its calls in their order
    last = calls.group_by("process").agg(pl.len(), pl.col("group", "number", "name", "place", "is_done").last())
    mismatches = tuple(_mismatches(calls))
    return Desync(
        mismatches,
        _unfinished(logs, calls, mismatches),
        arrivals,
        by,
        rates,
        slow,
        {process: LastCall(*told) for process, *told in last.iter_rows()},
        _moment(calls["created_ns"].max()),
    )


def _sizes(logs: CollectiveLogs, calls: pl.DataFrame) -> dict[str, int]:
    """Ranks of each group: its members, or else as many as log calls in it."""
    seen = dict(calls.group_by("group").agg(pl.col("process").n_unique()).iter_rows())
    return {group: len(logs.members.get(group, ())) or count for group, count in seen.items()}


def _mismatches(calls: pl.DataFrame) -> Iterator[Mismatch]:
    sized = pl.when(pl.col("kind").is_in(_ALIKE)).then(
        pl.concat_str("elements_in", "elements_out", "bytes", separator=" ", ignore_nulls=True)
    )
    keys = ["group", "number"]
    compared = calls.with_columns(numbers=sized, number_type=pl.col("number_type").replace("", None))
    counts = compared.group_by(keys).agg(pl.col("name", "number_type", "numbers").drop_nulls().n_unique())
    differ = counts.filter(pl.max_horizontal("name", "number_type", "numbers") > 1)
    first = differ.sort(keys).unique("group", keep="first", maintain_order=True)
    mine = calls.join(first.select(keys), on=keys, how="semi").sort("process").partition_by("group", as_dict=True)
    for group, number, names, types, _ in first.iter_rows():
        rows = mine[group,]
        what = "call" if names > 1 else "number type" if types > 1 else "size"
        told = {
            "call": pl.col("name"),
            "number type": pl.col("number_type"),
            "size": pl.coalesce(
                pl.col("elements_in").cast(pl.String) + " numbers", pl.col("bytes").cast(pl.String) + " bytes"
            ),
        }[what]
        by = rows.group_by(told.fill_null("").alias("what"), maintain_order=True).agg(
            "process", pl.col("place").first()
        )
        ranks = {value: tuple(processes) for value, processes, _ in by.iter_rows()}
        places = {value: place for value, _, place in by.iter_rows()}
        yield Mismatch(group, number, rows["name"][0], what, ranks, places)


def _moment(ns: object) -> int | None:
    return ns if isinstance(ns, int) else None


def _unfinished(logs: CollectiveLogs, calls: pl.DataFrame, mismatches: Sequence[Mismatch]) -> tuple[Unfinished, ...]:
    by_rank = {each.rank: index for index, each in enumerate(logs.processes) if each.rank is not None}
    found = []
    for (group,), rows in calls.sort("number", "process").group_by("group", maintain_order=True):
        one = _unfinished_of(logs, str(group), rows, by_rank)
        if one is not None:
            found.append(one)
    behind, differ = _behind(found), {each.group: each.number for each in mismatches}

    def is_cause(one: Unfinished) -> bool:
        if one.number >= differ.get(one.group, one.number + 1):
            return False
        if one.missing:
            return not behind.isdisjoint(one.missing)
        return one.unlogged is not None or not behind

    return tuple(replace(each, is_cause=is_cause(each)) for each in found)


def _unfinished_of(logs: CollectiveLogs, group: str, rows: pl.DataFrame, by_rank: dict[int, int]) -> Unfinished | None:
    members = logs.members.get(group, ())
    entered = dict(rows.group_by("process").agg(pl.col("number").max()).iter_rows())
    for process in (by_rank[rank] for rank in members if rank in by_rank):
        if logs.processes[process].is_whole:  # else its earlier calls are not in the log any more
            entered.setdefault(process, 0)
    there = sorted(entered)
    undone = rows.filter(~pl.col("is_done"))
    behind, front = min(entered.values()) + 1, max(entered.values())
    numbers = [behind] if behind <= front else []
    if undone.height:
        numbers.append(int(str(undone["number"].min())))
    if not numbers:
        return None
    number = min(numbers)
    missing = tuple(process for process in there if entered[process] < number)
    mine = undone.filter(pl.col("number") == number)
    if mine.is_empty() and not missing:
        return None
    begun = mine["is_started"].fill_null(False)
    called = rows.filter(pl.col("number") == number)
    return Unfinished(
        group,
        number,
        called["name"].mode().sort()[0] if called.height else "a collective",
        tuple(mine["process"].to_list()),
        missing,
        tuple(mine.filter(~begun)["process"].to_list()) if begun.any() else (),
        tuple(rank for rank in members if rank not in by_rank) if members else None,
        {process: (name, place) for process, name, place in mine.select("process", "name", "place").iter_rows()},
        _moment(mine["created_ns"].min()),
    )


def _together(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls that all ranks of their group have logged, once each."""
    keys = ["group", "number"]
    is_whole = (pl.len().over(keys) == pl.col("size")) & (pl.col("process").n_unique().over(keys) == pl.col("size"))
    return calls.filter(is_whole & (pl.col("size") > 1) & (pl.col("name").n_unique().over(keys) == 1))


def _arrivals(calls: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """When ranks came to their collectives: by the shortest time in it, or else by the hosts' clocks."""
    together, keys = _together(calls), ["group", "number"]
    timed = together.filter(pl.col("duration_ns").is_not_null().all().over(keys))
    by, arrival = "time on the device", -pl.col("duration_ns")
    if timed.is_empty():
        timed = together.filter(pl.col("created_ns").is_not_null().all().over(keys))
        by, arrival = "time of the call", pl.col("created_ns")
    if timed.is_empty():
        return pl.DataFrame(schema=ARRIVAL_SCHEMA), ""
    ordered = timed.select(*keys, "process", at=arrival).sort(*keys, "at", "process")
    # clocks that are further apart tell nothing
    ordered = ordered.filter(pl.col("at").max().over(keys) - pl.col("at").min().over(keys) < _APART_NS).with_columns(
        wait=pl.col("at").max().over(keys) - pl.col("at"),
        late=pl.col("at") - pl.col("at").shift(1).over(keys),
        is_last=pl.int_range(pl.len()).over(keys) == pl.len().over(keys) - 1,
    )
    # of ranks that come at the same time none is the last
    is_last = pl.col("is_last") & (pl.col("late") > 0)
    found = ordered.group_by("process").agg(
        calls=pl.len(),
        last=is_last.sum(),
        late_ns=pl.when(is_last).then("late").otherwise(0).sum(),
        waits_ns=pl.col("wait").sum(),
    )
    found = found.select(pl.col(name).cast(kind) for name, kind in ARRIVAL_SCHEMA.items()).sort(
        "late_ns", "process", descending=[True, False]
    )
    return found, by


def _rates(calls: pl.DataFrame) -> tuple[pl.DataFrame, tuple[tuple[str, int, str, float, float], ...]]:
    """How fast collectives move data once the last rank, whose time in them is the shortest, has come."""
    timed = _together(calls).filter(
        pl.col("duration_ns").is_not_null().all().over("group", "number") & (pl.col("bytes") > 0)
    )
    each = timed.group_by("group", "number", "kind", "bytes", "size").agg(
        pl.col("duration_ns").min(), pl.col("algorithm").max(), noted=pl.col("bus_gb_per_s").max()
    )
    each = each.filter(pl.col("kind").is_in(["barrier", "other", "send_receive"]).not_())
    if each.is_empty():
        return pl.DataFrame(schema=RATE_SCHEMA), ()
    moved = [bus_bytes(*row) for row in each.select("kind", "bytes", "size").iter_rows()]
    each = each.with_columns(rate=pl.coalesce("noted", pl.Series(moved) / pl.col("duration_ns")))
    keys = ["kind", "bytes", "size"]
    by_group = each.group_by(*keys, "group").agg(pl.col("rate").median()).sort(*keys, "rate", "group")
    slowest = by_group.group_by(keys, maintain_order=True).agg(
        pl.col("group").first(), slowest=pl.col("rate").first(), median=pl.col("rate").median(), groups=pl.len()
    )
    rows = each.group_by(keys).agg(
        pl.len(),
        pl.col("algorithm").replace("", None).drop_nulls().unique().sort().str.join(", "),
        pl.col("duration_ns").median(),
        pl.col("rate").median(),
        whole=pl.col("duration_ns").sum(),
    )
    rows = rows.join(slowest, on=keys).sort("whole", *keys, descending=[True, False, False, False])
    table = pl.DataFrame(
        [
            (kind, size, ranks, count, algorithm, round(ns), rate / bus_bytes(kind, 1, ranks), rate, group, low)
            for kind, size, ranks, count, algorithm, ns, rate, _, group, low, _, _ in rows.iter_rows()
        ],
        schema=RATE_SCHEMA,
        orient="row",
    )
    slow = rows.filter((pl.col("groups") >= _FEWEST_GROUPS) & (pl.col("slowest") < _SLOW * pl.col("median")))
    return table, tuple(slow.select("kind", "bytes", "group", "slowest", "median").iter_rows())
