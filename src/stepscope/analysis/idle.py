"""Why a device was idle: every nanosecond of idle time with its cause and trigger.

A device is idle while none of its queues works. For each idle interval the work that follows it is found, and the
host call that launched that work. What passed before the call was made is the host's: it is cut where the
launching thread's innermost slice changes, and each piece takes that slice's cause. What passed after it is the
device's. Over any window, busy time and the causes add up to the window exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSE_CODES, CAUSES, HostActivity, Timeline, host_activity, slice_columns
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows
from stepscope.trace.window import IntervalSet, Times, union

IDLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "gap": pl.Int64,  # number of the idle interval on its device
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "cause": pl.String,  # one of CAUSES
    "trigger": pl.String,  # the synchronising call that drained the queues
    "trigger_launch": pl.UInt32,  # its row in launches
    "refill": pl.Boolean,  # the trigger came before an earlier gap; its lost lead is still being paid for
    "lane": pl.Int32,  # host thread that is to blame; null for the device's own pieces
    "next_work": pl.UInt32,  # row in device_work: what ended the interval
    "launch": pl.UInt32,  # row in launches: the call that launched it
    "slice_table": pl.String,  # the innermost slice of that thread; "lines" where only a line of the code is known
    "slice_row": pl.UInt32,
}


UNEXPLAINED_WAIT_NS: Final = 1_500_000
"""Launched work that stays away longer than this was held up by something the trace does not show.

The limit is HolisticTraceAnalysis's for a kernel-to-kernel delay that hints at an unrecognised dependency."""


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The idle intervals of one device; arrays of shape (n,), rows -1 where there is none."""

    start: Times
    end: Times
    work: Rows
    launch: Rows
    launch_start: Times
    launch_end: Times
    lane: npt.NDArray[np.int32]
    waits_for_queue: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Parts of gaps; arrays of shape (m,)."""

    gap: Rows
    start: Times
    end: Times
    cause: npt.NDArray[np.int16]
    slices: Rows
    lines: Rows
    lane: npt.NDArray[np.int32]


def device_window(trace: Trace, device: str, window: Window | None = None) -> Window:
    """From the first start to the last end of the device's work, or the chosen window."""
    chosen = window or trace.metadata.window
    if chosen is not None and chosen.end_ns < 2**61:
        return chosen
    work = trace.device_work.filter(pl.col("device") == device)
    ends = work["start_ns"] + work["duration_ns"]
    first, last = int(work["start_ns"].min() or 0), int(ends.max() or 0)  # type: ignore[arg-type]
    return Window(max(first, chosen.start_ns) if chosen else first, last)


def idle_time(trace: Trace, *, window: Window | None = None, activity: HostActivity | None = None) -> pl.DataFrame:
    """Every piece of every device's idle time.

    Args:
        window: the stretch to explain; by default from each device's first to its last work.
        activity: the trace's host activity, if it was computed already.

    Returns:
        Columns as in IDLE_SCHEMA, one row a piece, sorted by device and start. The durations of a device's pieces
        add up to its idle time in the window.
    """
    work = trace.device_work
    parts = [pl.DataFrame(schema=dict(IDLE_SCHEMA))]
    if work.height:
        activity = activity or host_activity(trace)
        for device in sorted(work["device"].unique().drop_nulls().to_list()):
            gaps = _gaps(trace, device, device_window(trace, device, window))
            parts.append(_idle_of_device(trace, device, gaps, activity))
    return pl.concat(parts)


def idle_summary(idle: pl.DataFrame, windows: dict[str, Window]) -> pl.DataFrame:
    """Idle time by device, cause and trigger.

    Args:
        idle: as `idle_time` gives it.
        windows: each device's window, for the shares.

    Returns:
        Columns device, cause, trigger, ns, share (of the device's window, 0 to 1), the largest first.
    """
    lengths = pl.DataFrame(
        {"device": list(windows), "window_ns": [window.duration_ns for window in windows.values()]},
        schema={"device": pl.String, "window_ns": pl.Int64},
    )
    return (
        idle.group_by("device", "cause", "trigger")
        .agg(ns=pl.col("duration_ns").sum())
        .join(lengths, on="device", how="left")
        .with_columns(share=pl.when(pl.col("window_ns") > 0).then(pl.col("ns") / pl.col("window_ns")).otherwise(0.0))
        .sort(["device", "ns", "cause", "trigger"], descending=[False, True, False, False])
        .drop("window_ns")
    )


