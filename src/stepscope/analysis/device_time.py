"""How each device's and each queue's time was spent."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.idle import device_window
from stepscope.trace import Trace, Window
from stepscope.trace.intervals import IntervalSet, union

COPY_KINDS: Final = ("copy_in", "copy_out", "copy_on_device")

DEVICE_TIME_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "window_ns": pl.Int64,
    "busy_ns": pl.Int64,
    "idle_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "communication_ns": pl.Int64,
    "copy_ns": pl.Int64,
    "exposed_communication_ns": pl.Int64,
    "exposed_copy_ns": pl.Int64,
}

QUEUE_TIME_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "queue": pl.String,
    "works": pl.Int64,
    "busy_ns": pl.Int64,
    "share": pl.Float64,  # of the device's window
}


def device_time(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """One row a device; every time is the length of a union over the device's queues.

    Returns:
        Columns as in DEVICE_TIME_SCHEMA. `window_ns` runs from the first to the last work, or is the chosen window;
        `busy_ns + idle_ns == window_ns`. `exposed_*` is what no compute work covers. A set of memory counts as
        busy only.
    """
    rows = []
    for device in sorted(trace.device_work["device"].unique().to_list()):
        span = device_window(trace, device, window)
        work = trace.device_work.filter(pl.col("device") == device)
        busy = busy_intervals(work, span)
        compute = busy_intervals(work.filter(pl.col("kind") == "compute"), span)
        communication = busy_intervals(work.filter(pl.col("kind") == "communication"), span)
        copy = busy_intervals(work.filter(pl.col("kind").is_in(COPY_KINDS)), span)
        rows.append(
            {
                "device": device,
                "window_ns": span.duration_ns,
                "busy_ns": busy.total_ns,
                "idle_ns": span.duration_ns - busy.total_ns,
                "compute_ns": compute.total_ns,
                "communication_ns": communication.total_ns,
                "copy_ns": copy.total_ns,
                "exposed_communication_ns": communication.total_ns - communication.overlap_ns(compute),
                "exposed_copy_ns": copy.total_ns - copy.overlap_ns(compute),
            }
        )
    return pl.DataFrame(rows, schema=dict(DEVICE_TIME_SCHEMA))


def busy_intervals(work: pl.DataFrame, window: Window) -> IntervalSet:
    """The union of rows of `device_work`, inside the window."""
    starts = work["start_ns"].to_numpy()
    return union(starts, starts + work["duration_ns"].to_numpy()).clip(window.start_ns, window.end_ns)


def queue_time(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """One row a queue, each device's busiest first; columns as in QUEUE_TIME_SCHEMA."""
    rows = []
    for (device, queue), work in trace.device_work.group_by("device", "queue"):
        span = device_window(trace, str(device), window)
        busy_ns = busy_intervals(work, span).total_ns
        rows.append((device, queue, work.height, busy_ns, busy_ns / span.duration_ns if span.duration_ns else 0.0))
    table = pl.DataFrame(rows, schema=dict(QUEUE_TIME_SCHEMA), orient="row")
    return table.sort(["device", "busy_ns", "queue"], descending=[False, True, False])
