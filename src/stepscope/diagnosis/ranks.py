"""Findings from several ranks' traces together: which rank the others wait for, and how fast data moves between
ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import Lateness, bus_bytes, lateness
from stepscope.analysis.host import CAUSES
from stepscope.analysis.matching import participants
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Location, Remedy
from stepscope.diagnosis.rank_groups import (
    bubbles,
    exchanged_bytes,
    missing_ranks,
    open_exchanges,
    same_kernels,
    shared_place,
    slow_groups,
    whole_exchanges,
)
from stepscope.diagnosis.rank_summary import BUSY, RankRecord, rank_record
from stepscope.diagnosis.rule import severity
from stepscope.diagnosis.rules import exposed_communication, late_rank, slow_transfer
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.trace.window import Times

_TELLING: Final = 0.25
"""Share of the waiting that a cause must explain to be reported."""
_HELD: Final = 0.02
"""Share of a step by which a rank must be held up to be counted."""
_CERTAIN: Final = 6.0
"""Deviations of the noise beyond which a rank is held up for certain."""
_OFTEN: Final = 0.5
"""Share of the steps in which a rank is held up that is slow."""
_TELLS: Final = 0.5
"""Share of the waiting, at least, that must be no noise."""
_MOST: Final = 0.8
_PART: Final = 0.5
_SLOWER: Final = 1.03
"""How much longer the same kernels take on a slower device."""
_UNEVEN: Final = 1.2
"""How many times the others' bytes a rank exchanges that has more of the load."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What ranks that come late did longer than their peers.

    Attributes:
        place: the rank that did so most, as its place among the records.
        cause: of idle or host time; "busy" for its device's own work, "begin" where it began the recorded steps later,
            "before" where it left an exchange later that not all its ranks were recorded of.
        ns: how much longer, where the waiting begins.
        works: how many more pieces of device work they had there.
        part: of `ns`, what is that rank's own.
    """

    place: int
    cause: str
    ns: int
    works: int
    part: float


def reasons(records: Sequence[RankRecord], late: Lateness, parts: npt.NDArray[np.int64]) -> list[Reason]:
    """What ranks did longer than their peers in these parts, where waiting begins; the largest first."""
    befores = [record.collectives.before for record in records]
    if not len(parts) or any(before is None for before in befores):
        return []
    # one table of all ranks: a thousand small ones take ten times as long
    known = pl.concat((before for before in befores if before is not None), how="diagonal").fill_null(0)
    if "works" not in known.columns:  # without a device
        known = known.with_columns(works=0)
    alike = late.parts.select("rank", "place", "row", "more_ns", "held_ns").with_row_index("part")
    alike = alike.with_columns(known.drop("begin_ns").cast(pl.Int64))
    alike = alike.filter(pl.col("place").is_in(alike["place"].gather(parts).unique().implode()))
    names = [name for name in known.columns if name != "begin_ns"]
    chosen = pl.col("part").is_in(pl.Series(parts).implode())
    others = {name: pl.col(name).filter(~chosen).mean().over("place") for name in names}
    more = alike.with_columns((pl.col(name) - usual).fill_null(0).cast(pl.Int64) for name, usual in others.items())
    more = more.filter(chosen)
    came = pl.col("held_ns") - pl.col("more_ns")
    more = more.with_columns(
        begin=pl.when(pl.col("row") == 0).then(came).otherwise(0),
        before=pl.when(pl.col("row") == 0).then(0).otherwise(came),
    )
    causes = [*(name for name in names if name != "works"), "begin", "before"]
    by_rank = more.group_by("rank").agg(pl.col(*causes, "works").sum()).sort("rank")
    found = []
    for cause in causes:
        place, ns = int(by_rank[cause].arg_max() or 0), int(by_rank[cause].sum())
        part = by_rank[cause][place] / max(ns, 1)
        found.append(Reason(by_rank["rank"][place], cause, ns, int(by_rank["works"].sum()), part))
    return sorted((each for each in found if each.ns > 0), key=lambda each: (-each.ns, each.place, each.cause))


def diagnose_ranks(traces: Sequence[Trace]) -> tuple[Finding, ...]:
    """Compare each rank's trace of the same steps; see the rules late-rank and slow-transfer."""
    return across_ranks([rank_record(View(trace)) for trace in traces])