def _gaps(trace: Trace, device: str, window: Window) -> _Gaps:
    work = (
        trace.device_work.with_row_index("work")
        .filter(pl.col("device") == device)
        .join(
            trace.launches.with_row_index("launch").select(
                "launch",
                launch_start="start_ns",
                launch_end=pl.col("start_ns") + pl.col("duration_ns"),
                launch_lane="lane",
            ),
            on="launch",
            how="left",
            maintain_order="left",
        )
    )
    starts, ends = work["start_ns"].to_numpy(), (work["start_ns"] + work["duration_ns"]).to_numpy()
    idle = _idle_intervals(union(starts, ends), window)
    following = _following_work(work, idle.ends)
    queues = work["queue"].rank("dense").fill_null(0).to_numpy().astype(np.int64)
    return _Gaps(
        start=idle.starts,
        end=idle.ends,
        work=np.where(following >= 0, work["work"].to_numpy().astype(np.int64)[following], -1),
        launch=_gathered(work["launch"], following),
        launch_start=_gathered(work["launch_start"], following),
        launch_end=_gathered(work["launch_end"], following),
        lane=_gathered(work["launch_lane"], following).astype(np.int32),
        waits_for_queue=_waits_for_queue(ends, queues, idle.starts, following),
    )


def _idle_intervals(busy: IntervalSet, window: Window) -> IntervalSet:
    """The window without the busy time; work of no length divides a gap."""
    inside = busy.clip(window.start_ns, window.end_ns)
    return inside.complement(window.start_ns, window.end_ns)


def _gathered(column: pl.Series, rows: Rows) -> Rows:
    values = column.cast(pl.Int64).fill_null(-1).to_numpy()
    return np.where(rows >= 0, values[rows], -1) if len(values) else np.full(len(rows), -1, np.int64)


def _following_work(work: pl.DataFrame, times: Times) -> Rows:
    """For each gap's end, the position in `work` of what follows: the first to start then or later.

    Of several that start together the one that was launched last decides, then the lowest correlation number, then
    the lowest queue.
    """
    queue_number = pl.col("queue").cast(pl.Int64, strict=False)
    order = work.with_row_index("position").sort(
        ["start_ns", "launch_start", "correlation", queue_number, "queue"],
        descending=[False, True, False, False, False],
        nulls_last=True,
    )
    starts, positions = order["start_ns"].to_numpy(), order["position"].to_numpy().astype(np.int64)
    found = np.searchsorted(starts, times, side="left")
    return np.where(found < len(starts), positions[np.minimum(found, len(starts) - 1)], -1)


def _waits_for_queue(ends: Times, queues: Rows, gap_starts: Times, following: Rows) -> npt.NDArray[np.bool_]:
    """Whether the work that finished last before each gap ran on other queues only than the work that follows."""
    same_queue_end = np.zeros(len(gap_starts), np.bool_)
    any_end = np.isin(gap_starts, ends)
    for queue in np.unique(queues):
        mine = (queues[following] == queue) & (following >= 0)
        same_queue_end[mine] = np.isin(gap_starts[mine], ends[queues == queue])
    return any_end & ~same_queue_end & (following >= 0)


