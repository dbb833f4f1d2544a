"""Achieved arithmetic and memory rates of operators against the device's peaks.

The roofline model (Williams, Waterman and Patterson, 2009): a call takes at least the longer of its operations over
the peak of their number type and its bytes over the memory's bandwidth. `share` is that time over the measured one.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import polars as pl

from stepscope.analysis.captured import graph_calls
from stepscope.analysis.operators import described_work
from stepscope.analysis.slow_kernels import reasons
from stepscope.analysis.work_formulas import work_of_operators
from stepscope.machine.devices import DevicePeaks, device_table, find_device
from stepscope.trace import Trace, Window
from stepscope.trace.metadata import Device
from stepscope.trace.naming import TELLING
from stepscope.trace.nesting import Rows, beginning_in, conformed

WORK_KINDS: Final = ("compute", "copy_on_device", "set")
"""Kinds of device work that count for an operator: its work on the device itself."""
MEASURED_WRONG: Final = 1.1
"""Share of a peak above which the peak, the shapes or the times must be wrong."""

CALL_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # row in `operators`
    "operator": pl.String,
    "input_shapes": pl.String,  # JSON
    "input_types": pl.String,  # JSON
    "device": pl.String,
    "device_ns": pl.Int64,  # device work launched by the operator itself
    "works": pl.Int64,  # number of such works
    "kernel": pl.String,  # the longest one
    "work_kind": pl.String,  # as in `stepscope.analysis.work.Work`
    "number_type": pl.String,  # its peak counts; tf32 where kernels say so
    "flops": pl.Int64,
    "bytes": pl.Int64,
    "limit": pl.String,  # "compute" or "memory"; null where the peak or the work is unknown
    "attainable_ns": pl.Float64,  # least time at the limit's peak
    "compute_ns": pl.Float64,  # least time for the arithmetic; null as `limit`
    "memory_ns": pl.Float64,  # least time for the bytes; null as `limit`
    "grid": pl.String,  # of the longest kernel, as the launch says; and so are the next four
    "block": pl.String,
    "registers": pl.Int32,
    "shared_memory_bytes": pl.Int64,
    "occupancy": pl.Float64,
}

TABLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "operator": pl.String,
    "input_shapes": pl.String,
    "calls": pl.Int64,
    "device_ns": pl.Int64,
    "limit": pl.String,  # "compute", "memory", or "cache" where tensors came faster than memory allows
    "share": pl.Float64,  # share of the limiting peak, 0 to 1; null for "cache"
    "tflop_per_s": pl.Float64,
    "gb_per_s": pl.Float64,
    "number_type": pl.String,  # as in CALL_SCHEMA
    "device_share": pl.Float64,  # share of all operators' device time, 0 to 1
    "flops": pl.Int64,  # per call
    "bytes": pl.Int64,  # per call
    "work_kind": pl.String,  # as in CALL_SCHEMA
    "device": pl.String,
    "input_types": pl.String,
    "kernel": pl.String,  # the costliest one
    "compute_share": pl.Float64,  # share of the peak of `number_type`, 0 to 1
    "bandwidth_share": pl.Float64,  # share of the memory's bandwidth, 0 to 1
    "peaks": pl.String,  # device whose peaks these are; "A to B" where names of kernels leave several
    "why": pl.String,  # what in shapes, kernel and launch keeps it from its limit
    "better": pl.String,  # the shape or option that does better
}

OF_LAUNCH: Final = ("grid", "block", "registers", "shared_memory_bytes", "occupancy")
_FEWER_OPERATIONS: Final = r"(?i)winograd|_fft|fft_|fft2d"
"""Algorithms with fewer operations than counted, for which no share of a peak can be given."""


def device_peaks(trace: Trace, device: str) -> DevicePeaks | None:
    """Peaks of this device of the trace; None if neither the table nor the trace has them.

    A program that sees only some of a machine's devices may number them differently from the profiler; if all are of
    one kind this does not matter.
    """
    described = trace.metadata.devices
    mine = next((one for one in described if one.device == device), None)
    if mine is None and len({(one.name, one.compute_capability, one.multiprocessors) for one in described}) == 1:
        mine = described[0]
    if mine is None:
        return None
    return find_device(mine) or _recorded_peaks(mine)


def _recorded_peaks(device: Device) -> DevicePeaks | None:
    """Peaks recorded in the trace, as by XLA for TPUs, in bf16."""
    if device.peak_flops_s is None or device.bandwidth_bytes_s is None:
        return None
    return DevicePeaks(
        name=device.name or device.device,
        matches="",
        capability=device.compute_capability,
        multiprocessors=device.multiprocessors,
        clock_mhz=None,
        memory_bytes=device.memory_bytes,
        bandwidth_bytes_s=int(device.bandwidth_bytes_s),
        cache_bytes=None,
        flops_s={"bf16": device.peak_flops_s},
        source="the trace",
    )


_VENDORS: Final = (
    (
        "AMD",
        re.compile(r"Cijk_|_gtcx_|aiter|(?<![a-z])ck(?:_tile)?::|gfx9|__hip|(?i:miopen)|_ISA9|^hip[A-Z]|\.kd$", re.M),
    ),
    ("NVIDIA", re.compile(r"cutlass|(?<![a-z])sm\d\d|nvjet|cudnn|xmma|cublas|(?:volta|turing|ampere)_")),
)
_AMD_CAPABILITY: Final = {"908": "9.0", "90a": "9.0", "942": "9.4", "950": "9.5"}
_SINCE: Final = {"volta": 70, "turing": 75, "ampere": 80, "hopper": 90}
_BINARY_FOR: Final = re.compile(r"(?:_ISA|gfx)(9\w\w)|(?<![a-z])(?:sm_?(\d{2,3})|(volta|turing|ampere|hopper)_)")


def peaks_or_bounds(trace: Trace, device: str) -> DevicePeaks | None:
    """Peaks of this device; where the trace names none, the least of those that it can be.

    Names of kernels show the maker and sometimes the architecture, and no device exceeds its peaks. Shares of the
    least peaks are upper bounds of the true shares. None where nothing shows the maker, or the table lacks the device.
    """
    known = device_peaks(trace, device)
    described = next((one for one in trace.metadata.devices if one.device == device), None)
    if known is not None or (described is not None and described.name):
        return known
    left = _possible(trace, device, _work_of_calls(trace))
    return _least(left) if left else None


def _possible(trace: Trace, device: str, calls: pl.DataFrame) -> list[DevicePeaks]:
    mine = pl.col("device").eq_missing(pl.lit(device, pl.String))
    names = trace.device_work.filter(mine & (pl.col("kind") == "compute"))["name"].unique()
    calls_of = trace.launches["name"].unique().to_list()
    text = "\n".join((name or "")[:TELLING] for name in (*names.to_list(), *calls_of))
    vendor = next((vendor for vendor, pattern in _VENDORS if pattern.search(text)), None)
    if vendor is None:
        return []
    targets = _BINARY_FOR.findall(text)
    exact = {_AMD_CAPABILITY.get(amd.lower()) for amd, *_ in targets if amd} if vendor == "AMD" else set()
    since = [int(each) if each else _SINCE[name] for _, each, name in targets if each or name]
    least = max(since, default=0) if vendor == "NVIDIA" else 0
    rows = [row for row in device_table() if row.vendor == vendor and row.capability]
    rows = [row for row in rows if not exact or row.capability in exact]
    rows = [row for row in rows if int((row.capability or "0").replace(".", "")) >= least]
    long = calls.filter(mine & (pl.col("device_ns") >= _LONG_NS))
    return [row for row in rows if not _exceeds(long, row)]


_LONG_NS: Final = 10_000


def _exceeds(calls: pl.DataFrame, row: DevicePeaks) -> bool:
    """Whether any call is too fast for this device."""
    rate = pl.col("number_type").replace_strict(row.flops_s, default=None, return_dtype=pl.Float64)
    moved = (pl.col("bytes").fill_null(0) - (row.cache_bytes or 0)).clip(0) / row.bandwidth_bytes_s
    least_ns = pl.max_horizontal(pl.col("flops") / rate, moved) * 1e9
    counted = calls.filter(~pl.col("fewer"))
    return bool(counted.select((least_ns > MEASURED_WRONG * pl.col("device_ns")).any()).item())


def _least(rows: list[DevicePeaks]) -> DevicePeaks:
    """The least of each figure over these devices."""
    if len(rows) == 1:
        return rows[0]
    kinds = set.intersection(*(set(row.flops_s) for row in rows))
    bf16 = min(row.flops_s.get("bf16", 0.0) for row in rows)
    names = [row.name for row in rows]
    return DevicePeaks(
        name=" or ".join(names) if len(names) == 2 else f"{names[0]} to {names[-1]}",
        matches="",
        capability=min(row.capability or "" for row in rows),
        multiprocessors=min((row.multiprocessors for row in rows if row.multiprocessors), default=None),
        clock_mhz=None,
        memory_bytes=None,
        bandwidth_bytes_s=min(row.bandwidth_bytes_s for row in rows),
        cache_bytes=max(row.cache_bytes or 0 for row in rows),
        flops_s={kind: min(row.flops_s[kind] for row in rows) for kind in kinds},
        best_bf16_flops_s=min(row.best_share for row in rows) * bf16 or None,
        vendor=rows[0].vendor,
    )


def roofline_calls(trace: Trace, *, window: Window | None = None, bounds: bool = False) -> pl.DataFrame:
    """Work and limit of every operator call that itself launched device work.

    Args:
        window: only calls that start in it.
        bounds: where the trace names no device, take the peaks of `peaks_or_bounds`.

    Returns:
        Columns as in CALL_SCHEMA, in order of `row`, one row per device of the call.
    """
    calls = beginning_in(_work_of_calls(trace), window)
    found = dict.fromkeys(calls["device"].unique().to_list(), peaks_or_bounds if bounds else device_peaks)
    peaks = {device: of(trace, device) for device, of in found.items()}
    calls = calls.with_columns(_limits(calls, peaks))
    return conformed(calls, CALL_SCHEMA)


def _work_of_calls(trace: Trace) -> pl.DataFrame:
    """What `_measured` gives, with the work of each call and its start."""
    calls = _measured(trace)
    operators = trace.operators.select(
        "start_ns", operator="name", input_shapes="input_shapes", input_types="input_types"
    ).with_columns(work_of_operators(trace))
    operators = operators.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    calls = calls.join(operators, on="row", how="left", maintain_order="left")
    is_fp32 = (pl.col("number_type") == "fp32") & (pl.col("flops") > 0)
    return calls.with_columns(
        number_type=pl.when(is_fp32 & pl.col("is_tf32")).then(pl.lit("tf32")).otherwise("number_type")
    )


def roofline_table(
    trace: Trace, *, window: Window | None = None, bounds: bool = False, calls: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Operators by shapes, costliest first, with achieved rates and limits; columns as in TABLE_SCHEMA.

    Args:
        window, bounds: as for `roofline_calls`.
        calls: what that returned, if it is known.
    """
    calls = roofline_calls(trace, window=window, bounds=bounds) if calls is None else calls
    keys = [
        "operator", "input_shapes", "input_types", "device", "work_kind", "number_type", "flops", "bytes", "limit"
    ]  # fmt: skip
    table = calls.group_by(keys).agg(
        calls=pl.len().cast(pl.Int64),
        device_ns=pl.col("device_ns").sum(),
        attainable_ns=pl.col("attainable_ns").sum(),
        compute_ns=pl.col("compute_ns").sum(),
        memory_ns=pl.col("memory_ns").sum(),
        **{
            each: pl.col(each).sort_by("device_ns", "kernel", descending=[True, False]).first()
            for each in ("row", "kernel", *OF_LAUNCH)
        },
    )
    total, time = pl.col("device_ns").sum(), pl.when(pl.col("device_ns") > 0).then("device_ns")
    table = table.with_columns(
        device_share=pl.when(total > 0).then(pl.col("device_ns") / total).otherwise(0.0),
        tflop_per_s=pl.when(pl.col("flops") > 0).then(pl.col("flops") * pl.col("calls") / time / 1e3),
        gb_per_s=pl.col("bytes") * pl.col("calls") / time,
        share=pl.when(pl.col("limit").is_not_null()).then(pl.col("attainable_ns") / time),
        compute_share=pl.when(pl.col("limit").is_not_null() & (pl.col("flops") > 0)).then(pl.col("compute_ns") / time),
        bandwidth_share=pl.when(pl.col("limit").is_not_null()).then(pl.col("memory_ns") / time),
    )
    peaks = {device: _peaks_of(trace, device, bounds) for device in table["device"].unique().to_list()}
    told = [_told(trace, row, peaks[row["device"]]) for row in table.iter_rows(named=True)]
    words = pl.DataFrame(told, {"peaks": pl.String, "why": pl.String, "better": pl.String}, orient="row")
    table = pl.concat([table, words], how="horizontal")
    table = _from_cache(table, peaks).sort(["device_ns", *keys], descending=[True, *[False] * len(keys)])
    return conformed(table, TABLE_SCHEMA)


