"""Idle time of devices: every nanosecond with its cause and trigger.

A device is idle while none of its queues works. Each idle interval is traced to the work that follows it and the host
call that launched that work. Time before that call, and inside it if it lasts long, is the host's: it is cut where the
launching thread's innermost slice changes, and each piece takes that slice's cause. Time after the call is the
device's; time after the last work is the main thread's. After the launch of a graph of which nothing was recorded,
nobody knows whether the device was idle: that time is of unknown cause. Over any window, busy time and the causes add
up to the window exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.captured import unrecorded_graphs
from stepscope.analysis.host import (
    CAUSE_TYPE,
    HostActivity,
    Timeline,
    covered_by,
    host_activity,
    main_lane,
    recut,
    slice_columns,
)
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import those
from stepscope.trace.window import union

IDLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "gap": pl.Int64,  # index of the idle interval on its device
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "cause": pl.String,  # one of CAUSES
    "trigger": pl.String,  # synchronising call that drained the queues
    "trigger_launch": pl.UInt32,  # its row in launches
    "refill": pl.Boolean,  # whether the trigger precedes an earlier gap, and its lost lead is not yet used up
    "lane": pl.Int32,  # host thread that caused it; null for the device's own pieces
    "next_work": pl.UInt32,  # row in device_work that ended the interval
    "launch": pl.UInt32,  # row in launches of the call that launched it
    "slice_table": pl.String,  # table of the thread's innermost slice; "lines" where only a line of the code is known
    "slice_row": pl.UInt32,
}


UNEXPLAINED_WAIT_NS: Final = 1_500_000
"""Launched work that starts later than this was delayed by something outside the trace.

HolisticTraceAnalysis uses the same limit for kernel-to-kernel delays that hint at an unrecognised dependency.
"""


Windows: TypeAlias = Window | Mapping[str, Window] | None
"""One window for all devices, one for each, or none: from each device's first to its last work."""


def device_window(trace: Trace, device: str, window: Windows = None) -> Window:
    """Window from the first start to the last end of the device's work, or the chosen window."""
    if isinstance(window, Mapping):
        return window[device]
    chosen = window or trace.metadata.window
    if chosen is not None and chosen.end_ns < 2**61:
        return chosen
    work = trace.device_work.filter(pl.col("device") == device)
    ends = work["start_ns"] + work["duration_ns"]
    first, last = int(work["start_ns"].min() or 0), int(ends.max() or 0)  # type: ignore[arg-type]
    return Window(max(first, chosen.start_ns) if chosen else first, last)


def idle_time(
    trace: Trace,
    *,
    window: Windows = None,
    activity: HostActivity | None = None,
) -> pl.DataFrame:
    """List every piece of every device's idle time.

    Args:
        window: window to explain, or one for each device; by default from each device's first to its last work.

    Returns:
        Columns as in IDLE_SCHEMA, one row per piece, sorted by device and start. The durations of a device's pieces
        add up to its idle time in the window.
    """
    work = trace.device_work
    parts = [pl.DataFrame(schema=dict(IDLE_SCHEMA))]
    if work.height:
        activity = activity or host_activity(trace)
        for device in trace.working_devices:
            gaps = _with_end(_gaps(trace, device, device_window(trace, device, window)), trace, activity)
            parts.append(_idle_of_device(trace, device, gaps, activity))
    return pl.concat(parts)


