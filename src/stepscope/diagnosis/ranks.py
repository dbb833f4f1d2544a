"""Findings from several ranks' traces together: which rank the others wait for, and how fast data moves between
ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import bus_bytes
from stepscope.analysis.host import CAUSES
from stepscope.analysis.matching import Clock, clocks, matched_collectives, participants
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Location, Remedy
from stepscope.diagnosis.rank_summary import BUSY, RankRecord, rank_record
from stepscope.diagnosis.rule import severity
from stepscope.diagnosis.rules import exposed_communication, late_rank, slow_transfer
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.trace.window import Times

_TELLING: Final = 0.25
"""Share of the waiting that a cause must explain to be reported."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one rank comes later than the others.

    Attributes:
        place: the rank's place among the records.
        cause: of idle or host time; "busy" for its device's own work, "begin" where it began the recorded steps later,
            "before" where it left an exchange later that not all ranks took part in.
        ns: how much more of it this rank had than the mean of the others, before collectives that it reached last.
        works: how many more pieces of device work it had there.
    """

    place: int
    cause: str
    ns: int
    works: int


def reasons(records: Sequence[RankRecord], matched: pl.DataFrame) -> list[Reason]:
    """What the last rank of each collective did longer than the others since the one before, the largest first."""
    befores = [record.collectives.before for record in records]
    if matched.is_empty() or any(before is None for before in befores):
        return []
    taken = participants(matched)
    exchange, rank, rows, arrivals = (taken[name].to_numpy() for name in ("exchange", "rank", "row", "arrival_ns"))
    last = matched["last"].to_numpy()
    begin = np.flatnonzero(np.diff(exchange, prepend=-1))
    is_last, others = rank == last[exchange], np.diff(begin, append=len(rank)) - 1
    # one table of all ranks: a thousand small ones take ten times as long
    known = pl.concat((before for before in befores if before is not None), how="diagonal").fill_null(0)
    tables = [record.collectives.table.select("start_ns") for record in records]
    places = rows + np.cumsum([0, *(table.height for table in tables[:-1])])[rank]

    def extra(values: Times) -> Times:
        """The last rank's value beyond the mean of the others'."""
        own = values[is_last]
        more: Times = own - (np.add.reduceat(values, begin) - own) // others
        return more

    def before_each(name: str) -> Times:
        values: Times = known[name].to_numpy()[places] if name in known.columns else np.zeros_like(places)
        return values

    starts = pl.concat(tables)["start_ns"].to_numpy()[places]
    later = extra(before_each("begin_ns") - starts + arrivals - arrivals.min())
    first = np.maximum.reduceat(rows, begin) == 0
    more = {name: extra(before_each(name)) for name in sorted(known.columns) if name not in ("begin_ns", "works")}
    more |= {"begin": np.where(first, later, 0), "before": np.where(first, 0, later)}
    works = extra(before_each("works"))
    found = [
        Reason(place, cause, int(ns[last == place].sum()), int(works[last == place].sum()))
        for place in np.unique(last).tolist()
        for cause, ns in more.items()
    ]
    return sorted((each for each in found if each.ns > 0), key=lambda each: (-each.ns, each.place, each.cause))


def diagnose_ranks(traces: Sequence[Trace]) -> tuple[Finding, ...]:
    """Compare each rank's trace of the same steps; see the rules late-rank and slow-transfer."""
    return across_ranks([rank_record(View(trace)) for trace in traces])


def across_ranks(records: Sequence[RankRecord], matched: pl.DataFrame | None = None) -> tuple[Finding, ...]:
    """Compare ranks by their records; the finding with the largest saving comes first.

    Args:
        matched: of `matched_collectives` of the records, if it is known.
    """
    if matched is None:
        matched = matched_collectives([record.collectives for record in records])
    if matched.is_empty():
        return ()
    steps = max(matched["step"].n_unique(), 1)
    why = reasons(records, matched)
    apart = [each for each in (_late(records, matched, why, steps), _apart(records, matched, why, steps)) if each]
    most = max(apart, key=lambda finding: finding.saving_ns_per_step, default=None)  # both describe the same waits
    findings = [finding for finding in (most, _slow(records, matched, steps)) if finding is not None]
    return tuple(sorted(findings, key=lambda finding: -finding.saving_ns_per_step))


