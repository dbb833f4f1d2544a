"""Waits of host threads for devices and for one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import TABLES, HostActivity
from stepscope.trace import Trace, Window
from stepscope.trace.model import XLA_FORMATS
from stepscope.trace.naming import HOST_BACKEND
from stepscope.trace.nesting import Rows, at, row_numbers
from stepscope.trace.window import Times
from stepscope.whatif.graph import Durations, Stretches, Works, concatenated, nothing, previous_in, selected

RETURN_NS: Final = 5_000
"""Longest time from the end of device work to the return of a call that had nothing else to wait for."""
FULL_QUEUE: Final = 256
"""Fewest launches ahead of the device for a long launch call to count as waiting for queue space."""
LONG_LAUNCH: Final = 20
"""Least duration, in medians of its name, for a launch call to count as waiting for queue space."""
LONG_LAUNCH_NS: Final = 100_000
_MOST: Final = 0.6
_NEARLY_ALL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Waits:
    """Calls in which a thread waited for a device; arrays of shape (n,), sorted by lane and start."""

    launch: Rows  # row in `launches`
    lane: npt.NDArray[np.int32]  # of the call
    start: Times  # of the call
    end: Times  # of the call
    own_ns: Times  # duration without waiting
    work: Rows  # row in `device_work` that it waited for


@dataclass(frozen=True, slots=True)
class Handovers:
    """Bursts of work handed over by another thread; arrays of shape (n,)."""

    lane: npt.NDArray[np.int32]  # thread that works
    start: Times  # of the burst
    end: Times  # of the burst
    giver: npt.NDArray[np.int32]  # thread that handed the work over, -1 if unknown
    given: Times  # last time before the burst at which that thread was active
    resumed: Times  # when the giver continued after waiting for the burst; -1 if it did not wait


def device_waits(trace: Trace) -> Waits:
    """Calls in which threads waited for a device, with the work that they waited for.

    A process waits for its own work only, not for device work of another process in the same file.
    """
    processes = trace.lanes.select("lane", pl.col("process").fill_null(""))
    calls = _calls(trace).join(processes, on="lane", how="left", maintain_order="left")
    launches = trace.launches.with_row_index("launch").join(processes, on="lane", how="left", maintain_order="left")
    work = (
        trace.device_work.select("launch", end=pl.col("start_ns") + pl.col("duration_ns"), begin="start_ns")
        .with_row_index("work")
        .join(launches.select("launch", "process", launched="start_ns"), on="launch", how="left", maintain_order="left")
    )
    found = []
    for (process,), mine in calls.group_by("process", maintain_order=True):
        own = work.filter((pl.col("process") == process) | pl.col("process").is_null())
        if own.height:
            found.append(_waits_of(mine, work, own))
    waits = concatenated(nothing(Waits), *found, operator_waits(trace))
    waits = selected(waits, np.lexsort((waits.start, waits.lane)))
    return selected(waits, np.flatnonzero(_disjoint(waits.lane, waits.start, waits.end)))


def operator_waits(trace: Trace) -> Waits:
    """Waits inside operators, which some programs make without a recorded call: sorted by lane and start.

    Such an operator goes on long after its last launch, with nothing recorded in it, until that launch's work has
    ended, which is most of the operator's time. None counts unless nearly all of the device's time is so waited for.
    """
    return trace.kept("operator waits", lambda: _operator_waits(trace))


def _operator_waits(trace: Trace) -> Waits:
    ends = pl.col("start_ns") + pl.col("duration_ns")
    operators = trace.operators.select("lane", begin="start_ns", end=ends).with_row_index("operator")
    inner = trace.operators.group_by(operator="parent").agg(inner=pl.col("start_ns").max())
    work = trace.device_work.select("launch", "duration_ns", done=ends).with_row_index("work")
    work = work.filter(pl.col("launch").is_not_null())
    total_ns = int(work["duration_ns"].sum())
    work = work.sort("done", "work").unique("launch", keep="last")
    calls = trace.launches.select("operator", "kind", launched=ends).with_row_index("launch")
    calls = calls.filter(pl.col("operator").is_not_null()).sort("launched", "launch")
    calls = calls.unique("operator", keep="last").join(work, on="launch", how="inner")
    found = calls.join(operators, on="operator", how="inner").join(inner, on="operator", how="left")
    tail = pl.col("end") - pl.col("launched")
    found = found.filter(
        pl.col("kind") == "launch",
        tail >= LONG_LAUNCH_NS,
        pl.col("done") <= pl.col("end"),
        pl.col("done") - pl.col("launched") >= _MOST * tail,
        tail >= _MOST * (pl.col("end") - pl.col("begin")),
        pl.col("inner").fill_null(0) <= pl.col("launched"),
    ).sort("lane", "launched")
    if int(found["duration_ns"].sum()) < _NEARLY_ALL * total_ns:
        found = found.clear()
    launch, lane, start, end, done, row = (
        found[name].to_numpy() for name in ("launch", "lane", "launched", "end", "done", "work")
    )
    return Waits(launch.astype(np.int64), lane, start, end, end - done, row.astype(np.int64))


def _waits_of(calls: pl.DataFrame, work: pl.DataFrame, launched: pl.DataFrame) -> Waits:
    """Waits of one process; `launched` is the work launched by it or by an unknown process."""
    start, end = calls["start_ns"].to_numpy(), calls["end"].to_numpy()
    by_end = _ended_within(launched, start, end)
    own_copy = row_numbers(calls["copied"])
    kind = calls["kind"].to_numpy()
    staged = _staged(own_copy, work, start, end) & (kind == "copy")
    waiting = np.where((kind == "copy") & ~staged, _if_within(own_copy, work, start, end), by_end)
    crowded = _ahead(launched, start) >= FULL_QUEUE
    long = (calls["duration_ns"] > LONG_LAUNCH * calls["median_ns"]).to_numpy() & (end - start > LONG_LAUNCH_NS)
    is_launch = (kind == "launch") | (kind == "graph_launch") | (kind == "set")
    waiting = np.where(is_launch & ~(crowded & long), -1, waiting)
    silent = (kind == "synchronise") & (waiting < 0) & ~calls["is_event"].to_numpy()
    before = _launched_before(launched, start, end)
    found = np.where(silent, before, waiting)
    own = _own(calls, waiting >= 0)
    # Beyond its wait, a pageable copy takes host time for the copying itself.
    since = work["end"].to_numpy()[np.maximum(waiting, 0)]
    own = np.where(staged & (waiting >= 0), end - np.maximum(since, start), own)
    keep = np.flatnonzero(found >= 0)
    keep = keep[_disjoint(calls["lane"].to_numpy()[keep], start[keep], end[keep])]
    launch = calls["launch"].to_numpy().astype(np.int64)
    return selected(Waits(launch, calls["lane"].to_numpy(), start, end, own, found), keep)


def _calls(trace: Trace) -> pl.DataFrame:
    """Calls that can wait, with the copy that each launched, sorted by lane and start."""
    threads = trace.lanes.filter(pl.col("kind") == "host_thread")["lane"].implode()
    copies = (
        trace.device_work.select("launch", "kind")
        .with_row_index("copied")
        .filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
        .unique("launch", keep="last")
        .select("launch", "copied")
    )
    frees = (pl.col("kind") == "allocate") & pl.col("name").str.contains("Free")
    waiting = pl.col("kind").is_in(["synchronise", "copy", "launch", "graph_launch", "set"]) | frees
    rows = (
        trace.launches.with_row_index("launch")
        .filter(pl.col("lane").is_in(threads) & waiting)
        .with_columns(
            end=pl.col("start_ns") + pl.col("duration_ns"),
            median_ns=pl.col("duration_ns").median().over("name"),
            is_event=pl.col("name").str.contains("Event"),
        )
    )
    return rows.join(copies, on="launch", how="left", maintain_order="left").sort("lane", "start_ns")


def _ended_within(work: pl.DataFrame, start: Times, end: Times) -> Rows:
    """Last work to end during the call, launched before it; else -1."""
    ordered = work.sort("end")
    ends, rows = ordered["end"].to_numpy(), ordered["work"].to_numpy().astype(np.int64)
    launched = ordered["launched"].fill_null(np.iinfo(np.int64).min).to_numpy()
    position = np.searchsorted(ends, end, side="right") - 1
    index = np.maximum(position, 0)
    fits = (position >= 0) & (ends[index] >= start) & (launched[index] <= start)
    return np.where(fits, rows[index], -1)


def _if_within(own: Rows, work: pl.DataFrame, start: Times, end: Times) -> Rows:
    """The call's own copy, if it ended before the call did; else -1."""
    ends = work["end"].to_numpy()[np.maximum(own, 0)]
    return np.where((own >= 0) & (ends <= end) & (ends >= start), own, -1)


