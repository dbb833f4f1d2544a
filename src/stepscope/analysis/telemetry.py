"""What a run logged and sampled, as tables: each series in a line, and each sample beside the trace's steps."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.trace.telemetry import SAMPLE_SCHEMA, SERIES, Telemetry

SUMMARY_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "source": pl.String,
    "name": pl.String,
    "device": pl.String,
    "unit": pl.String,
    "samples": pl.Int64,  # values, NaN and infinities among them
    "mean": pl.Float64,  # of the finite values, like the next two
    "min": pl.Float64,
    "max": pl.Float64,
    "last": pl.Float64,  # the last value, whatever it is
    "not_finite": pl.Int64,  # values that are NaN or infinite
    "nulls": pl.Int64,  # samples that could not be had
    "missing": pl.String,  # why
}
TIMED_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    **SAMPLE_SCHEMA,
    "start_ns": pl.Int64,  # on the trace's clock; negative before the trace began
    "trace_step": pl.Int64,  # the trace's step at that moment; null outside its steps
}
THROTTLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "device": pl.String,
    "reason": pl.String,
    "samples": pl.Int64,  # in which it held
    "share": pl.Float64,  # of the device's samples
}

THROTTLE_REASONS: Final[dict[int, str]] = {
    0x002: "clocks set by an application",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "kept in step with other devices",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "clocks set for a display",
}
"""Bits of `throttle_reasons` and what they mean, as NVML documents them; bit 0x001 is left out: it means no work."""


def summary_table(telemetry: Telemetry) -> pl.DataFrame:
    """One line a series, also for those of which only the reason for their lack is known; SUMMARY_SCHEMA's columns."""
    value = pl.col("value")
    finite = value.filter(value.is_finite())
    summed = telemetry.samples.group_by(SERIES, maintain_order=True).agg(
        value.count().cast(pl.Int64).alias("samples"),
        finite.mean().alias("mean"),
        finite.min().alias("min"),
        finite.max().alias("max"),
        value.drop_nulls().last().alias("last"),
        (~value.drop_nulls().is_finite()).sum().cast(pl.Int64).alias("not_finite"),
        value.null_count().cast(pl.Int64).alias("nulls"),
    )
    key = ["rank", "source", "name", "device"]
    reasons = telemetry.missing.group_by(key, maintain_order=True).agg(
        pl.col("reason").unique(maintain_order=True).str.join("; ").alias("missing")
    )
    table = summed.join(reasons, on=key, how="full", coalesce=True, nulls_equal=True, maintain_order="left_right")
    counts = ("samples", "not_finite", "nulls")
    return table.with_columns(pl.col(counts).fill_null(0)).select(
        pl.col(name).cast(dtype) for name, dtype in SUMMARY_SCHEMA.items()
    )


def timed_table(telemetry: Telemetry, origin_unix_ns: int, steps: pl.DataFrame) -> pl.DataFrame:
    """Every sample with its place in a trace; columns as in TIMED_SCHEMA.

    Args:
        origin_unix_ns: the wall clock at the trace's time 0, as its metadata has it.
        steps: the trace's steps, as `stepscope.analysis.steps.step_table` finds them.
    """
    samples = telemetry.samples.with_columns((pl.col("unix_ns") - origin_unix_ns).alias("start_ns"))
    spans = steps.sort("start_ns").select(
        "start_ns", pl.col("index").alias("trace_step"), (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    )
    joined = samples.sort("start_ns", maintain_order=True).join_asof(spans, on="start_ns", strategy="backward")
    inside = pl.when(pl.col("start_ns") < pl.col("end_ns")).then("trace_step").alias("trace_step")
    return joined.with_columns(inside).select(list(TIMED_SCHEMA))


def throttle_table(telemetry: Telemetry) -> pl.DataFrame:
    """How often each device was slowed down, and why; columns as in THROTTLE_SCHEMA."""
    masks = telemetry.samples.filter(
        (pl.col("source") == "device") & (pl.col("name") == "throttle_reasons") & pl.col("value").is_between(0, 2**52)
    ).with_columns(pl.col("value").cast(pl.Int64))
    tables = [
        masks.group_by("rank", "device", maintain_order=True).agg(
            pl.lit(reason).alias("reason"),
            ((pl.col("value") // bit) % 2).sum().cast(pl.Int64).alias("samples"),
            ((pl.col("value") // bit) % 2).mean().alias("share"),
        )
        for bit, reason in THROTTLE_REASONS.items()
    ]
    found = pl.concat(tables).filter(pl.col("samples") > 0)
    return found.select(pl.col(name).cast(dtype) for name, dtype in THROTTLE_SCHEMA.items()).sort(
        "rank", "device", "share", descending=[False, False, True], nulls_last=True
    )
