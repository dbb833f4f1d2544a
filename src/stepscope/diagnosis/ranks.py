"""Findings from several ranks' traces together: which rank the others wait for, and how fast data moves between
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import bus_bytes, matched_collectives
from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.diagnosis import EXPLAINED, Diagnosis
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Remedy
from stepscope.diagnosis.rank_summary import RankRecord, rank_record
from stepscope.diagnosis.rule import severity
from stepscope.diagnosis.rules import exposed_communication, late_rank, slow_transfer
from stepscope.diagnosis.view import View
from stepscope.trace import Trace

_TELLING: Final = 0.25
"""Share of the waiting that a cause must explain to be reported."""


def diagnose_ranks(traces: Sequence[Trace]) -> tuple[Finding, ...]:
    """Compare each rank's trace of the same steps; see the rules late-rank and slow-transfer."""
    return across_ranks([rank_record(View(trace)) for trace in traces])


def across_ranks(records: Sequence[RankRecord]) -> tuple[Finding, ...]:
    """Compare ranks by their records; the finding with the largest saving comes first."""
    if len(records) < 2:
        return ()
    matched = matched_collectives([record.collectives for record in records])
    if matched.is_empty():
        return ()
    steps = max(matched["step"].n_unique(), 1)
    apart = [finding for finding in (_late(records, matched, steps), _apart(records, matched, steps)) if finding]
    most = max(apart, key=lambda finding: finding.saving_ns_per_step, default=None)  # both describe the same waits
    findings = [finding for finding in (most, _slow(records, matched, steps)) if finding is not None]
    return tuple(sorted(findings, key=lambda finding: -finding.saving_ns_per_step))


def without_waits(diagnoses: Sequence[Diagnosis], records: Sequence[RankRecord | None]) -> list[Diagnosis]:
    """Drop a rank's findings about communication if most of their saving is waiting for later ranks.

    Args:
        records: one per diagnosed rank, None where it is missing.
    """
    known = [record for record in records if record is not None]
    matched = matched_collectives([record.collectives for record in known])
    if matched.is_empty() or _some_missing(known):
        return list(diagnoses)
    waits = dict(zip((record.name for record in known), _waits_ns(matched), strict=True))
    asks = exposed_communication.RULE.id

    def stays(finding: Finding, record: RankRecord | None) -> bool:
        waited = 0 if record is None else waits[record.name]
        return finding.rule != asks or waited < EXPLAINED * finding.saving_ns_per_step

    def without(diagnosis: Diagnosis, record: RankRecord | None) -> Diagnosis:
        findings = tuple(each for each in diagnosis.findings if stays(each, record))
        dropped = len(findings) < len(diagnosis.findings)  # with them goes what all findings save together
        return replace(diagnosis, findings=findings, together=None if dropped else diagnosis.together)

    return [without(diagnosis, record) for diagnosis, record in zip(diagnoses, records, strict=True)]


def _waits_ns(matched: pl.DataFrame) -> list[int]:
    """Each rank's wait for later ones, per step."""
    waits = matched["waits_ns"].list.to_array(matched["waits_ns"].list.len()[0]).to_numpy()
    return [int(ns) for ns in waits.sum(axis=0) // max(matched["step"].n_unique(), 1)]


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


def _late(records: Sequence[RankRecord], matched: pl.DataFrame, steps: int) -> Finding | None:
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
    slow = records[last]
    cause, more = _own_cause(slow, others)
    cause = cause if more >= _TELLING * saved else ""
    why = f", where {CAUSES.get(cause, 'the host computed')} {more / 1e6:,.1f} ms longer" if cause else ""
    share = saved / step_ns
    return Finding(
        late_rank.RULE.id,
        f"the other ranks wait {saved / 1e6:,.1f} ms a step for {slow.name}{why}",
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
            )
        ),
        Remedy(
            f"Find out what holds {slow.name} up: its data, its host or its device.",
            f"stepscope diagnose TRACE_OF_{slow.name.upper().replace(' ', '_')}",
        ),
        slow.places.get(cause, ()) if cause else (),
    )


def _apart(records: Sequence[RankRecord], matched: pl.DataFrame, steps: int) -> Finding | None:
    """What ranks wait for each other where no single rank is the late one."""
    waits = _waits_ns(matched)
    step_ns = max(record.step_ns for record in records)
    exposed = sum(record.exposed_ns for record in records) // len(records)
    saved = min(sum(waits) // len(waits), exposed, step_ns)
    limit = late_rank.RULE.thresholds["share"].value
    if _some_missing(records) or saved <= 0 or saved / step_ns < limit:
        return None
    last, first = int(np.argmin(waits)), int(np.argmax(waits))
    share = saved / step_ns
    return Finding(
        late_rank.RULE.id,
        f"ranks wait {saved / 1e6:,.1f} ms a step for later ones in the mean: {records[last].name} comes last, and "
        f"{records[first].name} waits {waits[first] / 1e6:,.1f} ms",
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
                Figure("longest wait of a rank per step", waits[first], "ns"),
                Figure("wait of the last rank per step", waits[last], "ns"),
                Figure("collectives that were compared per step", matched.height / steps, "count"),
            )
        ),
        Remedy(
            f"Spread the work evenly over the ranks, and look into what holds {records[last].name} up.",
            f"stepscope diagnose TRACE_OF_{records[last].name.upper().replace(' ', '_')}",
        ),
    )


def _own_cause(slow: RankRecord, others: Sequence[RankRecord]) -> tuple[str, int]:
    """The cause with the largest extra time over the others' mean, and that time; "" and 0 if there is none."""
    more = {
        cause: ns - sum(other.causes.get(cause, 0) for other in others) // len(others)
        for cause, ns in slow.causes.items()
        if cause not in ("communication", "dependency")
    }
    cause = max(more, key=lambda name: more[name], default="")
    return (cause, more[cause]) if cause and more[cause] > 0 else ("", 0)


def _slow(records: Sequence[RankRecord], matched: pl.DataFrame, steps: int) -> Finding | None:
    rate, fewest, limit = (slow_transfer.RULE.thresholds[name].value for name in ("bytes_per_second", "bytes", "share"))
    large = matched.filter((pl.col("bytes") >= fewest) & (pl.col("kind") != "send_receive"))
    if large.is_empty() or not all(record.on_device for record in records):
        return None  # a host's network has no known expected rate
    ranks = max(record.ranks for record in records)
    carried = sum(bus_bytes(kind, size, ranks) for kind, size in large.select("kind", "bytes").iter_rows())
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