def _staged(own: Rows, work: pl.DataFrame, start: Times, end: Times) -> npt.NDArray[np.bool_]:
    """Whether the call copied from pageable memory: its copy began during the call, and ended shortly after it.

    Such a call first waits for earlier launches, and then passes the data to the device in parts.
    """
    begin, ends = work["begin"].to_numpy()[np.maximum(own, 0)], work["end"].to_numpy()[np.maximum(own, 0)]
    return (own >= 0) & (begin > start) & (begin < end) & (ends > end) & (end - start > LONG_LAUNCH_NS)


def _launched_before(work: pl.DataFrame, start: Times, end: Times) -> Rows:
    """Last work launched before the call, if it had ended when the call returned; else -1."""
    ordered = work.filter(pl.col("launched").is_not_null()).sort("launched", "end")
    if ordered.is_empty():
        return np.full(len(start), -1, np.int64)
    launched, rows = ordered["launched"].to_numpy(), ordered["work"].to_numpy().astype(np.int64)
    position = np.searchsorted(launched, start, side="left") - 1
    index = np.maximum(position, 0)
    fits = (position >= 0) & (ordered["end"].to_numpy()[index] <= end)
    return np.where(fits, rows[index], -1)


def _ahead(work: pl.DataFrame, moments: Times) -> Rows:
    """Number of launched but unfinished works at each time."""
    known = work.filter(pl.col("launched").is_not_null())
    given = np.searchsorted(np.sort(known["launched"].to_numpy()), moments, side="left")
    done = np.searchsorted(np.sort(known["end"].to_numpy()), moments, side="right")
    return given - done