def idle_summary(idle: pl.DataFrame, windows: dict[str, Window]) -> pl.DataFrame:
    """Idle time by device, cause and trigger.

    Args:
        idle: as from `idle_time`.
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


def clipped(pieces: pl.DataFrame, window: Window) -> pl.DataFrame:
    """The pieces of time inside the window, cut at its ends."""
    starts = pieces["start_ns"].to_numpy()
    ends = starts + pieces["duration_ns"].to_numpy()
    begin, end = np.maximum(starts, window.start_ns), np.minimum(ends, window.end_ns)
    if (begin != starts).any() or (end != ends).any():
        pieces = pieces.with_columns(start_ns=pl.Series(begin), duration_ns=pl.Series(end - begin))
    return those(pieces, end > begin)


def _gaps(trace: Trace, device: str, window: Window) -> pl.DataFrame:
    """Idle intervals of the device in order.

    Columns gap, start, end; work and queue of the next work; launch, launch_start, launch_end and lane of its launch
    call; waits_for_queue. Null if there is no next work or launch.
    """
    end = pl.col("start_ns") + pl.col("duration_ns")
    calls = trace.launches.with_row_index("launch").select("launch", "lane", launch_start="start_ns", launch_end=end)
    work = (
        trace.device_work.with_row_index("work")
        .filter(pl.col("device") == device)
        .select("work", "launch", "correlation", "start_ns", "queue", end_ns=end)
        .join(calls, on="launch", how="left", maintain_order="left")
    )
    busy = union(work["start_ns"].to_numpy(), work["end_ns"].to_numpy()).clip(window.start_ns, window.end_ns)
    idle = busy.complement(window.start_ns, window.end_ns)
    gaps = pl.DataFrame({"start": idle.starts, "end": idle.ends}).with_row_index("gap")
    gaps = gaps.join_asof(_first_of_each_start(work), left_on="end", right_on="start_ns", strategy="forward")
    done = work.select("queue", start="end_ns").unique()
    gaps = gaps.join(
        done.with_columns(same_queue=True), on=["start", "queue"], how="left", nulls_equal=True, maintain_order="left"
    )
    other_queue = pl.col("start").is_in(done["start"].implode()) & pl.col("same_queue").is_null()
    return gaps.with_columns(waits_for_queue=other_queue & pl.col("work").is_not_null())


def _with_end(gaps: pl.DataFrame, trace: Trace, activity: HostActivity) -> pl.DataFrame:
    """Charge the gap after the last work to the host: its main thread launched nothing more."""
    lane = main_lane(trace, activity)
    if lane is None or trace.launches.is_empty():
        return gaps
    last = pl.col("work").is_null()
    at_end = pl.when(last).then("end")
    return gaps.with_columns(
        launch_start=at_end.otherwise("launch_start"),
        launch_end=at_end.otherwise("launch_end"),
        lane=pl.when(last).then(pl.lit(lane, pl.Int32)).otherwise("lane"),
    )


def _first_of_each_start(work: pl.DataFrame) -> pl.DataFrame:
    """Work that counts as the next one after a gap, if several start together.

    The one launched last counts, then the lowest correlation number, then the lowest queue.
    """
    queue_number = pl.col("queue").cast(pl.Int64, strict=False)
    order = ["start_ns", "launch_start", "correlation", queue_number, "queue"]
    ordered = work.sort(order, descending=[False, True, False, False, False], nulls_last=True)
    return ordered.drop("correlation", "end_ns").unique("start_ns", keep="first", maintain_order=True)


def _idle_of_device(trace: Trace, device: str, gaps: pl.DataFrame, activity: HostActivity) -> pl.DataFrame:
    pieces = pl.concat([*_device_pieces(gaps), _without_overhead(trace, _host_pieces(trace, gaps, activity))])
    unseen = unrecorded_graphs(trace).get(device)
    if unseen is not None:
        pieces = recut(pieces, Timeline.covered(unseen), "unknown")
    pieces = pieces.sort("start", maintain_order=True)
    pieces = pieces.with_columns(slice_columns(activity, pieces)).drop("slice", "line")
    pieces = pieces.join(_with_triggers(trace, gaps), on="gap", how="left", maintain_order="left")
    return pieces.select(
        pl.lit(device).alias("device"),
        pl.col("start").alias("start_ns"),
        (pl.col("end") - pl.col("start")).alias("duration_ns"),
        pl.col("work").alias("next_work"),
        pl.exclude("start", "end", "work"),
    ).select(pl.col(name).cast(dtype) for name, dtype in IDLE_SCHEMA.items())


def _device_pieces(gaps: pl.DataFrame) -> list[pl.DataFrame]:
    """Device pieces of each gap: after the launch, or all of the gap if the launch is not in the trace."""
    start, end, called = pl.col("start"), pl.col("end"), pl.col("called")
    launched = pl.col("launch_start").is_not_null()
    waits = (pl.col("launch_start") <= start) & pl.col("waits_for_queue")
    cause = pl.when(waits).then(pl.lit("dependency")).otherwise(pl.lit("launch_latency"))
    bounds = (
        gaps.with_columns(begin=pl.when(launched).then(_host_until().clip(start, end)).otherwise(start))
        .with_columns(called=pl.when(launched).then(pl.col("launch_end").clip("begin", end)).otherwise(start))
        .with_columns(explained=pl.when((end - called > UNEXPLAINED_WAIT_NS) | ~launched).then(called).otherwise(end))
    )
    own = bounds.select("gap", start="begin", end="explained", cause=cause)
    unknown = bounds.select("gap", start="explained", end="end", cause=pl.lit("unknown"))
    nothing = {"slice": pl.lit(-1, pl.Int64), "line": pl.lit(-1, pl.Int64), "lane": pl.lit(None, pl.Int32)}
    return [
        part.filter(end > start).with_columns(pl.col("cause").cast(CAUSE_TYPE), **nothing) for part in (own, unknown)
    ]


def _host_pieces(trace: Trace, gaps: pl.DataFrame, activity: HostActivity) -> pl.DataFrame:
    """Host pieces of each gap, before the launch or inside a long one, by the activity of the launching thread.

    Where nothing is open on that thread, its process's main thread counts.
    """
    processes = dict(trace.lanes.select("lane", "process").iter_rows())
    late = gaps.filter(_host_until() > pl.col("start"))
    late = late.select("gap", "lane", "start", end=pl.min_horizontal(_host_until(), "end"))
    parts = [_cut(activity, -1, late.clear())]
    for (number,), mine in late.group_by("lane", maintain_order=True):
        lane = int(str(number))
        pieces = _cut(activity, lane, mine)
        main = activity.main_lanes.get(processes[lane], lane)
        if main != lane:
            silent = (pl.col("slice") < 0) & (pl.col("line") < 0)
            parts.append(_cut(activity, main, pieces.filter(silent)))
            pieces = pieces.filter(~silent)
        parts.append(pieces)
    return pl.concat(parts)


def _host_until() -> pl.Expr:
    """When the host has done its part for the next work: at its launch, or when a slow launch returns."""
    is_long = pl.col("launch_end") - pl.col("launch_start") > UNEXPLAINED_WAIT_NS
    return pl.when(is_long).then("launch_end").otherwise("launch_start")


def _cut(activity: HostActivity, lane: int, stretches: pl.DataFrame) -> pl.DataFrame:
    """Cut parts of gaps by the thread's activity: columns gap, start, end, cause, slice, line, lane."""
    pieces = activity.cut(lane, stretches["start"].to_numpy(), stretches["end"].to_numpy())
    gap = stretches["gap"].gather(pieces["interval"])
    return pieces.select(gap, "start", "end", "cause", "slice", "line", lane=pl.lit(lane, pl.Int32))


