"""Shared by rules about single kernels: which of them determine the step's length, and how full the device is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import DEVICE_CAUSES
from stepscope.analysis.roofline import device_peaks
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows


def decides(view: View) -> npt.NDArray[np.bool_]:
    """For each row of `view.work`, whether the step would end earlier if that work were shorter; shape (works,).

    Work before a gap in which the host was late, without having waited for the device, does not count: the gap would
    only begin earlier.
    """
    waited = (pl.col("cause") == "synchronisation") | (pl.col("trigger_launch").is_not_null() & ~pl.col("refill"))
    gaps = (
        view.idle.filter((pl.col("device") == view.device) & (pl.col("start_ns") < view.window.end_ns))
        .group_by("gap")
        .agg(
            start_ns=pl.col("start_ns").min(),
            waits=waited.fill_null(False).any() | pl.col("cause").is_in(DEVICE_CAUSES).all(),
        )
        .sort("start_ns")
    )
    ends = (view.work["start_ns"] + view.work["duration_ns"]).to_numpy()
    if gaps.is_empty():
        return np.ones(len(ends), np.bool_)
    following = np.searchsorted(gaps["start_ns"].to_numpy(), ends, side="left")
    waits = np.append(gaps["waits"].to_numpy(), True)  # the last gap ends with the step
    result: npt.NDArray[np.bool_] = waits[following]
    return result


def alone_share(view: View) -> float:
    """The device's busy time divided by the sum of its works' durations: below 1 if queues work at the same time."""
    total = int(view.work["duration_ns"].sum())
    busy = busy_intervals(view.work, view.window).total_ns
    return min(busy / total, 1.0) if total else 1.0


def multiprocessors(view: View) -> int | None:
    """The device's number of multiprocessors, from the trace or the table of devices; None if unknown."""
    described = view.trace.metadata.devices
    counts = {one.multiprocessors for one in described if one.device == view.device} or {
        one.multiprocessors for one in described
    }
    if len(counts) == 1 and (known := counts.pop()):
        return known
    peaks = None if view.device is None else device_peaks(view.trace, view.device)
    return None if peaks is None else peaks.multiprocessors


def blocks(grids: pl.Series) -> Rows:
    """The number of thread blocks of each grid "x,y,z", -1 if unknown; shape (n,)."""
    known: dict[str | None, int] = {None: -1}
    for grid in grids.unique().to_list():
        if grid is not None:
            known[grid] = _blocks(grid)
    return np.array([known[grid] for grid in grids.to_list()], np.int64)


def _blocks(grid: str) -> int:
    sizes = grid.strip("[]").split(",")
    if not sizes or not all(size.strip().isdigit() and len(size) < 12 for size in sizes):
        return -1
    return min(int(np.prod([float(size) for size in sizes])), 2**62)