def _own(calls: pl.DataFrame, waited: npt.NDArray[np.bool_]) -> Times:
    """Duration of each call without waiting: that of calls of its name that did not wait."""
    free = calls.filter(~pl.Series(waited)).group_by("name").agg(own=pl.col("duration_ns").median().cast(pl.Int64))
    own = calls.select("name", "duration_ns").join(free, on="name", how="left", maintain_order="left")
    typical = own["own"].fill_null(RETURN_NS).to_numpy()
    duration = own["duration_ns"].to_numpy()
    return np.where(waited, np.minimum(typical, duration), duration)


def _disjoint(lane: npt.NDArray[np.int32], start: Times, end: Times) -> npt.NDArray[np.bool_]:
    """Whether each interval, sorted by lane and start, begins after all earlier ones on its lane have ended."""
    keep = np.ones(len(start), np.bool_)
    last_lane, last_end = -1, 0
    for index, (its_lane, begin, finish) in enumerate(zip(lane.tolist(), start.tolist(), end.tolist(), strict=True)):
        if its_lane == last_lane and begin < last_end:
            keep[index] = False
        else:
            last_lane, last_end = its_lane, finish
    return keep


def is_host_collective(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether each row of `annotations` is a collective of a host backend."""
    named = trace.annotations["name"].str.contains(HOST_BACKEND) & (trace.annotations["kind"] == "host")
    marks: npt.NDArray[np.bool_] = named.fill_null(False).to_numpy()
    return marks


def handovers(trace: Trace, activity: HostActivity) -> Handovers:
    """Bursts of every thread other than its process's main thread, without collectives.

    A burst is a thread's activity while its main thread starts nothing new. The main thread has waited for it when the
    burst fills most of the time for which the main thread was silent.
    """
    processes = dict(trace.lanes.select("lane", "process").iter_rows())
    parts, apart = [], is_host_collective(trace)
    for lane in activity.timelines:
        main = activity.main_lanes.get(processes.get(lane), lane)  # type: ignore[arg-type]
        if main != lane:
            parts.append(_bursts(activity, lane, main, apart))
    return concatenated(nothing(Handovers), *parts)


def _bursts(activity: HostActivity, lane: int, main: int, apart: npt.NDArray[np.bool_]) -> Handovers:
    """Bursts of one thread; annotations marked in `apart` are not the thread's work."""
    mine = np.flatnonzero((activity.lane == lane) & (activity.parent < 0))
    is_annotation = activity.table[mine] == TABLES.index("annotations")
    mine = mine[~(is_annotation & np.append(apart, False)[np.where(is_annotation, activity.row[mine], -1)])]
    mine = mine[np.argsort(activity.start[mine], kind="stable")]
    start, end = activity.start[mine], activity.end[mine]
    timeline = activity.timelines.get(main)
    times = timeline.times[1:] if timeline is not None else np.zeros(0, np.int64)
    silence = np.searchsorted(times, start, side="right")
    first = np.flatnonzero(np.diff(silence, prepend=-1) != 0)
    last_end = np.maximum.reduceat(end, first) if len(first) else end[:0]
    begin, number = start[first], silence[first]
    known = number > 0
    padded = np.concatenate([times, [np.iinfo(np.int64).max]]) if len(times) else np.array([0, 0])
    given = np.where(known, padded[np.maximum(number - 1, 0)], begin)
    following = padded[np.minimum(number, len(padded) - 1)]
    waited = known & (last_end <= following) & (last_end - begin >= 0.5 * (following.astype(np.float64) - given))
    lanes = np.full(len(begin), lane, np.int32)
    giver, resumed = np.where(known, main, -1).astype(np.int32), np.where(waited, following, -1)
    # Bursts that outlast their silence, and others that begin meanwhile in the same thread, stay separate.
    return Handovers(lanes, begin, last_end, giver, given, resumed)


SOON_NS: Final = 100_000
"""Longest time after a collective's end in which a continuing thread counts as having waited for it,"""
SOON_SHARE: Final = 0.1
"""or the share of its silence during the collective that counts as such."""
LEAST_WAIT_NS: Final = 20_000


@dataclass(frozen=True, slots=True)
class HostCollectives:
    """Collectives on threads of their own; arrays of shape (n,), in order of time."""

    row: Rows  # in `annotations`
    lane: Rows  # thread that runs it
    start: Times  # nanoseconds
    end: Times  # nanoseconds
    giver: Rows  # main thread of its process
    given: Times  # last time before the start at which the main thread was active
    paused: Times  # begin (paused) and end (resumed) of the main thread's wait; -1 if it did not wait
    resumed: Times  # begin (paused) and end (resumed) of the main thread's wait; -1 if it did not wait

    def waits(self, first: int) -> Waits:
        """Waits of the main threads for works numbered from `first` on; the last work in each pause counts."""
        order = np.lexsort((-self.end, self.resumed))
        order = order[self.resumed[order] >= 0]
        chosen = order[np.unique(self.resumed[order], return_index=True)[1]]
        paused, resumed = self.paused[chosen], self.resumed[chosen]
        running = self.end[chosen] - np.maximum(self.start[chosen], paused)
        own = np.maximum(resumed - paused - running, 0)
        none = np.full(len(chosen), -1, np.int64)
        return Waits(none, self.giver[chosen].astype(np.int32), paused, resumed, own, first + chosen)

    def works(self, stretches: Stretches, first: int, queues: int) -> Works:
        """One work per collective, numbered from `first` on, in one queue per thread after the devices' queues."""
        stretch = stretches.at(self.giver.astype(np.int32), self.given)
        previous = previous_in(self.lane, self.start, np.arange(len(self.start)))
        queue = queues + np.unique(self.lane, return_inverse=True)[1].astype(np.int64)
        before = np.where(previous >= 0, self.end[previous], np.iinfo(np.int64).min)
        held = before > self.given  # by the previous collective
        latency: Durations = np.where(held, 0, self.start - self.given)
        gap: Durations = np.where(held, self.start - np.where(held, before, 0), 0)
        known = stretch >= 0
        return Works(
            self.start,
            self.end - self.start,
            queue,
            stretch,
            np.where(known, self.given, np.iinfo(np.int64).min),
            np.where(known, latency, 0),
            np.where(previous >= 0, previous + first, -1),
            gap,
        )


def host_collectives(trace: Trace, activity: HostActivity) -> HostCollectives:
    """Every collective run by a thread other than its process's main thread."""
    processes = dict(trace.lanes.select("lane", "process").iter_rows())
    mains = {lane: activity.main_lanes.get(process, lane) for lane, process in processes.items()}
    rows = trace.annotations.with_row_index("row").filter(pl.Series(is_host_collective(trace), dtype=pl.Boolean))
    rows = rows.with_columns(main=pl.col("lane").replace_strict(mains, default=-1, return_dtype=pl.Int64))
    rows = rows.filter((pl.col("main") >= 0) & (pl.col("main") != pl.col("lane"))).sort("start_ns", "row")
    start, main = rows["start_ns"].to_numpy(), rows["main"].to_numpy()
    end = start + rows["duration_ns"].to_numpy()
    given, paused, resumed = start.copy(), np.full(len(start), -1, np.int64), np.full(len(start), -1, np.int64)
    for lane in np.unique(main).tolist():
        mine = np.flatnonzero(main == lane)
        timeline = activity.timelines.get(lane)
        if timeline is None or len(timeline.times) < 2:
            continue
        times = timeline.times[1:]
        begun = np.searchsorted(times, start[mine], side="right")
        given[mine] = np.where(begun > 0, times[np.maximum(begun - 1, 0)], start[mine])
        following = np.searchsorted(times, end[mine], side="left")
        inside = (following > 0) & (following < len(times))
        silent, again = times[np.maximum(following - 1, 0)], times[np.minimum(following, len(times) - 1)]
        running = end[mine] - np.maximum(silent, start[mine])
        soon = again - end[mine] <= np.maximum(SOON_NS, SOON_SHARE * running)
        waited = inside & soon & (running >= LEAST_WAIT_NS)
        paused[mine], resumed[mine] = np.where(waited, silent, -1), np.where(waited, again, -1)
    lanes = rows["lane"].cast(pl.Int64).to_numpy()
    return HostCollectives(rows["row"].to_numpy().astype(np.int64), lanes, start, end, main, given, paused, resumed)


SHORTEST_NS: Final = 1_000_000
"""Shorter calls count as the host's own work."""
_BUSY: Final = 0.99
"""Least share of a call in which the device works for the call to count as waiting for it."""


def silent_wait_ns(trace: Trace, activity: HostActivity, lane: int, device: str | None, span: Window) -> int:
    """Time in the span for which a thread waited for the device without an explicit wait call, nanoseconds.

    It includes slices whose name means waiting but that are not launches, and pieces of SHORTEST_NS or more inside an
    operator during which the device works throughout.
    """
    if trace.metadata.format not in XLA_FORMATS or device is None or not len(activity.table):
        return 0
    pieces = activity.cut(lane, np.array([span.start_ns]), np.array([span.end_ns]))
    table = at(activity.table, pieces["slice"].to_numpy())
    start, end = pieces["start"].to_numpy(), pieces["end"].to_numpy()
    length = end - start
    waits = (pieces["cause"] == "synchronisation").to_numpy() & (table != TABLES.index("launches"))
    long = (table == TABLES.index("operators")) & (length >= SHORTEST_NS) & ~waits
    busy = busy_intervals(trace.device_work.filter(pl.col("device") == device), span)
    covered = busy.overlap_of(start[long], end[long])
    inside = int(length[long][covered >= _BUSY * length[long]].sum())
    return int(length[waits].sum()) + inside
