"""Achieved arithmetic and memory rates of operators against the device's peaks.

The roofline model (Williams, Waterman and Patterson, 2009): a call takes at least the longer of its operations over
the peak of their number type and its bytes over the memory's bandwidth. `share` is that time over the measured one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import polars as pl

from stepscope.analysis.operators import arithmetic
from stepscope.analysis.work_formulas import work_of_operators
from stepscope.machine.devices import DevicePeaks, find_device
from stepscope.trace import Trace, Window
from stepscope.trace.metadata import Device
from stepscope.trace.nesting import beginning_in, conformed

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
}

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


def roofline_calls(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """Work and limit of every operator call that itself launched device work.

    Args:
        window: only calls that start in it.

    Returns:
        Columns as in CALL_SCHEMA, in order of `row`, one row per device of the call.
    """
    calls = _measured(trace)
    operators = trace.operators.select(
        "start_ns", operator="name", input_shapes="input_shapes", input_types="input_types"
    ).with_columns(work_of_operators(trace))
    operators = operators.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    calls = calls.join(operators, on="row", how="left", maintain_order="left")
    calls = beginning_in(calls, window)
    is_fp32 = (pl.col("number_type") == "fp32") & (pl.col("flops") > 0)
    calls = calls.with_columns(
        number_type=pl.when(is_fp32 & pl.col("is_tf32")).then(pl.lit("tf32")).otherwise("number_type")
    )
    peaks = {device: device_peaks(trace, device) for device in calls["device"].unique().to_list()}
    calls = calls.with_columns(_limits(calls, peaks))
    return conformed(calls, CALL_SCHEMA)


def roofline_table(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """Operators by shapes, costliest first, with achieved rates and limits; columns as in TABLE_SCHEMA."""
    calls = roofline_calls(trace, window=window)
    keys = [
        "operator", "input_shapes", "input_types", "device", "work_kind", "number_type", "flops", "bytes", "limit"
    ]  # fmt: skip
    table = calls.group_by(keys).agg(
        calls=pl.len().cast(pl.Int64),
        device_ns=pl.col("device_ns").sum(),
        attainable_ns=pl.col("attainable_ns").sum(),
        kernel=pl.col("kernel").sort_by("device_ns", "kernel", descending=[True, False]).first(),
    )
    total, time = pl.col("device_ns").sum(), pl.when(pl.col("device_ns") > 0).then("device_ns")
    table = table.with_columns(
        device_share=pl.when(total > 0).then(pl.col("device_ns") / total).otherwise(0.0),
        tflop_per_s=pl.when(pl.col("flops") > 0).then(pl.col("flops") * pl.col("calls") / time / 1e3),
        gb_per_s=pl.col("bytes") * pl.col("calls") / time,
        share=pl.when(pl.col("limit").is_not_null()).then(pl.col("attainable_ns") / time),
    )
    table = _from_cache(trace, table).sort(["device_ns", *keys], descending=[True, *[False] * len(keys)])
    return conformed(table, TABLE_SCHEMA)


def described_work(trace: Trace) -> pl.DataFrame:
    """Device work with the operator that launched it and the arithmetic in the kernel's name.

    Returns:
        Columns work (row in device_work), name, device, queue, kind, launch, start_ns, duration_ns; row (in operators),
        operator, input_shapes, input_types, is_eligible (as `is_eligible`), null without an operator; and the fields of
            `Arithmetic`.
    """
    operators = trace.operators.select(operator="name", input_shapes="input_shapes", input_types="input_types")
    launching = trace.launches.select(row="operator").with_row_index("launch")
    work = (
        trace.device_work.select("name", "device", "queue", "kind", "launch", "start_ns", "duration_ns")
        .with_row_index("work")
        .join(launching, on="launch", how="left", maintain_order="left")
        .join(operators.with_row_index("row"), on="row", how="left", maintain_order="left")
        .with_columns(pl.col("row").cast(pl.Int64))
    )
    told = pl.DataFrame(
        [(name, *arithmetic(name)) for name in work["name"].unique().to_list()],
        schema={"name": pl.String, "precision": pl.String, "tensor_cores": pl.Boolean, "is_matrix": pl.Boolean},
        orient="row",
    )
    eligible = [name for name in work["operator"].drop_nulls().unique().to_list() if is_eligible(name)]
    return work.join(told, on="name", how="left", maintain_order="left").with_columns(
        is_eligible=pl.col("operator").is_in(eligible)
    )


def _measured(trace: Trace) -> pl.DataFrame:
    """Time of the work that each operator launched itself on each device, and the arithmetic in its kernels' names."""
    work = described_work(trace).filter(pl.col("kind").is_in(WORK_KINDS) & pl.col("row").is_not_null())
    calls = work.group_by("row", "device", maintain_order=True).agg(
        device_ns=pl.col("duration_ns").sum(),
        works=pl.len().cast(pl.Int64),
        kernel=pl.col("name").sort_by("duration_ns", "name", descending=[True, False]).first(),
        is_tf32=(pl.col("is_matrix") & (pl.col("precision") == "tf32").fill_null(False)).any(),
        fewer=pl.col("name").str.contains(_FEWER_OPERATIONS).any(),
    )
    return calls.sort("row", "device")