def with_graphs(table: pl.DataFrame, trace: Trace, works: Rows | None = None) -> pl.DataFrame:
    """Add the operators whose kernels were launched in graphs, where their capture is known, to a `roofline_table`.

    Args:
        works: rows of `device_work` to take; None for all.
    """
    in_graphs = graph_calls(trace, np.arange(trace.device_work.height) if works is None else works)
    if in_graphs is None:
        return table
    table = pl.concat([table, roofline_table(in_graphs, bounds=True)])
    total = int(table["device_ns"].sum())
    return table.with_columns(device_share=pl.col("device_ns") / max(total, 1)).sort(
        ["device_ns", "operator"], descending=[True, False]
    )


def _peaks_of(trace: Trace, device: str, bounds: bool) -> DevicePeaks | None:
    return peaks_or_bounds(trace, device) if bounds else device_peaks(trace, device)


NEAR: Final = 0.8
"""Share of what a device can do from which a kernel needs no explanation."""
_BEST_BANDWIDTH: Final = 0.85
"""Share of the memory's bandwidth that good kernels reach."""


def _told(trace: Trace, row: dict[str, Any], peaks: DevicePeaks | None) -> tuple[str | None, str | None, str | None]:
    """Whose peaks were taken, why the kernels stay below their limit, and what does better."""
    name = None if peaks is None else peaks.name
    if row["limit"] is None or peaks is None:
        return name, None, None
    found = reasons(trace, row, peaks)
    if is_near(row["share"] or 0.0, row["limit"], peaks) and device_peaks(trace, row["device"]) is not None:
        large = [each.why for each in found if each.code == "large_capacity"]
        return name, "; ".join(["close to what the device can do", *large]), None
    return name, "; ".join(each.why for each in found), found[0].better


