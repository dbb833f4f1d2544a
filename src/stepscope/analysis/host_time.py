"""How the main host thread's time went, by cause: what explains a step on a machine without a device."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.causes import CAUSES
from stepscope.analysis.host import HostActivity, Timeline, host_activity, slice_columns
from stepscope.trace import Trace, Window
from stepscope.trace.intervals import IntervalSet, union

XLA_THREADS: Final = r"^tf_XLA"
"""Threads on which XLA runs compiled code on the CPU; others compile."""
XLA_EXECUTION: Final = r"^ThunkExecutor::Execute$"
WAITING: Final = ("synchronisation", "untraced", "dispatch")
"""Causes of a main thread that may be waiting for what XLA computes, or computing it."""
_PROFILER: Final = "PyTorch Profiler ("
"""Beginning of the name of the span of a recording; a number follows."""

HOST_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "cause": pl.String,  # one of CAUSES, or "compute": inside an operator on a machine without a device
    "lane": pl.Int32,
    "slice_table": pl.String,
    "slice_row": pl.UInt32,
}


def main_lane(trace: Trace, activity: HostActivity) -> int | None:
    """The thread that drives the training: a process's main thread, else the one with the most operator time."""
    busy = (
        trace.operators.group_by("lane")
        .agg(ns=pl.col("duration_ns").sum())
        .sort("ns", "lane", descending=[True, False])
    )
    known = [lane for lane in activity.main_lanes.values() if lane in activity.timelines]
    if known:
        by_lane = dict(busy.iter_rows())
        return max(known, key=lambda lane: by_lane.get(lane, 0))
    busy = busy.filter(pl.col("lane").is_in(list(activity.timelines)))  # operators can stand on a device's queue
    return int(busy["lane"][0]) if busy.height else next(iter(activity.timelines), None)


def host_time(trace: Trace, *, window: Window | None = None, activity: HostActivity | None = None) -> pl.DataFrame:
    """Every piece of the main host thread's time with its cause.

    Returns:
        Columns as in HOST_SCHEMA, in order of time; the durations add up to the window, by default from the
        thread's first slice to its last one's end, or what of that was read, and never beyond the end of PyTorch's
        profiler: an annotation that was open then, as of the optimizer's step whose end stops it, ends when all is
        written.
    """
    activity = activity or host_activity(trace)
    lane = main_lane(trace, activity)
    if lane is None:
        return pl.DataFrame(schema=dict(HOST_SCHEMA))
    timeline = activity.timelines[lane]
    if window is None:
        read = trace.metadata.window or Window(0, 2**62)
        start_ns = max(int(timeline.times[1]), read.start_ns)
        end_ns = min(int(timeline.times[-1]), read.end_ns, _profiler_end_ns(trace))
        window = Window(start_ns, max(end_ns, start_ns))
    pieces = activity.cut(lane, np.array([window.start_ns]), np.array([window.end_ns]))
    cause = pl.Series(list(CAUSES)).gather(pieces.cause.astype(np.int64))
    frame = pl.DataFrame(
        {
            "start_ns": pieces.start,
            "duration_ns": pieces.end - pieces.start,
            "cause": cause,
            "lane": np.full(len(cause), lane),
        }
    ).with_columns(slice_columns(activity, pieces.slices, pieces.lines))
    if trace.device_work.is_empty():
        frame = _with_computing(frame, _computing_elsewhere(trace))
    return frame.filter(pl.col("duration_ns") > 0).select(
        [pl.col(name).cast(dtype) for name, dtype in HOST_SCHEMA.items()]
    )


def _profiler_end_ns(trace: Trace) -> int:
    """When PyTorch's profiler ended, by its own span; later than everything where there is none."""
    names = pl.col("name").str.starts_with(_PROFILER)
    end = trace.annotations.filter(names).select((pl.col("start_ns") + pl.col("duration_ns")).max()).item()
    return 2**62 if end is None else int(end)


def _computing_elsewhere(trace: Trace) -> IntervalSet:
    """When XLA ran compiled code on the CPU: mostly on threads of its own, for which the main thread waits."""
    lanes = trace.lanes.filter(pl.col("name").str.contains(XLA_THREADS))["lane"]
    runs = pl.col("lane").is_in(lanes.implode()) | pl.col("name").str.contains(XLA_EXECUTION)
    rows = trace.operators.filter(runs).select("start_ns", "duration_ns")
    starts = rows["start_ns"].to_numpy()
    return union(starts, starts + rows["duration_ns"].to_numpy())


def _with_computing(frame: pl.DataFrame, elsewhere: IntervalSet) -> pl.DataFrame:
    """The pieces of a machine without a device: operators compute.

    Where XLA computes, it does so while it is seen to; other operators prepare that, and waits for it are computing.
    """
    if not len(elsewhere.starts):
        return frame.with_columns(pl.col("cause").replace({"dispatch": "compute"}))
    waits = frame["cause"].is_in(WAITING).to_numpy()
    times = np.column_stack([elsewhere.starts, elsewhere.ends]).ravel()
    begin = np.array([np.iinfo(np.int64).min])
    inside = np.concatenate([np.array([-1]), np.tile(np.array([0, -1]), len(elsewhere.starts))])
    waiting = frame.filter(pl.Series(waits))
    starts = waiting["start_ns"].to_numpy()
    part, start, end, computes = Timeline(np.concatenate([begin, times]), inside).cut(
        starts, starts + waiting["duration_ns"].to_numpy()
    )
    cause = pl.when(pl.Series(computes >= 0)).then(pl.lit("compute")).otherwise("cause")
    cut = waiting[part].with_columns(start_ns=pl.Series(start), duration_ns=pl.Series(end - start), cause=cause)
    return pl.concat([frame.filter(pl.Series(~waits)), cut]).sort("start_ns", maintain_order=True)


def host_summary(pieces: pl.DataFrame) -> pl.DataFrame:
    """Host time by cause: columns cause, ns, share (of the whole, 0 to 1), the largest first."""
    total = pieces["duration_ns"].sum()
    return (
        pieces.group_by("cause")
        .agg(ns=pl.col("duration_ns").sum())
        .with_columns(share=pl.col("ns") / total if total else pl.lit(0.0))
        .sort("ns", "cause", descending=[True, False])
    )