def _limits(calls: pl.DataFrame, peaks: dict[str, DevicePeaks | None]) -> pl.DataFrame:
    rows: list[tuple[str | None, float | None]] = []
    for flops, moved, kind, device, fewer in calls.select(
        "flops", "bytes", "number_type", "device", "fewer"
    ).iter_rows():
        peak = peaks[device]
        if peak is None or flops is None or fewer:
            rows.append((None, None))
        else:
            rows.append(_limit(flops, moved, peak.flops_s.get(kind or ""), peak.bandwidth_bytes_s))
    return pl.DataFrame(rows, {"limit": pl.String, "attainable_ns": pl.Float64}, orient="row")


def _limit(flops: int, moved: int | None, peak: float | None, bandwidth: float) -> tuple[str | None, float | None]:
    if flops and peak is None:
        return None, None
    compute_ns = flops / peak * 1e9 if flops and peak else 0.0
    memory_ns = (moved or 0) / bandwidth * 1e9
    if compute_ns <= 0 and memory_ns <= 0:
        return None, None
    return ("compute", compute_ns) if compute_ns > memory_ns else ("memory", memory_ns)


def _from_cache(trace: Trace, table: pl.DataFrame) -> pl.DataFrame:
    """Mark rows whose tensors came faster than memory allows as "cache", without a share."""
    peaks = {device: device_peaks(trace, device) for device in table["device"].unique().to_list()}
    caches = [0 if peak is None else peak.cache_bytes or 0 for peak in map(peaks.get, table["device"])]
    moved, share = pl.col("bytes").fill_null(0).cast(pl.Float64), pl.col("share").fill_null(0.0)
    beyond = (moved - pl.Series(caches, dtype=pl.Float64)).clip(0) / moved.clip(1)  # the part outside of the cache
    from_cache = (pl.col("limit") == "memory").fill_null(False) & (share > 1) & (share * beyond <= MEASURED_WRONG)
    return table.with_columns(
        limit=pl.when(from_cache).then(pl.lit("cache")).otherwise("limit"), share=pl.when(~from_cache).then("share")
    )


_ELIGIBLE: Final = re.compile(
    r"^(?:"
    r"aten::(?:_?(?:scaled|grouped|scaled_grouped|int)_mm|mm|bmm|addmm_?|_addmm_activation|baddbmm_?|addbmm_?|matmul|linear"
    r"|_?(?:cudnn|miopen|mps|mkldnn)_(?:convolution|rnn)\w*|miopen_depthwise_convolution\w*|_?convolution\w*|conv(?:_transpose)?[123]d"
    r"|_?slow_conv\w*|_?thnn_conv\w*|_convolution_double_backward"
    r"|_?scaled_dot_product_\w*attention\w*|_?(?:flash|efficient|cudnn|fused|flex)_attention\w*)"
    r"|flash_attn\w*::\w+|xformers\w*::\w*attention\w*"
    r")$"
)

TENSOR_CORE_CALLS: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # row in operators; null if no operator launched the work
    "operator": pl.String,
    "input_shapes": pl.String,  # JSON
    "input_types": pl.String,  # JSON
    "device": pl.String,
    "start_ns": pl.Int64,  # start of the first work
    "device_ns": pl.Int64,  # all computation that it launched itself
    "matrix_ns": pl.Int64,  # part in kernels whose names say matrix product, convolution or attention
    "tensor_core_ns": pl.Int64,  # part of that in kernels whose names say tensor cores
    "precision": pl.String,  # number type of the longest matrix kernel, from its name
    "kernel": pl.String,  # longest matrix kernel, or else the longest kernel
    "used": pl.Boolean,  # whether tensor cores were used; null where kernel names do not show it
}

