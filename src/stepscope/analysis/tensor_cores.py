"""Work that tensor cores (matrix cores on AMD) can do, and whether they did it.

As DLProf's table of eligible operators: an operator is eligible by its type, and used tensor cores if the name of one
of its kernels says so. Names tell it as `stepscope.analysis.kernels.arithmetic` reads them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import polars as pl

from stepscope.analysis.kernels import arithmetic
from stepscope.trace import Trace, Window

_ELIGIBLE: Final = re.compile(
    r"^(?:"
    r"aten::(?:_?(?:scaled|grouped|scaled_grouped|int)_mm|mm|bmm|addmm_?|_addmm_activation|baddbmm_?|addbmm_?|matmul|linear"
    r"|_?(?:cudnn|miopen|mps|mkldnn)_(?:convolution|rnn)\w*|miopen_depthwise_convolution\w*|_?convolution\w*|conv(?:_transpose)?[123]d"
    r"|_?slow_conv\w*|_?thnn_conv\w*|_convolution_double_backward"
    r"|_?scaled_dot_product_\w*attention\w*|_?(?:flash|efficient|cudnn|fused|flex)_attention\w*)"
    r"|flash_attn\w*::\w+|xformers\w*::\w*attention\w*"
    r")$"
)

CALL_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # in operators; null where no operator launched the work
    "operator": pl.String,
    "input_shapes": pl.String,  # JSON
    "input_types": pl.String,  # JSON
    "device": pl.String,
    "start_ns": pl.Int64,  # of the first work
    "device_ns": pl.Int64,  # all computation that it launched itself
    "matrix_ns": pl.Int64,  # of it, kernels whose names say matrix product, convolution or attention
    "tensor_core_ns": pl.Int64,  # of these, kernels whose names say tensor cores
    "precision": pl.String,  # number type of the longest matrix kernel, as its name tells it
    "kernel": pl.String,  # name of the longest matrix kernel, or else of the longest
    "used": pl.Boolean,  # tensor cores; null where the kernels' names do not tell
}

TABLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "operator": pl.String,
    "input_shapes": pl.String,
    "input_types": pl.String,
    "precision": pl.String,
    "used": pl.Boolean,
    "calls": pl.Int64,
    "device_ns": pl.Int64,
    "matrix_ns": pl.Int64,
    "tensor_core_ns": pl.Int64,
    "share": pl.Float64,  # of all eligible operators' device time, 0 to 1
    "kernel": pl.String,  # the costliest
}


@lru_cache(maxsize=65536)
def is_eligible(operator: str) -> bool:
    """Whether an operator's type is one that tensor cores can work for: matrix products, convolutions, attention."""
    return _ELIGIBLE.match(operator) is not None


def eligible_calls(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """The calls of operators that tensor cores can work for, with the computation that each launched itself.

    Work counts for the innermost operator around its launch. A matrix kernel that no operator launched, such as a
    graph's, is a call of its own without an operator.

    Args:
        window: only calls whose first work starts in this stretch of time.

    Returns:
        Columns as in CALL_SCHEMA, in order of time.
    """
    calls = (
        _matrix_work(trace)
        .group_by("call")
        .agg(
            *(pl.col(name).first() for name in ("row", "operator", "input_shapes", "input_types", "device")),
            start_ns=pl.col("start_ns").min(),
            device_ns=pl.col("duration_ns").sum(),
            matrix_ns=pl.col("duration_ns").filter("is_matrix").sum(),
            tensor_core_ns=pl.col("duration_ns").filter(pl.col("tensor_cores").fill_null(False)).sum(),
            precision=_of_longest("precision"),
            kernel=_of_longest("name"),
            used=_used(),
        )
    )
    if window is not None:
        calls = calls.filter(pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left"))
    columns = [pl.col(name).cast(kind) for name, kind in CALL_SCHEMA.items()]
    return calls.sort("start_ns", "call").select(columns)


def tensor_core_table(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """Operators that tensor cores can work for, by type and shape, and whether they used them; the costliest first.

    Args:
        window: as in `eligible_calls`.

    Returns:
        Columns as in TABLE_SCHEMA.
    """
    keys = ["operator", "input_shapes", "input_types", "precision", "used"]
    table = (
        eligible_calls(trace, window=window)
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
    return table.sort(["device_ns", *keys], descending=descending).select(list(TABLE_SCHEMA))


def _matrix_work(trace: Trace) -> pl.DataFrame:
    """Computation of eligible operators, and matrix kernels of none, with what their names tell; `call` groups them."""
    operators = trace.operators.select(operator="name", input_shapes="input_shapes", input_types="input_types")
    launching = trace.launches.select(row="operator").with_row_index("launch")
    work = (
        trace.device_work.filter(pl.col("kind") == "compute")
        .select("name", "device", "launch", "start_ns", "duration_ns")
        .with_row_index("work")
        .join(launching, on="launch", how="left", maintain_order="left")
        .join(operators.with_row_index("row"), on="row", how="left", maintain_order="left")
    )
    names = work["name"].unique().to_list()
    told = pl.DataFrame(
        [(name, *arithmetic(name)) for name in names],
        schema={"name": pl.String, "precision": pl.String, "tensor_cores": pl.Boolean, "is_matrix": pl.Boolean},
        orient="row",
    )
    eligible = [name for name in work["operator"].drop_nulls().unique().to_list() if is_eligible(name)]
    work = work.join(told, on="name", how="left", maintain_order="left")
    wanted = pl.col("operator").is_in(eligible) | (pl.col("operator").is_null() & pl.col("is_matrix"))
    alone = -1 - pl.col("work").cast(pl.Int64)
    return work.filter(wanted.fill_null(False)).with_columns(
        pl.col("row").cast(pl.Int64), call=pl.coalesce(pl.col("row").cast(pl.Int64), alone)
    )


def _of_longest(column: str) -> pl.Expr:
    """Of a call's works the value of the longest, among those that are matrix kernels if any is."""
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
