"""How each device's and each queue's time was spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.idle import device_window
from stepscope.trace import Trace, Window
from stepscope.trace.window import IntervalSet, Times, union

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
    for device in trace.working_devices:
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


def step_busy_shares(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Each device's duty cycle in each step: the share of the step in which any of its queues worked, 0 to 1.

    Args:
        steps: as `stepscope.analysis.steps.step_table` gives them.

    Returns:
        A row for each step, in order, with a column device_<name>_busy_share for each device.
    """
    starts, ends = steps["start_ns"].to_numpy(), (steps["start_ns"] + steps["duration_ns"]).to_numpy()
    columns = []
    for device in trace.working_devices:
        work = trace.device_work.filter(pl.col("device") == device)
        begin = work["start_ns"].to_numpy()
        busy = union(begin, begin + work["duration_ns"].to_numpy())
        inside = _covered(busy, ends) - _covered(busy, starts)
        share = np.divide(inside, ends - starts, out=np.zeros(len(starts)), where=ends > starts)
        columns.append(pl.Series(f"device_{device}_busy_share", share))
    return pl.DataFrame(columns)


def _covered(busy: IntervalSet, times: Times) -> Times:
    """How much of the intervals lies before each time."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(busy.ends - busy.starts)])
    place = np.searchsorted(busy.starts, times, side="right") - 1
    inside = np.clip(times - busy.starts[np.maximum(place, 0)], 0, None) if len(busy.starts) else times * 0
    length = (busy.ends - busy.starts)[np.maximum(place, 0)] if len(busy.starts) else inside
    result: Times = np.where(place >= 0, before[np.maximum(place, 0)] + np.minimum(inside, length), 0)
    return result


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


ENGINES: Final[dict[str, str]] = {
    "MME": "matrix products",
    "TPC": "all other computation",
    "DMA": "moving data",
    "NIC": "between devices",
    "other": "engines of other kinds",
}
"""Engine -> what it does, in the order in which a moment is theirs."""
_BY_QUEUE: Final = {"MME": "MME", "TPC": "TPC", "NIC": "NIC", **dict.fromkeys(("DMA", "EDMA", "PDMA", "KDMA"), "DMA")}
_COMPUTING: Final = ("MME", "TPC")


@dataclass(frozen=True, slots=True)
class EngineTime:
    """One engine's part of a device's window, in whole nanoseconds.

    Attributes:
        busy_ns: when any of its units worked.
        exposed_ns: when no engine before it worked.
    """

    engine: str
    busy_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How a device's window divides: the engines' exposed_ns + idle_ns == window_ns.

    Attributes:
        engines: those that worked at all, in the order of ENGINES.
        computing_together_ns: when both MME and TPC worked.
    """

    device: str
    window_ns: int
    idle_ns: int
    computing_together_ns: int
    engines: tuple[EngineTime, ...]


def engine_of(queue: str | None) -> str | None:
    """The engine that a queue of this name is; None for queues of other kinds."""
    return _BY_QUEUE.get(queue or "")


def engine_uses(trace: Trace) -> tuple[EngineUse, ...]:
    """Of every device whose queues are engines, in order of its name."""
    queues = trace.device_work.select("device", "queue").unique()
    devices = queues.filter(pl.col("queue").is_in(_COMPUTING))["device"].unique().sort().to_list()
    return tuple(_engine_use(trace, device) for device in devices)


def _engine_use(trace: Trace, device: str) -> EngineUse:
    window = device_window(trace, device)
    work = trace.device_work.filter(pl.col("device") == device).with_columns(
        engine=pl.col("queue").replace_strict(_BY_QUEUE, default="other", return_dtype=pl.String)
    )
    present = [engine for engine in ENGINES if (work["engine"] == engine).any()]
    busy = {engine: busy_intervals(work.filter(pl.col("engine") == engine), window) for engine in present}
    times, covered = [], 0
    for position, engine in enumerate(present):
        until = busy_intervals(work.filter(pl.col("engine").is_in(present[: position + 1])), window).total_ns
        times.append(EngineTime(engine, busy[engine].total_ns, until - covered))
        covered = until
    return EngineUse(device, window.duration_ns, window.duration_ns - covered, _together(busy), tuple(times))


def _together(busy: dict[str, IntervalSet]) -> int:
    matrix, vector = (busy.get(engine) for engine in _COMPUTING)
    return 0 if matrix is None or vector is None else matrix.overlap_ns(vector)