def is_near(share: float, limit: str, peaks: DevicePeaks) -> bool:
    """Whether a share of the limiting peak is close to what the device can do."""
    return share >= NEAR * (peaks.best_share if limit == "compute" else _BEST_BANDWIDTH)


def _measured(trace: Trace) -> pl.DataFrame:
    """Time of the work that each operator launched itself on each device, and the arithmetic in its kernels' names."""
    work = described_work(trace).filter(pl.col("kind").is_in(WORK_KINDS) & pl.col("row").is_not_null())
    calls = work.group_by("row", "device", maintain_order=True).agg(
        device_ns=pl.col("duration_ns").sum(),
        works=pl.len().cast(pl.Int64),
        kernel=pl.col("name").sort_by("duration_ns", "name", descending=[True, False]).first(),
        is_tf32=(pl.col("is_matrix") & (pl.col("precision") == "tf32").fill_null(False)).any(),
        fewer=pl.col("name").str.contains(_FEWER_OPERATIONS).any(),
        **{each: pl.col(each).sort_by("duration_ns", "name", descending=[True, False]).first() for each in OF_LAUNCH},
    )
    return calls.sort("row", "device")


def _limits(calls: pl.DataFrame, peaks: dict[str, DevicePeaks | None]) -> pl.DataFrame:
    keys = ["flops", "bytes", "number_type", "device", "fewer"]
    different = calls.select(keys).unique()
    rows = [
        (None,) * 4
        if (peak := peaks[device]) is None or flops is None or fewer
        else _limit(flops, moved, peak.flops_s.get(kind or ""), peak.bandwidth_bytes_s)
        for flops, moved, kind, device, fewer in different.iter_rows()
    ]
    schema = {name: CALL_SCHEMA[name] for name in ("limit", "attainable_ns", "compute_ns", "memory_ns")}
    found = pl.concat([different, pl.DataFrame(rows, schema, orient="row")], how="horizontal")
    return calls.select(keys).join(found, on=keys, how="left", nulls_equal=True, maintain_order="left").drop(keys)


