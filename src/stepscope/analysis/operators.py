"""Operators: number of calls, host and device time, and allocations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import host_activity
from stepscope.analysis.rows import at, nullable, row_numbers
from stepscope.analysis.steps import span_of, step_table
from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode
from stepscope.trace.nesting import Rows, by_level, depths, innermost_at

GROUPINGS: Final = ("name", "input_shapes", "stack")

COST_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "host_self_ns": pl.Int64,  # without nested operators
    "device_self_ns": pl.Int64,  # work launched by the operator itself
    "device_total_ns": pl.Int64,  # including work launched by nested operators
    "bytes_allocated": pl.Int64,  # without nested operators
}


def operator_costs(trace: Trace) -> pl.DataFrame:
    """Cost of each operator call: one row per row of `operators`, in order; columns as in COST_SCHEMA."""
    operators = trace.operators
    duration = operators["duration_ns"].to_numpy()
    parent = row_numbers(operators["parent"])
    children = np.zeros(len(duration), np.int64)
    inside = parent >= 0
    np.add.at(children, parent[inside], duration[inside])
    device = _device_self_ns(trace)
    return pl.DataFrame(
        {
            "host_self_ns": np.maximum(duration - children, 0),
            "device_self_ns": device,
            "device_total_ns": with_inner(device, parent),
            "bytes_allocated": _bytes_allocated(trace),
        }
    )


def with_inner(values: Rows, parent: Rows) -> Rows:
    """Each operator's value plus those of all nested operators; shape (n,)."""
    total: Rows = values.copy()
    for rows in reversed(by_level(depths(parent))[1:]):
        np.add.at(total, parent[rows], total[rows])
    return total


def _device_self_ns(trace: Trace) -> Rows:
    work = trace.device_work.filter(pl.col("launch").is_not_null())
    operator = row_numbers(trace.launches["operator"].gather(work["launch"]))
    result = np.zeros(trace.operators.height, np.int64)
    np.add.at(result, operator[operator >= 0], work["duration_ns"].to_numpy()[operator >= 0])
    return result


def _bytes_allocated(trace: Trace) -> Rows:
    memory = trace.memory.filter(pl.col("bytes") > 0)
    result = np.zeros(trace.operators.height, np.int64)
    rows = innermost_operators(trace, memory)
    np.add.at(result, rows[rows >= 0], memory["bytes"].to_numpy()[rows >= 0])
    return result


def innermost_operators(trace: Trace, events: pl.DataFrame) -> Rows:
    """Row of the innermost operator around each event, by lane and start_ns; -1 for none."""
    if trace.operators.is_empty():
        return np.full(events.height, -1, np.int64)
    lanes, starts, durations = (trace.operators[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
    parent = row_numbers(trace.operators["parent"])
    asked = events["lane"].to_numpy(), events["start_ns"].to_numpy()
    return innermost_at(*asked, lanes, starts, durations, parent)


def operator_table(
    trace: Trace,
    *,
    group_by: Sequence[str] = ("name",),
    costs: pl.DataFrame | None = None,
    steps: pl.DataFrame | None = None,
    user_code: UserCode = DEFAULT_USER_CODE,
) -> pl.DataFrame:
    """Group operators, costliest first.

    Args:
        group_by: any of "name", "input_shapes" and "stack" (the user's line as "file(line): function" where the
            recording kept lines, else the user's innermost frame, else the call stack).
        user_code: which files are the user's.

    Returns:
        The grouping columns, then calls, calls_per_step (in complete steps; null without steps), host_total_ns,
        host_self_ns, host_self_share (of all operators' self time, 0 to 1), device_total_ns, device_self_ns,
        device_self_share, bytes_allocated. Totals include nested operators, so they do not add up to the whole.

    Raises:
        UsageError: a grouping is unknown.
    """
    check_groupings("operators", group_by, GROUPINGS)
    rows = pl.concat([trace.operators, operator_costs(trace) if costs is None else costs], how="horizontal")
    if "stack" in group_by:
        rows = rows.with_columns(stack=_user_frames(trace, user_code))
    steps = (step_table(trace) if steps is None else steps).filter(pl.col("complete"))
    table = rows.group_by(list(group_by)).agg(
        calls=pl.len(),
        calls_per_step=calls_in_steps(steps, pl.col("start_ns")),
        host_total_ns=pl.col("duration_ns").sum(),
        host_self_ns=pl.col("host_self_ns").sum(),
        device_total_ns=pl.col("device_total_ns").sum(),
        device_self_ns=pl.col("device_self_ns").sum(),
        bytes_allocated=pl.col("bytes_allocated").sum(),
    )
    table = table.with_columns(
        host_self_share=share_of_sum("host_self_ns"), device_self_share=share_of_sum("device_self_ns")
    )
    order = "device_self_ns" if trace.device_work.height else "host_self_ns"
    columns = [
        *group_by, "calls", "calls_per_step", "host_total_ns", "host_self_ns", "host_self_share", "device_total_ns",
        "device_self_ns", "device_self_share", "bytes_allocated",
    ]  # fmt: skip
    return table.select(columns).sort(
        [order, "host_self_ns", *group_by], descending=[True, True, *[False] * len(group_by)]
    )


def check_groupings(things: str, group_by: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for unknown groupings."""
    unknown = [name for name in group_by if name not in known]
    if unknown or not group_by:
        raise UsageError(f"{things} can be grouped by {', '.join(known)}, not by {', '.join(unknown) or 'nothing'}")


def calls_in_steps(steps: pl.DataFrame, time: pl.Expr) -> pl.Expr:
    """Expression for the number of calls with `time` in these steps per step; null without steps."""
    span = span_of(steps)
    if span is None:
        return pl.lit(None, pl.Float64)
    return time.is_between(span.start_ns, span.end_ns, closed="left").sum() / steps.height


def share_of_sum(column: str) -> pl.Expr:
    """Expression for a column as a share of its sum, 0 to 1."""
    total = pl.col(column).sum()
    return pl.when(total > 0).then(pl.col(column) / total).otherwise(0.0)


def _user_frames(trace: Trace, user_code: UserCode) -> pl.Series:
    activity = host_activity(trace, user_code)
    slices = activity.slices_of("operators")
    names = trace.frames["name"].gather(nullable(at(activity.user_frame, slices)))
    line = pl.format("{}({}): {}", "source_file", "source_line", "source_function")
    return trace.operators.select(stack=pl.coalesce(line, names.alias("frame"), pl.col("call_stack")))["stack"]
