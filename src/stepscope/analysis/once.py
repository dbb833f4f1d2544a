"""What a process does once: its first launches, initialisation, compilation inside an operator, capture of graphs.

None of it happens in a step that follows, so it belongs to no typical step. A call is one of a kind if its name says
so, or if it lasts many times as long as the others of its name, in one step only.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.trace import Trace

ONCE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "what": pl.String,  # "graph capture", "initialisation", "first launch", or "operator": inside one, before its work
    "name": pl.String,  # of the call or operator
}

LONGER: Final = 100
"""A call that lasts this many times the median of its name is one of a kind."""
LEAST_CALL_NS: Final = 1_000_000
LEAST_OPERATOR_NS: Final = 20_000_000
"""Operators take milliseconds for many reasons, such as computing on the host."""
_CAN_WAIT: Final = ("synchronise", "copy", "queue_wait")
"""Kinds of calls that last as long as the device takes."""
_BEGINS: Final = r"^(?:cuda|hip|cu)StreamBeginCapture"
_ENDS: Final = r"^(?:cuda|hip|cu)StreamEndCapture"
_INITIALISES: Final = (
    r"^(?:cu|cuda|hip)(?:Module|Library)Load|^(?:cu|cuda|hip)GraphInstantiate|^(?:cu|hip)Init$|^cu(?:Ctx|DevicePrimaryCtx)"
    r"|^(?:cudnn|cublas(?:Lt)?|cusolver\w*|cusparse|cufft|hipblas(?:Lt)?|miopen|rocblas_)[cC]reate(?:_handle)?(?:_v2)?$"
    r"|^(?:nccl|rccl)CommInit"
)


def once_table(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """What host threads did once: columns as in ONCE_SCHEMA, sorted by lane and start; rows may overlap.

    Args:
        steps: as from `step_table`.
    """
    captures = _captures(trace.launches)
    found = pl.concat([captures, _calls(trace.launches, steps), _operators(trace, steps)])
    return found.sort("lane", "start_ns")


def _captures(launches: pl.DataFrame) -> pl.DataFrame:
    """From the begin of a stream's capture to its end on the same thread."""
    begins = launches.filter(pl.col("name").str.contains(_BEGINS)).sort("start_ns")
    ends = launches.filter(pl.col("name").str.contains(_ENDS)).sort("start_ns")
    ends = ends.select("lane", end="start_ns", last=_end())
    pairs = begins.join_asof(
        ends, left_on="start_ns", right_on="end", by="lane", strategy="forward", check_sortedness=False
    )
    pairs = pairs.filter(pl.col("last").is_not_null())
    return _found(pairs.with_columns(duration_ns=pl.col("last") - pl.col("start_ns")), pl.lit("graph capture"))


def _calls(launches: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Calls that initialise something, and those that last far longer than the others of their name."""
    known = pl.col("name").str.contains(_INITIALISES)
    usual = pl.col("duration_ns").median().over("name")
    unlike = (pl.len().over("name") > 1) & (pl.col("duration_ns") >= LONGER * usual)
    long = launches.filter(~pl.col("kind").is_in(_CAN_WAIT)).filter(
        known | (unlike & (pl.col("duration_ns") >= LEAST_CALL_NS))
    )
    first = pl.col("kind").is_in(["launch", "graph_launch"]) & ~pl.col("name").str.contains(_INITIALISES)
    return _found(
        _in_one_step(long, steps), pl.when(first).then(pl.lit("first launch")).otherwise(pl.lit("initialisation"))
    )


def _operators(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Stretches of operators that launch work, before a launch, in which they call nothing for very long.

    A just-in-time compiler works there, for one. Only the time between the calls inside counts, so work that the
    operator does in other operators does not.
    """
    operators = trace.operators.with_row_index("operator").filter(pl.col("duration_ns") >= LEAST_OPERATOR_NS)
    operators = _with_next(operators, trace.launches, "call").filter(pl.col("call") < _end())
    if operators.is_empty():
        return _found(operators, pl.lit("operator"))
    calls = trace.launches.filter(pl.col("operator").is_in(operators["operator"].implode()))
    inner = trace.operators.filter(pl.col("parent").is_in(operators["operator"].implode()))
    inside = pl.concat(
        [
            calls.select("operator", "start_ns", "duration_ns"),
            inner.select(pl.col("parent").alias("operator"), "start_ns", "duration_ns"),
        ]
    ).sort("operator", "start_ns")
    ends = _end().cum_max().over("operator")
    stretches = (
        inside.join(operators.select("operator", "lane", "name", begin="start_ns"), on="operator", how="left")
        .with_columns(begin=pl.coalesce(ends.shift(1).over("operator"), "begin"), end="start_ns")
        .with_columns(start_ns="begin", duration_ns=pl.col("end") - pl.col("begin"))
    )
    long = stretches.filter(pl.col("duration_ns") >= LEAST_OPERATOR_NS)
    return _found(_in_one_step(_without_frames(long, trace.frames), steps), pl.lit("operator"))


def _without_frames(stretches: pl.DataFrame, frames: pl.DataFrame) -> pl.DataFrame:
    """The stretches in which no Python frame begins: an operator may run Python code for as long as it likes."""
    return _with_next(stretches, frames, "frame").filter(pl.col("frame").is_null() | (pl.col("frame") >= _end()))


def _with_next(rows: pl.DataFrame, others: pl.DataFrame, name: str) -> pl.DataFrame:
    """The rows in order, with the start of the first of the others on their thread that begins after them."""
    begins = others.select("lane", pl.col("start_ns"), pl.col("start_ns").alias(name)).sort("start_ns")
    rows = rows.sort("start_ns")
    return rows.join_asof(begins, on="start_ns", by="lane", strategy="forward", check_sortedness=False)


def _end() -> pl.Expr:
    return pl.col("start_ns") + pl.col("duration_ns")


def _in_one_step(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The rows whose name occurs in at most one complete step."""
    steps = steps.filter("complete").sort("start_ns").select(step=pl.int_range(pl.len()), begin="start_ns", end=_end())
    rows = rows.sort("start_ns").join_asof(steps, left_on="start_ns", right_on="begin", strategy="backward")
    inside = pl.when(pl.col("start_ns") < pl.col("end")).then("step")
    return rows.filter(inside.drop_nulls().n_unique().over("name") <= 1)


def _found(rows: pl.DataFrame, what: pl.Expr) -> pl.DataFrame:
    columns = rows.with_columns(what=what).select(*ONCE_SCHEMA)
    return columns.cast(pl.Schema(ONCE_SCHEMA))
