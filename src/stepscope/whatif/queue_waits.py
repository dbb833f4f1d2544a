"""Where a device's queues waited for one another."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.trace import Trace
from stepscope.trace.nesting import Rows
from stepscope.whatif.graph import Durations, Edges, Works

UNSEEN_NS: Final = 20_000
"""Work that is later than this has waited for something; what ended so short a time before may be it."""


def queue_waits(trace: Trace, works: Works) -> Edges:
    """Work -> work of another queue of the same device that waits for it; delays are still unknown.

    Devices that record their waits tell them. Else a host call that makes one queue wait for another is taken to
    mean the work that its thread launches next, which waits for what was launched last in each other queue.
    """
    if not len(works.start):
        return Edges.none()
    recorded = _recorded(trace)
    calls = trace.launches.with_row_index("launch").filter(pl.col("kind") == "queue_wait")
    told = trace.synchronisations.filter(pl.col("kind") == "queue_wait")["correlation"].drop_nulls()
    untold = calls.filter(~pl.col("correlation").is_in(told.implode()).fill_null(False))
    inferred = _inferred(trace, works, untold)
    source, target = np.concatenate([recorded[0], inferred[0]]), np.concatenate([recorded[1], inferred[1]])
    if not len(source):
        return Edges.none()
    pairs = np.unique(np.column_stack([source, target]), axis=0)
    nothing = np.zeros(len(pairs), np.int64)
    return Edges(pairs[:, 0], pairs[:, 1], nothing, nothing)


def with_unseen_waits(trace: Trace, works: Works, waits: Edges, unexplained_ns: Durations) -> Edges:
    """The waits, and with them those that only the times show.

    Work that began late for no known reason, right after work of another queue of its device that was launched before
    it, has waited for that.
    """
    end = works.start + works.duration
    device = trace.device_work["device"].rank("dense").to_numpy().astype(np.int64)
    late = np.flatnonzero((unexplained_ns > UNSEEN_NS) & (works.stretch >= 0))
    sources, targets = [waits.source], [waits.target]
    for number in np.unique(device[late]).tolist():
        its = np.flatnonzero(device == number)
        its = its[np.argsort(end[its], kind="stable")]
        mine = late[device[late] == number]
        position = np.searchsorted(end[its], works.start[mine], side="right") - 1
        source = its[np.maximum(position, 0)]
        fits = (position >= 0) & (works.start[mine] - end[source] <= UNSEEN_NS) & (source != mine)
        fits &= (works.queue[source] != works.queue[mine]) & (works.launched[source] <= works.launched[mine])
        sources.append(source[fits])
        targets.append(mine[fits])
    source, target = np.concatenate(sources), np.concatenate(targets)
    nothing = np.zeros(len(source), np.int64)
    return Edges(source, target, nothing, nothing)


def _recorded(trace: Trace) -> tuple[Rows, Rows]:
    """From the device's own record: the last work before the event was recorded, and the first after the wait."""
    waits = trace.synchronisations.filter(
        (pl.col("kind") == "queue_wait")
        & pl.col("waited_queue").is_not_null()
        & pl.col("waited_correlation").is_not_null()
    )
    calls = trace.launches.filter(pl.col("correlation").is_not_null()).unique("correlation", keep="first")
    at = calls.select("correlation", call="start_ns")
    waits = waits.select("device", "queue", "waited_queue", "correlation", "waited_correlation").join(
        at, on="correlation", how="inner"
    )
    waits = waits.join(
        at.rename({"correlation": "waited_correlation", "call": "event"}), on="waited_correlation", how="inner"
    )
    launched = (
        trace.device_work.with_row_index("work")
        .join(trace.launches.with_row_index("launch").select("launch", time="start_ns"), on="launch", how="inner")
        .select("work", "device", "queue", "time")
        .sort("time", "work")
    )
    if waits.is_empty() or launched.is_empty():
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    before = waits.sort("event").join_asof(
        launched.rename({"queue": "waited_queue", "work": "source"}),
        left_on="event",
        right_on="time",
        by=["device", "waited_queue"],
        strategy="backward",
        check_sortedness=False,
    )
    both = before.sort("call").join_asof(
        launched.rename({"work": "target"}),
        left_on="call",
        right_on="time",
        by=["device", "queue"],
        strategy="forward",
        check_sortedness=False,
        suffix="_after",
    )
    both = both.filter(pl.col("source").is_not_null() & pl.col("target").is_not_null())
    return both["source"].to_numpy().astype(np.int64), both["target"].to_numpy().astype(np.int64)


def _inferred(trace: Trace, works: Works, calls: pl.DataFrame) -> tuple[Rows, Rows]:
    """For each call the work its thread launched next, and what was launched last before in each other queue."""
    nothing = np.zeros(0, np.int64)
    lanes = trace.launches["lane"].gather(trace.device_work["launch"])
    lane = lanes.cast(pl.Int64).fill_null(-1).to_numpy()
    device = trace.device_work["device"].rank("dense").to_numpy().astype(np.int64)
    known = np.flatnonzero(works.stretch >= 0)
    if calls.is_empty() or not len(known):
        return nothing, nothing
    order = known[np.argsort(works.launched[known], kind="stable")]
    call_lane, call_time = calls["lane"].cast(pl.Int64).to_numpy(), calls["start_ns"].to_numpy()
    target = np.full(len(call_time), -1, np.int64)
    for number in np.unique(call_lane).tolist():
        mine = order[lane[order] == number]
        its = np.flatnonzero(call_lane == number)
        position = np.searchsorted(works.launched[mine], call_time[its], side="left")
        inside = position < len(mine)
        target[its[inside]] = mine[position[inside]]
    has = target >= 0
    target, call_time = target[has], call_time[has]
    sources, targets = [nothing], [nothing]
    for queue in np.unique(works.queue).tolist():
        its = order[works.queue[order] == queue]
        if not len(its):
            continue
        position = np.searchsorted(works.launched[its], call_time, side="left") - 1
        fits = (position >= 0) & (works.queue[target] != queue)
        source = its[np.maximum(position, 0)]
        fits &= device[source] == device[target]
        sources.append(source[fits])
        targets.append(target[fits])
    return np.concatenate(sources), np.concatenate(targets)