def _idle_of_device(trace: Trace, device: str, gaps: _Gaps, activity: HostActivity) -> pl.DataFrame:
    pieces = _concatenate([_device_pieces(gaps), *_host_pieces(trace, gaps, activity)])
    pieces = _sorted(_without_overhead(trace, pieces))
    trigger, refill = _triggers(trace, gaps, pieces)
    frame = pl.DataFrame(
        {
            "device": pl.repeat(device, len(pieces.gap), dtype=pl.String, eager=True),
            "gap": pieces.gap,
            "start_ns": pieces.start,
            "duration_ns": pieces.end - pieces.start,
            "cause": pl.Series(list(CAUSES)).gather(pieces.cause.astype(np.int64)),
            "trigger_launch": _nullable(trigger),
            "refill": refill,
            "lane": _nullable(pieces.lane.astype(np.int64)),
            "next_work": _nullable(gaps.work[pieces.gap]),
            "launch": _nullable(gaps.launch[pieces.gap]),
        }
    ).with_columns(
        slice_columns(activity, pieces.slices, pieces.lines),
        trigger=trace.launches["name"].gather(_nullable(trigger)),
    )
    return frame.select([pl.col(name).cast(dtype) for name, dtype in IDLE_SCHEMA.items()])


def _nullable(rows: Rows) -> pl.Series:
    return (
        pl.Series(rows, dtype=pl.Int64)
        .to_frame("row")
        .select(pl.when(pl.col("row") >= 0).then(pl.col("row")).cast(pl.UInt32))["row"]
    )


def _device_pieces(gaps: _Gaps) -> _Pieces:
    """What of each gap is the device's own: after the launch, or all of it where the launch is not in the trace."""
    launched = gaps.launch >= 0
    start = np.where(launched, np.clip(gaps.launch_start, gaps.start, gaps.end), gaps.start)
    called = np.where(launched, np.clip(gaps.launch_end, start, gaps.end), gaps.start)
    explained = np.where(gaps.end - called > UNEXPLAINED_WAIT_NS, called, gaps.end)
    explained = np.where(launched, explained, gaps.start)
    waits = (gaps.launch_start <= gaps.start) & gaps.waits_for_queue
    cause = np.where(waits, CAUSE_CODES["dependency"], CAUSE_CODES["launch_latency"])
    unknown = np.full(len(cause), CAUSE_CODES["unknown"])
    rows = np.arange(len(cause))
    none = np.full(2 * len(rows), -1, np.int64)
    pieces = _Pieces(
        np.concatenate([rows, rows]),
        np.concatenate([start, explained]),
        np.concatenate([explained, gaps.end]),
        np.concatenate([cause, unknown]).astype(np.int16),
        none,
        none,
        none.astype(np.int32),
    )
    return _select(pieces, pieces.end > pieces.start)


def _host_pieces(trace: Trace, gaps: _Gaps, activity: HostActivity) -> list[_Pieces]:
    """What of each gap passed before the launch, by what the launching thread was doing.

    Where nothing is open on that thread, its process's main thread is asked.
    """
    processes = dict(trace.lanes.select("lane", "process").iter_rows())
    end = np.minimum(gaps.launch_start, gaps.end)
    late = (gaps.launch >= 0) & (gaps.launch_start > gaps.start)
    result = []
    for lane in np.unique(gaps.lane[late]).tolist():
        rows = np.flatnonzero(late & (gaps.lane == lane))
        pieces = _cut(activity, lane, rows, gaps.start[rows], end[rows])
        main = activity.main_lanes.get(processes[lane], lane)
        silent = (pieces.slices < 0) & (pieces.lines < 0)
        if main != lane and silent.any():
            result.append(_cut(activity, main, pieces.gap[silent], pieces.start[silent], pieces.end[silent]))
            pieces = _select(pieces, ~silent)
        result.append(pieces)
    return result


def _cut(activity: HostActivity, lane: int, gap: Rows, starts: Times, ends: Times) -> _Pieces:
    cut = activity.cut(lane, starts, ends)
    lanes = np.full(len(cut.slices), lane, np.int32)
    return _Pieces(gap[cut.interval], cut.start, cut.end, cut.cause, cut.slices, cut.lines, lanes)