def _without_overhead(trace: Trace, pieces: pl.DataFrame) -> pl.DataFrame:
    """Assign host pieces inside the profiler's own work to its overhead."""
    overhead = trace.annotations.filter((pl.col("kind") == "overhead") & (pl.col("duration_ns") > 0))
    if overhead.is_empty():
        return pieces
    return recut(pieces, Timeline.covered(covered_by(overhead)), "profiler_overhead")


def _with_triggers(trace: Trace, gaps: pl.DataFrame) -> pl.DataFrame:
    """Columns gap, work, launch, and trigger_launch, trigger (null for none), refill of each gap.

    The trigger is the synchronising call that drained the queues. A call triggers the gap that begins while it waits.
    It also used up the host's lead over the device: without it the host would have been earlier by the time it waited,
    so later gaps in which the host is late belong to it until they add up to that time, or until the next synchronising
    call.
    """
    copies_out = trace.device_work.filter(pl.col("kind") == "copy_out")["launch"].drop_nulls()
    is_copy_out = (pl.col("kind") == "copy") & pl.col("trigger_launch").is_in(copies_out.implode())
    calls = (
        trace.launches.with_row_index("trigger_launch")
        .filter((pl.col("kind") == "synchronise") | is_copy_out)
        .select("lane", "trigger_launch", trigger="name", called="start_ns", waited="duration_ns")
        .unique(["lane", "called"], keep="last", maintain_order=True)
    )
    late = pl.col("launch_start").clip("start", "end") - pl.col("start")
    paid_before = pl.col("late").cum_sum().over("trigger_launch") - pl.col("late")
    waiting = pl.col("called") + pl.col("waited") >= pl.col("start")
    owed = (paid_before < pl.col("waited")) & (pl.col("late") > 0)
    launched = gaps.filter(pl.col("launch").is_not_null()).with_columns(late=late)
    found = launched.join_asof(
        calls, left_on="start", right_on="called", by="lane", strategy="backward", check_sortedness=False
    ).filter(pl.col("trigger_launch").is_not_null())
    triggers = found.with_columns(is_waiting=waiting, is_owed=owed).filter(pl.col("is_waiting") | pl.col("is_owed"))
    triggers = triggers.select("gap", "trigger_launch", "trigger", refill=~pl.col("is_waiting"))
    joined = gaps.select("gap", "work", "launch").join(triggers, on="gap", how="left", maintain_order="left")
    return joined.with_columns(pl.col("refill").fill_null(False))