def _waits_ns(matched: pl.DataFrame, ranks: int) -> list[int]:
    """Each rank's wait for later ones, per step."""
    waits = np.zeros(ranks, np.int64)
    taken = participants(matched)
    np.add.at(waits, taken["rank"].to_numpy(), taken["wait_ns"].to_numpy())
    return [int(ns) for ns in waits // max(matched["step"].n_unique(), 1)]


def _some_missing(records: Sequence[RankRecord]) -> bool:
    """Whether the job has more ranks than these, one of which may be the late one."""
    return max((record.ranks for record in records), default=0) > len(records)


def without_answered(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Drop the question that a single rank's trace cannot answer if the traces of all ranks are present."""
    ranks = {diagnosis.metadata.rank for diagnosis in diagnoses} - {None}
    if len(ranks) < max((diagnosis.metadata.world_size or 2 for diagnosis in diagnoses), default=2):
        return list(diagnoses)
    asks = exposed_communication.RULE.id
    return [
        replace(diagnosis, not_answered=tuple(each for each in diagnosis.not_answered if each.rule != asks))
        for diagnosis in diagnoses
    ]


def _late(records: Sequence[RankRecord], matched: pl.DataFrame, why: Sequence[Reason], steps: int) -> Finding | None:
    by_rank = matched.group_by("last").agg(late=pl.col("late_ns").sum()).sort("late", "last", descending=[True, False])
    last, late = by_rank.row(0)
    total = int(matched["late_ns"].sum())
    others = [record for place, record in enumerate(records) if place != last]
    step_ns = max(record.step_ns for record in records)
    exposed = max(record.exposed_ns for record in others)
    saved = min(late // steps, exposed, step_ns)
    limit, times = (late_rank.RULE.thresholds[name].value for name in ("share", "times"))
    if _some_missing(records) or saved <= 0 or saved / step_ns < limit or late < times * total:
        return None
    slow, share = records[last], saved / step_ns
    told = _told(records, [reason for reason in why if reason.place == last], steps, saved)
    return Finding(
        late_rank.RULE.id,
        f"the other ranks wait {saved / 1e6:,.1f} ms a step for {slow.name}{told.after_the_rank}",
        severity(share),
        saved,
        share,
        "how much later it reaches each collective than the rank before it, as far as the others only communicate",
        "low",
        Evidence(
            (
                Figure("share of the step that ranks wait for the last one", share, "share", limit),
                Figure("share of the waiting that this rank causes", late / max(total, 1), "share", times),
                Figure("time that ranks wait for the last one per step", saved, "ns"),
                Figure("collectives that were compared per step", matched.height / steps, "count"),
                Figure("longest wait", int(matched["waiting_ns"].to_numpy().max()), "ns"),
                *told.figures,
            )
        ),
        told.remedy
        or Remedy(f"Find out what holds {slow.name} up: its data, its host or its device.", _diagnose(slow)),
        told.where,
    )


def _apart(records: Sequence[RankRecord], matched: pl.DataFrame, why: Sequence[Reason], steps: int) -> Finding | None:
    """What ranks wait for each other where no single rank is the late one."""
    waits = _waits_ns(matched, len(records))
    step_ns = max(record.step_ns for record in records)
    exposed = sum(record.exposed_ns for record in records) // len(records)
    saved = min(sum(waits) // len(waits), exposed, step_ns)
    limit = late_rank.RULE.thresholds["share"].value
    if _some_missing(records) or saved <= 0 or saved / step_ns < limit:
        return None
    last, first = int(np.argmin(waits)), int(np.argmax(waits))
    share, (kind, of_kind) = saved / step_ns, _most_waited_in(matched)
    told = _told(records, why, steps, saved)
    return Finding(
        late_rank.RULE.id,
        f"ranks wait {saved / 1e6:,.1f} ms a step for later ones in the mean, {of_kind:.0%} of it in {kind}: "
        f"{records[last].name} comes last, and {records[first].name} waits {waits[first] / 1e6:,.1f} ms"
        f"{told.after_all}",
        severity(share),
        saved,
        share,
        "mean wait of the ranks for the last one in each collective, as far as they only communicate: what a step "
        "would save if the same work were spread evenly",
        "low",
        Evidence(
            (
                Figure("share of the step that ranks wait for later ones", share, "share", limit),
                Figure("mean wait per step", saved, "ns"),
                Figure(f"share of the waiting in {kind}", of_kind, "share"),
                Figure("longest wait of a rank per step", waits[first], "ns"),
                Figure("wait of the last rank per step", waits[last], "ns"),
                Figure("collectives that were compared per step", matched.height / steps, "count"),
                *told.figures,
            )
        ),
        told.remedy
        or Remedy(
            f"Spread the work evenly over the ranks, and look into what holds {records[last].name} up.",
            _diagnose(records[last]),
        ),
        told.where,
    )


EXCHANGE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "bytes": pl.Int64,  # message of one rank; null where unknown
    "group": pl.String,  # what the program calls the groups of ranks; "" where unknown
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
    "last": pl.String,  # the rank that most often comes last
    "last_share": pl.Float64,  # how often
}


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
    if matched is None:
        matched = matched_collectives([record.collectives for record in records])
    steps = max(matched["step"].n_unique(), 1)
    links = {record.link_gb_per_s for record in records}
    link = links.pop() if len(links) == 1 else None
    bare = _exposed(records, matched)
    rows = []
    for key, mine in matched.group_by(_ALIKE, maintain_order=True):
        kind, size, described, ranks = str(key[0]), key[1], key[2], int(str(key[3]))
        groups = mine.unique(["group", "source", pl.col("ranks").list.first()])["ranks"].list.len()
        taken = int(mine["transfer_ns"].sum())
        carries = size is not None and taken and kind != "send_receive"
        algorithm_rate = int(str(size)) * mine.height / taken if carries else None
        rate = None if algorithm_rate is None else bus_bytes(kind, 1, ranks) * algorithm_rate
        exposed, spent, most, how = bare[key]
        last, times = mine["last"].value_counts().sort("count", "last", descending=[True, False]).row(0)
        waited = int(mine["waits_ns"].list.sum().sum()) // int(groups.sum())
        rows.append((kind, size, described, ranks, len(groups), mine.height / steps / len(groups), waited // steps,
                     taken // len(groups) // steps, how, algorithm_rate, rate, rate and link and rate / link,
                     exposed // int(groups.sum()) // steps, 1 - exposed / max(spent, 1), records[most].name,
                     records[last].name, times / mine.height))  # fmt: skip
    table = pl.DataFrame(rows, schema=EXCHANGE_SCHEMA, orient="row")
    table = table.sort(pl.col("wait_ns") + pl.col("transfer_ns"), descending=True, maintain_order=True)
    told = tuple((records[rank].name, clock) for rank, clock in clocks(matched).items())
    return Exchanges(table, matched.height, told)


_ALIKE: Final = ["kind", "bytes", "description", "size"]


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


def _most_waited_in(matched: pl.DataFrame) -> tuple[str, float]:
    """The kind of collective in which ranks wait most, in words, and its share of all waiting."""
    sums = matched.group_by("kind").agg(ns=pl.col("waits_ns").list.sum().sum()).sort("ns", "kind", descending=True)
    kind, most = sums.row(0)
    return kind.replace("_", "-"), most / max(int(sums["ns"].sum()), 1)


def _diagnose(record: RankRecord) -> str:
    return f"stepscope diagnose {shlex.quote(record.path)}"


@dataclass(frozen=True, slots=True)
class _Told:
    """What is said about why a rank comes late; nothing if no reason explains enough."""

    after_the_rank: str = ""
    after_all: str = ""
    figures: tuple[Figure, ...] = ()
    remedy: Remedy | None = None
    where: tuple[Location, ...] = ()


def _told(records: Sequence[RankRecord], why: Sequence[Reason], steps: int, saved: int) -> _Told:
    """The largest of the reasons, if it is a good part of what would be saved."""
    if not why or why[0].ns // steps < _TELLING * saved:
        return _Told()
    reason = why[0]
    record, ns = records[reason.place], reason.ns // steps
    longer, name = f"{ns / 1e6:,.1f} ms", record.name
    if reason.cause in _LATER:
        words, remedy = _LATER[reason.cause]
        figure = Figure(f"how much later {name} {words}, per step", ns, "ns")
        text = f"{words} {longer} later than the others in the mean"
        return _Told(
            f", which {text}", f"; {name} {text}", (figure,), Remedy(f"{remedy} {name} up.", _diagnose(record))
        )
    if reason.cause == BUSY:
        works = reason.works / steps
        much = f"on {works:,.0f} more pieces of work" if works >= 1 else "on no more pieces of work"
        figures = (
            Figure(f"how much longer the device of {name} works, per step", ns, "ns"),
            Figure(f"pieces of work that {name} has more, per step", max(works, 0), "count"),
        )
        remedy = (
            f"Give {name} no more work than the others: its batch, its sequences, its shards of tables or experts. If "
            "it has the same, compare the devices' clocks and temperatures."
        )
        text = f"device works {longer} longer, {much}"
        return _Told(f", whose {text}", f"; {name}'s {text}", figures, Remedy(remedy, _diagnose(record)))
    figure = Figure(f"how much longer {name} took for this, per step", ns, "ns")
    text = f"{CAUSES.get(reason.cause, 'the host computed')} {longer} longer"
    where = record.places.get(reason.cause, ())
    return _Told(f", where {text}", f"; on {name} {text}", (figure,), None, where)


_LATER: Final = {
    "begin": (
        "began the recorded steps",
        "These waits came into the recording with the ranks. Record several steps, so that the traces show what holds",
    ),
    "before": (
        "left the exchange before",
        "Look into the exchanges that only some of the ranks take part in, which hold",
    ),
}
"""What a rank did later than the others, and what to do about it, which goes on with the rank's name."""


def _slow(records: Sequence[RankRecord], matched: pl.DataFrame, steps: int) -> Finding | None:
    rate, fewest, limit = (slow_transfer.RULE.thresholds[name].value for name in ("bytes_per_second", "bytes", "share"))
    large = matched.filter((pl.col("bytes") >= fewest) & (pl.col("kind") != "send_receive"))
    if large.is_empty() or not all(record.on_device for record in records):
        return None  # a host's network has no known expected rate
    carried = sum(bus_bytes(*row) for row in large.select("kind", "bytes", "size").iter_rows())
    taken = int(large["transfer_ns"].sum())
    step_ns = max(record.step_ns for record in records)
    exposed = min(record.exposed_ns for record in records)
    saved = min(int(max(taken - carried / rate * 1e9, 0)) // steps, exposed, step_ns)
    if saved <= 0 or saved / step_ns < limit:
        return None
    reached, share = carried / max(taken, 1) * 1e9, saved / step_ns
    return Finding(
        slow_transfer.RULE.id,
        f"data moves at {reached / 1e9:,.2f} GB/s once all ranks are there, below the {rate / 1e9:,.1f} GB/s expected",
        severity(share),
        saved,
        share,
        "from the last rank's arrival to the end, less what the same bytes need at the expected rate",
        "medium",
        Evidence(
            (
                Figure("bytes in a second on each link", reached, "bytes", rate),
                Figure("share of the step that transfers at the expected rate would save", share, "share", limit),
                Figure("transfers of 1 MiB or more per step", large.height / steps, "count"),
            )
        ),
        slow_transfer.REMEDY,
    )