def _without_overhead(trace: Trace, pieces: _Pieces) -> _Pieces:
    """The host's pieces that lie in the profiler's own work become its overhead."""
    overhead = trace.annotations.filter((pl.col("kind") == "overhead") & (pl.col("duration_ns") > 0))
    if overhead.is_empty():
        return pieces
    covered = union(overhead["start_ns"].to_numpy(), (overhead["start_ns"] + overhead["duration_ns"]).to_numpy())
    count = len(covered.starts)
    times = np.concatenate(
        [np.array([np.iinfo(np.int64).min]), np.column_stack([covered.starts, covered.ends]).ravel()]
    )
    inside = np.concatenate([np.array([-1]), np.tile(np.array([0, -1]), count)])
    host = pieces.lane >= 0
    mine = _select(pieces, host)
    part, start, end, is_overhead = Timeline(times, inside).cut(mine.start, mine.end)
    cause = np.where(is_overhead >= 0, CAUSE_CODES["profiler_overhead"], mine.cause[part]).astype(np.int16)
    cut = _Pieces(mine.gap[part], start, end, cause, mine.slices[part], mine.lines[part], mine.lane[part])
    return _concatenate([_select(pieces, ~host), cut])


def _select(pieces: _Pieces, which: npt.NDArray[np.bool_]) -> _Pieces:
    return _take(pieces, np.flatnonzero(which))


def _take(pieces: _Pieces, rows: Rows) -> _Pieces:
    return _Pieces(
        pieces.gap[rows],
        pieces.start[rows],
        pieces.end[rows],
        pieces.cause[rows],
        pieces.slices[rows],
        pieces.lines[rows],
        pieces.lane[rows],
    )


def _concatenate(parts: list[_Pieces]) -> _Pieces:
    return _Pieces(
        np.concatenate([part.gap for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.cause for part in parts]),
        np.concatenate([part.slices for part in parts]),
        np.concatenate([part.lines for part in parts]),
        np.concatenate([part.lane for part in parts]),
    )


def _sorted(pieces: _Pieces) -> _Pieces:
    return _take(pieces, np.argsort(pieces.start, kind="stable"))


def _triggers(trace: Trace, gaps: _Gaps, pieces: _Pieces) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """For each piece, the row of the synchronising call that drained the queues (-1: none), and whether it is a refill.

    A call triggers the gap that begins while it waits. It also used up the lead of the host over the device: without
    it the host would have been earlier by as long as it waited, so later gaps in which the host is late belong to
    it until they add up to that, or until the next synchronising call.
    """
    waits = trace.launches.select("kind", "lane", "start_ns", "duration_ns").with_row_index("launch")
    copying = trace.device_work.filter(pl.col("kind") == "copy_out").select("launch").drop_nulls()
    copies_out = waits.filter(pl.col("kind") == "copy").join(copying, on="launch", how="semi")
    waits = pl.concat([waits.filter(pl.col("kind") == "synchronise"), copies_out]).sort("launch")
    gap_trigger = np.full(len(gaps.start), -1, np.int64)
    gap_refill = np.zeros(len(gaps.start), np.bool_)
    late = np.where(gaps.launch >= 0, np.clip(gaps.launch_start, gaps.start, gaps.end) - gaps.start, 0)
    for (lane,), calls in waits.group_by("lane"):
        rows = np.flatnonzero((gaps.lane == lane) & (gaps.launch >= 0))
        start, duration = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
        last = np.searchsorted(start, gaps.start[rows], side="right") - 1
        known = last >= 0
        rows, last = rows[known], last[known]
        waiting = start[last] + duration[last] >= gaps.start[rows]
        paid = np.cumsum(late[rows]) - late[rows]
        before = paid - paid[np.searchsorted(last, last, side="left")]
        owed = (before < duration[last]) & (late[rows] > 0)
        triggered = waiting | owed
        gap_trigger[rows] = np.where(triggered, calls["launch"].to_numpy().astype(np.int64)[last], -1)
        gap_refill[rows] = triggered & ~waiting
    return gap_trigger[pieces.gap], gap_refill[pieces.gap]
