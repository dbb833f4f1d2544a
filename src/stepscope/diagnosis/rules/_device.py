"""Shared by rules about a device: which kernels set the step's length, how full the device is, and its memory."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.captured import graph_operators
from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import DEVICE_CAUSES
from stepscope.analysis.operators import kernel_class
from stepscope.analysis.roofline import (
    device_peaks,
    is_near,
    peaks_or_bounds,
    roofline_calls,
    roofline_table,
    with_graphs,
)
from stepscope.analysis.slow_kernels import block_count
from stepscope.diagnosis.finding import BusyWork, Location
from stepscope.diagnosis.view import View, once
from stepscope.trace.nesting import Rows, at
from stepscope.trace.window import Window

_SMALLEST_SHARE: Final = 0.02
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES: Final = ((86_400 * 10**9, "days"), (3_600 * 10**9, "hours"), (60 * 10**9, "minutes"), (10**9, "seconds"))


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
    result: npt.NDArray[np.bool_] = waits[following] | np.isin(view.work["row"].to_numpy(), view.waited_for)
    return result


_BUSY_SHARE: Final = 0.05
"""Share of the step from which work is reported with what it reached."""


def busy_work(view: View) -> tuple[BusyWork, ...]:
    """What takes a noticeable part of the step on the device, by operator and shapes, the costliest first.

    Work without a known operator is listed by kernel, and so is that of graphs unless their capture is known.
    """
    if view.device is None or view.work.is_empty():
        return ()
    table = roofline_table(view.trace, bounds=True, calls=limited_calls(view)).filter(pl.col("device") == view.device)
    kernels = view.work.filter(pl.Series(operators_of_work(view) < 0) & (pl.col("kind") == "compute"))
    known = graph_operators(view.trace)
    if known is not None:
        table = with_graphs(table, view.trace, view.work["row"].to_numpy().astype(np.int64))
        table = table.filter(pl.col("device") == view.device)
        kernels = kernels.filter(known["graph_operator"].gather(kernels["row"]).is_null())
    kernels = kernels.group_by(operator="name").agg(
        device_ns=pl.col("duration_ns").sum(), kernel=pl.col("name").first()
    )
    least_ns = _BUSY_SHARE * view.length_ns
    rows = pl.concat([table, kernels], how="diagonal").filter(pl.col("device_ns") >= least_ns)
    rows = rows.sort(["device_ns", "operator"], descending=[True, False])
    return tuple(_busy(view, row) for row in rows.iter_rows(named=True))


def _busy(view: View, row: dict[str, Any]) -> BusyWork:
    known = kernel_class(row["kernel"] or "")
    return BusyWork(
        row["operator"],
        row["input_shapes"],
        row["kernel"],
        row["work_kind"] or known.kind or None,
        known.library or None,
        row["device_ns"] // view.step_count,
        view.share(row["device_ns"]),
        **{name: row[name] for name in ("compute_share", "bandwidth_share", "limit", "peaks", "why", "better")},
    )


def operators_of_work(view: View) -> Rows:
    """For each row of `view.work`, the operator that launched it, -1 for none."""
    return at(view.launching, view.work["launch"].cast(pl.Int64).fill_null(-1).to_numpy())


@once
def limited_calls(view: View) -> pl.DataFrame:
    """As `roofline_calls` of the steps, with bounds."""
    return roofline_calls(view.trace, window=calling(view), bounds=True)


def near_their_limit(view: View) -> frozenset[int]:
    """Rows of operators whose kernels already come close to what the device can do."""
    peaks = None if view.device is None else device_peaks(view.trace, view.device)
    if peaks is None:
        return frozenset()
    calls = limited_calls(view).filter((pl.col("device") == view.device) & pl.col("limit").is_not_null())
    rows = calls.select("row", "limit", share=pl.col("attainable_ns") / pl.col("device_ns").clip(1)).iter_rows()
    return frozenset(row for row, limit, share in rows if is_near(share, limit, peaks))


def calling(view: View) -> Window:
    """The time in which the host called the steps' operators; a device's steps come later than their calls."""
    if not view.is_on_device:
        return view.span
    rows = view.launching[view.work["launch"].drop_nulls().to_numpy()]
    starts = view.trace.operators["start_ns"].to_numpy()[rows[rows >= 0]]
    return Window(int(starts.min()), int(starts.max()) + 1) if len(starts) else view.span


def alone_share(view: View) -> float:
    """The device's busy time divided by the sum of its works' durations: below 1 if queues work at the same time."""
    total = int(view.work["duration_ns"].sum())
    busy = busy_intervals(view.work, view.window).total_ns
    return min(busy / total, 1.0) if total else 1.0


def multiprocessors(view: View) -> int | None:
    """The device's number of multiprocessors, from the trace or the table of devices; None if unknown.

    Where the trace names no device, the least number of those that it can be."""
    described = view.trace.metadata.devices
    counts = {one.multiprocessors for one in described if one.device == view.device} or {
        one.multiprocessors for one in described
    }
    if len(counts) == 1 and (known := counts.pop()):
        return known
    peaks = None if view.device is None else peaks_or_bounds(view.trace, view.device)
    return None if peaks is None else peaks.multiprocessors


def blocks(grids: pl.Series) -> Rows:
    """The number of thread blocks of each grid "x,y,z", -1 if unknown; shape (n,)."""
    known = {grid: block_count(grid) for grid in grids.unique().to_list()}
    return np.array([known[grid] for grid in grids.to_list()], np.int64)


def size_in_words(bytes: float) -> str:
    """An amount of memory such as "1.5 GiB"."""
    unit, word = next((each for each in _SIZES if abs(bytes) >= each[0]), (1, "bytes"))
    return f"{bytes / unit:,.1f} {word}" if unit > 1 else f"{bytes:,.0f} bytes"


def time_in_words(ns: float) -> str:
    """A long time such as "3.2 hours"."""
    unit, word = next((each for each in _TIMES if ns >= each[0]), _TIMES[-1])
    return f"{ns / unit:,.1f} {word}"


def memory_locations(rows: pl.DataFrame, top: int = 3) -> tuple[Location, ...]:
    """The user's lines that allocated most of these bytes.

    Args:
        rows: columns file, line, function, exact_line and bytes; null where the place is unknown.
    """
    total = max(int(rows["bytes"].sum()), 1)
    lines = (
        rows.drop_nulls(["file", "line"])
        .group_by("file", "line", "function")
        .agg(pl.col("bytes").sum(), pl.col("exact_line").any())
        .filter(pl.col("bytes") >= _SMALLEST_SHARE * total)
        .sort(["bytes", "file", "line"], descending=[True, False, False])
        .head(top)
    )
    return tuple(
        Location(file, line, function or "", min(size / total, 1.0), bool(exact))
        for file, line, function, size, exact in lines.iter_rows()
    )