def across_ranks(records: Sequence[RankRecord], matched: pl.DataFrame | None = None) -> tuple[Finding, ...]:
    """Compare ranks by their records; the finding with the largest saving comes first.

    Args:
        matched: of `matched_collectives` of the records, if it is known.
    """
    records, matched = whole_exchanges(records, matched)
    if matched.is_empty():
        return ()
    waits = _waits(records, matched)
    late, apart = _late(waits), _apart(waits)  # of the same waits
    if late and apart and len(waits.slow) > 1 and late.saving_ns_per_step < _TELLS * apart.saving_ns_per_step:
        late = None
    most = _shared(waits) or late or apart
    slow = slow_groups(records, matched) or _slow(records, matched, waits.steps)
    findings = [each for each in (most, slow, bubbles(records, matched)) if each is not None]
    return tuple(sorted(findings, key=lambda finding: -finding.saving_ns_per_step))


def _waits_ns(matched: pl.DataFrame, ranks: int) -> list[int]:
    """Each rank's wait for later ones, per step."""
    waits = np.zeros(ranks, np.int64)
    taken = participants(matched)
    np.add.at(waits, taken["rank"].to_numpy(), _waits_of_parts(matched, taken))
    return [int(ns) for ns in waits // max(matched["step"].n_unique(), 1)]


def _counted_until() -> pl.Expr:
    """When the last rank came to an earlier exchange of the same group: waits until then count there."""
    last = pl.col("arrivals_ns").list.max()
    return last.cum_max().shift(1).over("group", pl.col("ranks").list.first(), "size").fill_null(pl.lit(-(2**62)))


def _waits_of_parts(matched: pl.DataFrame, taken: pl.DataFrame) -> Times:
    """What each participant waits for the last one, once where several exchanges of a group go on at the same time."""
    until = matched.select(_counted_until()).to_series().to_numpy()[taken["exchange"].to_numpy()]
    arrivals, waits = taken["arrival_ns"].to_numpy(), taken["wait_ns"].to_numpy()
    bare: Times = np.maximum(arrivals + waits - np.maximum(arrivals, until), 0)
    return bare


def _some_missing(records: Sequence[RankRecord]) -> bool:
    """Whether the job has more ranks than those with exchanges here, one of which may be the late one."""
    return missing_ranks(records) > 0


_ABOUT: Final = {
    "input-bound": "input",
    "slow-input-function": "input",
    "loader-contention": "input",
    "host-synchronisation": "synchronisation",
    "recompilation": "compilation",
    "exposed-copy": "host_to_device_copy",
    "allocator-retries": "allocation",
    "garbage-collection": "garbage_collection",
    "checkpoint-in-step": "checkpoint",
    "frequent-logging": "logging",
    "python-in-step": "python",
    "launch-bound": "dispatch",
}
"""Which cause of idle or host time a rule is about."""


def with_remedies(record: RankRecord, findings: Sequence[Finding]) -> RankRecord:
    """The record with what the rank's own findings tell to do about each cause, the first of several."""
    own = {_ABOUT[each.rule]: (each.remedy, each.where) for each in reversed(findings) if each.rule in _ABOUT}
    return replace(record, remedies=own)


def without_alone(diagnosis: Diagnosis) -> Diagnosis:
    """Drop what a rank's trace alone tells about late ranks, if all ranks have been compared."""
    kept = tuple(each for each in diagnosis.findings if each.rule != late_rank.RULE.id)
    return replace(diagnosis, findings=kept)


def without_answered(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Drop the question that a single rank's trace cannot answer if the traces of all ranks are present."""
    ranks = {diagnosis.metadata.rank for diagnosis in diagnoses} - {None}
    if len(ranks) < max((diagnosis.metadata.world_size or 2 for diagnosis in diagnoses), default=2):
        return list(diagnoses)
    return [without_asked_of_all(diagnosis) for diagnosis in diagnoses]


def without_asked_of_all(diagnosis: Diagnosis) -> Diagnosis:
    """Drop the question that the traces of all ranks answer."""
    asks = exposed_communication.RULE.id
    return replace(diagnosis, not_answered=tuple(each for each in diagnosis.not_answered if each.rule != asks))


@dataclass(frozen=True, slots=True)
class _Waits:
    """The waits in collectives, and where they begin; arrays have a value for each collective.

    Attributes:
        waits_ns: of all its ranks.
        gain_ns: the part that ends when the rank that comes last comes with the one before it.
        root: rank where the waiting begins.
        tells: whether that rank is held up for certain there, more than noise would do.
        slow: ranks that are held up in most steps, at least half as much as the slowest.
        slow_ns: how much the slowest of them is, in the mean step.
    """

    records: Sequence[RankRecord]
    matched: pl.DataFrame
    late: Lateness
    waits_ns: Times
    gain_ns: Times
    root: Times
    tells: npt.NDArray[np.bool_]
    slow: npt.NDArray[np.int64]
    slow_ns: int

    @property
    def steps(self) -> int:
        return max(self.matched["step"].n_unique(), 1)

    @property
    def step_ns(self) -> int:
        return max(record.step_ns for record in self.records)

    def why(self, chosen: npt.NDArray[np.bool_], ranks: npt.ArrayLike) -> list[Reason]:
        """Where most of these waits begin, and all that these ranks do."""
        every = np.flatnonzero(np.isin(self.late.parts["rank"].to_numpy(), ranks))
        roots, place = np.unique(self.late.root[chosen], return_inverse=True)
        gains = np.bincount(place, self.gain_ns[chosen], len(roots))
        order = np.argsort(-gains, kind="stable")
        earlier = np.cumsum(gains[order]) - gains[order]
        return reasons(self.records, self.late, np.union1d(every, roots[order[earlier <= _MOST * gains.sum()]]))


def _waits(records: Sequence[RankRecord], matched: pl.DataFrame) -> _Waits:
    late = lateness([record.collectives for record in records], matched)
    steps = max(matched["step"].n_unique(), 1)
    is_collective = matched["source"].is_null().to_numpy()
    sizes = matched["ranks"].list.len().cast(pl.Int64).to_numpy()
    taken = participants(matched)
    waits = np.bincount(taken["exchange"].to_numpy(), _waits_of_parts(matched, taken), matched.height).astype(np.int64)
    last = pl.col("arrivals_ns").list.max()
    later = last - pl.max_horizontal(last - pl.col("late_ns"), _counted_until())
    gain = matched.select(later.clip(0)).to_series().to_numpy() * (sizes - 1)
    waits, gain = np.where(is_collective, waits, 0), np.where(is_collective, gain, 0)
    step_ns = max(record.step_ns for record in records)
    least = _HELD * step_ns
    of_step = late.parts.filter(pl.col("peers") > 1).group_by("rank", "step").agg(
        pl.col("held_ns").sum(), noise=(pl.col("usual_ns").cast(pl.Float64) ** 2).sum()
    )  # fmt: skip
    of_rank = of_step.group_by("rank").agg(
        often=(pl.col("held_ns") > least).mean(),
        certain=pl.col("held_ns").sum() / (pl.col("noise").sum().sqrt() * late.noise + 1),
        mean=pl.col("held_ns").sum() / steps,
    )
    held = of_rank.filter((pl.col("certain") > _CERTAIN) & (pl.col("mean") > least))
    slow = held.filter(pl.col("often") > _OFTEN).filter(pl.col("mean") > _PART * pl.col("mean").max()).sort("rank")
    root = late.parts["rank"].to_numpy()[late.root]
    is_event = (late.deviations > _CERTAIN) & (late.parts["held_ns"] > least).to_numpy()
    tells = (np.isin(root, held["rank"]) | is_event[late.root]) & ~late.is_network
    slowest = int(slow["mean"].to_numpy().max(initial=0))
    return _Waits(records, matched, late, waits, gain, root, tells, slow["rank"].to_numpy(), slowest)


def _late(waits: _Waits) -> Finding | None:
    records, matched = waits.records, waits.matched
    by_rank = np.zeros(len(records), np.int64)
    np.add.at(by_rank, waits.root[waits.tells], waits.gain_ns[waits.tells])
    last, total = int(np.argmax(by_rank)), int(by_rank.sum())
    others = [record for place, record in enumerate(records) if place != last]
    exposed = max(record.exposed_ns for record in others)
    saved = min(int(by_rank[last]) // len(others) // waits.steps, exposed, waits.step_ns)
    limit, times = (late_rank.RULE.thresholds[name].value for name in ("share", "times"))
    if _some_missing(records) or saved <= 0 or saved / waits.step_ns < limit or by_rank[last] < times * total:
        return None
    slow, share = records[last], saved / waits.step_ns
    told = _told(records, waits.why(waits.tells & (waits.root == last), [last]), waits.steps, saved)
    return Finding(
        late_rank.RULE.id,
        f"the other ranks wait {saved / 1e6:,.1f} ms a step for {slow.name}{told.after_the_rank}",
        severity(share),
        saved,
        share,
        "how much later it reaches each collective than the rank before it, and holds up those that it exchanges with, "
        f"while the others do nothing but communicate{told.basis}",
        "low",
        Evidence(
            (
                Figure("share of the step that ranks wait for the last one", share, "share", limit),
                Figure("share of the waiting that this rank causes", by_rank[last] / max(total, 1), "share", times),
                Figure("time that ranks wait for the last one per step", saved, "ns"),
                Figure("collectives that were compared per step", matched.height / waits.steps, "count"),
                Figure("longest wait", int(matched["waiting_ns"].to_numpy().max()), "ns"),
                *told.figures,
            )
        ),
        told.remedy
        or Remedy(f"Find out what holds {slow.name} up: its data, its host or its device.", _diagnose(slow)),
        told.where,
    )


def _shared(waits: _Waits) -> Finding | None:
    """Ranks of one machine, or at the same place of each machine, that hold the others up."""
    records, slow = waits.records, waits.slow
    shared = shared_place(records, slow.tolist())
    if shared is None or _some_missing(records):
        return None
    chosen = waits.tells & np.isin(waits.root, slow)
    saved = int(waits.waits_ns[chosen].sum()) // (len(records) - len(slow)) // waits.steps
    saved = min(saved, max(record.exposed_ns for record in records), waits.step_ns)
    share, limit = saved / waits.step_ns, late_rank.RULE.thresholds["share"].value
    if share < limit:
        return None
    told = _told(records, waits.why(chosen, slow), waits.steps * len(slow), saved, "each one")
    return Finding(
        late_rank.RULE.id,
        f"the other ranks wait {saved / 1e6:,.1f} ms a step for {len(slow)} ranks of {shared}{told.after_all}",
        severity(share),
        saved,
        share,
        "what ranks wait in collectives for these ranks, and for those that these hold up, while they do nothing "
        f"but communicate{told.basis}",
        "low",
        Evidence(
            (
                Figure("share of the step that ranks wait for these", share, "share", limit),
                Figure("time that ranks wait for these per step", saved, "ns"),
                Figure("ranks that are held up in most steps", len(slow), "count"),
                *told.figures,
            )
        ),
        Remedy(
            "Compare the machines: the devices' clocks and temperatures, processors, disks and network cards; leave "
            f"{shared} out to see what the job gains.",
            _diagnose(records[int(slow[0])]),
        ),
        told.where,
    )


def _apart(waits: _Waits) -> Finding | None:
    """What ranks wait for each other where no single rank is the late one."""
    records, matched, steps = waits.records, waits.matched, waits.steps
    of_rank = _waits_ns(matched, len(records))
    exposed = sum(record.exposed_ns for record in records) // len(records)
    saved = min(sum(of_rank) // len(of_rank), exposed, waits.step_ns)
    limit = late_rank.RULE.thresholds["share"].value
    is_slow = waits.slow_ns >= limit * waits.step_ns
    known = max(int(waits.gain_ns[waits.tells].sum()) // len(records) // steps, waits.slow_ns)  # not what noise adds
    is_noise = known < limit * waits.step_ns or waits.waits_ns[waits.tells].sum() < _TELLS * waits.waits_ns.sum()
    if _some_missing(records) or is_noise or saved <= 0 or saved / waits.step_ns < limit:
        return None
    last, first = int(np.argmin(of_rank)), int(np.argmax(of_rank))
    share, (kind, of_kind) = saved / waits.step_ns, _most_waited_in(matched)
    told = _told(records, waits.why(waits.tells, waits.slow[: len(waits.slow) * is_slow]), steps, saved)
    return Finding(
        late_rank.RULE.id,
        f"on average ranks wait {saved / 1e6:,.1f} ms a step for later ranks, {of_kind:.0%} of it in {kind}: "
        f"{records[last].name} comes last, and {records[first].name} waits {of_rank[first] / 1e6:,.1f} ms"
        f"{told.after_all}",
        severity(share),
        saved,
        share,
        "mean wait of the ranks for the last one in each collective, while they do nothing but communicate: what a "
        f"step would save if the same work were spread evenly{told.basis}",
        "low",
        Evidence(
            (
                Figure("share of the step that ranks wait for later ones", share, "share", limit),
                Figure("mean wait per step", saved, "ns"),
                Figure(f"share of the waiting in {kind}", of_kind, "share"),
                Figure("longest wait of a rank per step", of_rank[first], "ns"),
                Figure("wait of the last rank per step", of_rank[last], "ns"),
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
    basis: str = ""


def _told(records: Sequence[RankRecord], why: Sequence[Reason], steps: int, saved: int, name: str = "") -> _Told:
    """The largest of the reasons, if it is a good part of what would be saved.

    Args:
        name: of those whose reasons they are; by default the rank that did most of it, with its part, if it is a good
            part of all.
    """
    if not why or why[0].ns // steps < _TELLING * saved:
        return _Told()
    reason = why[0]
    record, ns = records[reason.place], reason.ns // steps
    if not name and reason.part >= _TELLING:
        ns = int(ns * reason.part)
        name = record.name
    longer, name = f"{ns / 1e6:,.1f} ms", name or "one rank or another"
    if reason.cause in _LATER:
        words, remedy = _LATER[reason.cause]
        figure = Figure(f"how much later {name} {words}, per step", ns, "ns")
        text = f"{words} {longer} later than the others"
        basis = f"; {min(ns, saved) / 1e6:,.1f} ms of it may be only the later start of the recording"
        return _Told(
            f", which {text}",
            f"; {name} {text}",
            (figure,),
            Remedy(remedy.format(name=name), _diagnose(record)),
            basis=basis if reason.cause == "begin" else "",
        )
    if reason.cause == BUSY:
        much, more, remedy = _of_device(records, reason, ns, name)
        figures = (Figure(f"how much longer the device of {name} works, per step", ns, "ns"), *more)
        text = f"device works {longer} longer{much}"
        return _Told(f", whose {text}", f"; {name}'s {text}", figures, Remedy(remedy, _diagnose(record)))
    figure = Figure(f"how much longer {name} took for this, per step", ns, "ns")
    text = f"{CAUSES.get(reason.cause, 'the host computed')} {longer} longer"
    remedy_of_rank, where = record.remedies.get(reason.cause, (None, record.places.get(reason.cause, ())))
    return _Told(f", where {text}", f"; on {name} {text}", (figure,), remedy_of_rank, where)


def _of_device(
    records: Sequence[RankRecord], reason: Reason, ns: int, name: str
) -> tuple[str, tuple[Figure, ...], str]:
    """How a device comes to work `ns` longer per step, in words and figures, and what to do about it."""
    steps = max(reason.ns // max(ns, 1), 1)
    works = reason.works / steps
    even = f"Give {name} no more work than the others: its batch, its sequences, its shards of tables or experts."
    times, explained = same_kernels(records, reason.place)
    if times >= _SLOWER and explained // records[reason.place].steps >= _PART * ns:
        return (
            f": the same kernels take {times:.2f} times as long",
            (Figure("time of the same kernels, over that of the other ranks", times),),
            "The device is slower, not its work larger: compare its clock, its temperature and power limit with those "
            "of the others (nvidia-smi -q -d CLOCK,PERFORMANCE), and what else runs on it.",
        )
    sent = exchanged_bytes(records, reason.place)
    if sent >= _UNEVEN:
        return (
            f", and it exchanges {sent:.1f} times the bytes of the others in all-to-all",
            (Figure("bytes in all-to-all, over the mean of the other ranks", sent),),
            f"Spread tables or experts evenly over the ranks: {name} has more of the load. Balance the router's loss, "
            "limit each expert's capacity, or shard tables by their lookups and columns.",
        )
    more = Figure(f"pieces of work that {name} has more, per step", max(works, 0), "count")
    much = f", on {works:,.0f} more pieces of work" if works >= 1 else ", on larger pieces of work"
    return much, (more,), f"{even} If it has the same, compare the devices' clocks and temperatures."


_LATER: Final = {
    "begin": (
        "began the recorded steps",
        "The profiler started later on {name}, and these waits may come from that alone. Record several steps: waits "
        "that stay are the job's.",
    ),
    "before": (
        "left the exchange before",
        "Look into the exchanges that only some of the ranks take part in, which hold {name} up.",
    ),
}
"""What a rank did later than the others, and what to do about it."""


def _slow(records: Sequence[RankRecord], matched: pl.DataFrame, steps: int) -> Finding | None:
    rate, fewest, limit = (slow_transfer.RULE.thresholds[name].value for name in ("bytes_per_second", "bytes", "share"))
    matched = matched.filter(~open_exchanges(records, matched))
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