TENSOR_CORE_TABLE: Final[dict[str, type[pl.DataType]]] = {
    "operator": pl.String,
    "input_shapes": pl.String,
    "input_types": pl.String,
    "precision": pl.String,
    "used": pl.Boolean,
    "calls": pl.Int64,
    "device_ns": pl.Int64,
    "matrix_ns": pl.Int64,
    "tensor_core_ns": pl.Int64,
    "share": pl.Float64,  # share of all eligible operators' device time, 0 to 1
    "kernel": pl.String,  # the costliest one
}


@lru_cache(maxsize=65536)
def is_eligible(operator: str) -> bool:
    """Whether tensor cores can run an operator of this type: matrix products, convolutions, attention."""
    return _ELIGIBLE.match(operator) is not None


def eligible_calls(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """Calls of operators that tensor cores can run, with the computation that each launched itself.

    Work counts for the innermost operator around its launch. A matrix kernel without an operator, such as a graph's, is
    a call of its own.

    Args:
        window: only calls whose first work starts in it.

    Returns:
        Columns as in CALL_SCHEMA, in order of time.
    """
    wanted = pl.col("is_eligible") | (pl.col("operator").is_null() & pl.col("is_matrix"))
    work = described_work(trace).filter((pl.col("kind") == "compute") & wanted.fill_null(False))
    calls = work.group_by(call=pl.coalesce("row", -1 - pl.col("work").cast(pl.Int64))).agg(
        *(pl.col(name).first() for name in ("row", "operator", "input_shapes", "input_types", "device")),
        start_ns=pl.col("start_ns").min(),
        device_ns=pl.col("duration_ns").sum(),
        matrix_ns=pl.col("duration_ns").filter("is_matrix").sum(),
        tensor_core_ns=pl.col("duration_ns").filter(pl.col("tensor_cores").fill_null(False)).sum(),
        precision=_of_longest("precision"),
        kernel=_of_longest("name"),
        used=_used(),
    )
    return conformed(beginning_in(calls, window).sort("start_ns", "call"), TENSOR_CORE_CALLS)


def tensor_core_table(trace: Trace) -> pl.DataFrame:
    """Operators that tensor cores can run, and whether they did, costliest first; as TENSOR_CORE_TABLE."""
    keys = ["operator", "input_shapes", "input_types", "precision", "used"]
    table = (
        eligible_calls(trace)
        .group_by(keys)
        .agg(
            calls=pl.len().cast(pl.Int64),
            device_ns=pl.col("device_ns").sum(),
            matrix_ns=pl.col("matrix_ns").sum(),
            tensor_core_ns=pl.col("tensor_core_ns").sum(),
            kernel=pl.col("kernel").sort_by("device_ns", "kernel", descending=[True, False]).first(),
        )
    )
    total = pl.col("device_ns").sum()
    table = table.with_columns(share=pl.when(total > 0).then(pl.col("device_ns") / total).otherwise(0.0))
    descending = [True, *[False] * len(keys)]
    return table.sort(["device_ns", *keys], descending=descending).select(list(TENSOR_CORE_TABLE))


def _of_longest(column: str) -> pl.Expr:
    """Value of a call's longest work, or of its longest matrix kernel if it has one."""
    order = pl.col(column).sort_by("is_matrix", "duration_ns", "work", descending=[True, True, False])
    return order.first() if column == "name" else order.filter(pl.col("is_matrix").sort(descending=True)).first()


def _used() -> pl.Expr:
    """True if a kernel used tensor cores, False if every matrix kernel is known not to, else null."""
    known_not = (pl.col("tensor_cores").eq(False)).fill_null(False)
    matrix = pl.col("is_matrix")
    return (
        pl.when(pl.col("tensor_cores").fill_null(False).any())
        .then(pl.lit(True))
        .when(matrix.any() & (known_not | ~matrix).all())
        .then(pl.lit(False))
        .otherwise(pl.lit(None, pl.Boolean))
    )