def _limit(
    flops: int, moved: int | None, peak: float | None, bandwidth: float
) -> tuple[str | None, float | None, float | None, float | None]:
    if flops and peak is None:
        return None, None, None, None
    compute_ns = flops / peak * 1e9 if flops and peak else 0.0
    memory_ns = (moved or 0) / bandwidth * 1e9
    if compute_ns <= 0 and memory_ns <= 0:
        return None, None, None, None
    limit = "compute" if compute_ns > memory_ns else "memory"
    return limit, max(compute_ns, memory_ns), compute_ns, memory_ns


def _from_cache(table: pl.DataFrame, peaks: dict[str, DevicePeaks | None]) -> pl.DataFrame:
    """Mark rows whose tensors came faster than memory allows as "cache", without a share."""
    caches = [0 if peak is None else peak.cache_bytes or 0 for peak in map(peaks.get, table["device"])]
    moved, share = pl.col("bytes").fill_null(0).cast(pl.Float64), pl.col("share").fill_null(0.0)
    beyond = (moved - pl.Series(caches, dtype=pl.Float64)).clip(0) / moved.clip(1)  # the part outside of the cache
    from_cache = (pl.col("limit") == "memory").fill_null(False) & (share > 1) & (share * beyond <= MEASURED_WRONG)
    return table.with_columns(
        limit=pl.when(from_cache).then(pl.lit("cache")).otherwise("limit"), share=pl.when(~from_cache).then("share")
    )
