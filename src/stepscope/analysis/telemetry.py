"""Logged and sampled telemetry as tables: a summary of each series, and each sample with the trace's step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final

import polars as pl

from stepscope.trace.nesting import conformed
from stepscope.trace.telemetry import SERIES, Telemetry

SUMMARY_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "source": pl.String,
    "name": pl.String,
    "device": pl.String,
    "unit": pl.String,
    "samples": pl.Int64,  # number of values, including NaN and infinities
    "mean": pl.Float64,  # mean, min, max: of the finite values
    "min": pl.Float64,
    "max": pl.Float64,
    "last": pl.Float64,  # last value, finite or not
    "not_finite": pl.Int64,  # values that are NaN or infinite
    "nulls": pl.Int64,  # samples without a value
    "missing": pl.String,  # why there are no values
}
THROTTLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "device": pl.String,
    "reason": pl.String,
    "samples": pl.Int64,  # samples with this reason
    "share": pl.Float64,  # share of the device's samples
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
"""Bits of `throttle_reasons` and their meaning, as documented by NVML; bit 0x001 (idle) is left out."""


def summary_table(telemetry: Telemetry) -> pl.DataFrame:
    """Summary with one row per series, including those without values; columns of SUMMARY_SCHEMA."""
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
    return conformed(table.with_columns(pl.col(counts).fill_null(0)), SUMMARY_SCHEMA)


def throttle_table(telemetry: Telemetry) -> pl.DataFrame:
    """How often each device was throttled, and why; columns as in THROTTLE_SCHEMA."""
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
    return conformed(found, THROTTLE_SCHEMA).sort(
        "rank", "device", "share", descending=[False, False, True], nulls_last=True
    )


MAXIMUM_PLOTS: Final = 40
"""Most plots in a group, such as logged values; the first are kept."""
MAXIMUM_LINES: Final = 40
"""Most lines in a plot; those with the largest values are kept."""
BUCKETS: Final = 200
"""Intervals of the run for thinning: a longer line keeps the lowest and highest value of each."""

POINT_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "time_s": pl.Float64,  # since the start of the run's telemetry
    "step": pl.Int64,
    "value": pl.Float64,  # null breaks the line
}

_GROUPS: Final = {
    "log": "Logged",
    "throughput": "Throughput",
    "optimizer": "Training",
    "gradient": "Training",
    "activation": "Training",
    "device": "Device",
    "process": "This process and its children",
    "machine": "The whole machine",
}
_SAMPLED: Final = {
    ("device", "utilization_share"): ("Utilization", "kernels run"),
    ("device", "memory_utilization_share"): ("Utilization", "memory is moved"),
    ("device", "memory_used_bytes"): ("Memory", "used"),
    ("device", "memory_bytes"): ("Memory", "installed"),
    ("device", "power_w"): ("Power", ""),
    ("device", "temperature_c"): ("Temperature", ""),
    ("device", "sm_clock_mhz"): ("Clocks", "processors"),
    ("device", "memory_clock_mhz"): ("Clocks", "memory"),
    ("process", "cpu_cores"): ("Processor", ""),
    ("process", "memory_bytes"): ("Memory", ""),
    ("process", "disk_read_bytes_per_s"): ("Disk", "read"),
    ("process", "disk_write_bytes_per_s"): ("Disk", "written"),
    ("process", "processes"): ("Processes and threads", "processes"),
    ("process", "threads"): ("Processes and threads", "threads"),
    ("machine", "cpu_share"): ("Processor", ""),
    ("machine", "memory_used_bytes"): ("Memory", "used"),
    ("machine", "memory_bytes"): ("Memory", "installed"),
    ("machine", "swap_used_bytes"): ("Memory", "swapped out"),
    ("machine", "disk_read_bytes_per_s"): ("Disk", "read"),
    ("machine", "disk_write_bytes_per_s"): ("Disk", "written"),
    ("machine", "network_received_bytes_per_s"): ("Network", "received"),
    ("machine", "network_sent_bytes_per_s"): ("Network", "sent"),
}
_NOT_DRAWN: Final = {("device", "throttle_reasons"), ("device", "energy_j")}


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One series: points as in POINT_SCHEMA, in order of time, and the times of NaN and infinities."""

    label: str
    points: pl.DataFrame
    not_finite_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TelemetryPlot:
    """Lines of one unit over time; `left_out` counts lines that are not drawn."""

    group: str
    title: str
    unit: str
    lines: tuple[PlotLine, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class TelemetryPicture:
    """Telemetry of one rank as shown in a report."""

    duration_s: float  # from the first sample to the last
    # time of the trace's recording, on the same clock; None without a trace or its time
    recorded_s: tuple[float, float] | None
    plots: tuple[TelemetryPlot, ...]  # in drawing order
    plots_left_out: int  # number of further plots
    notes: tuple[str, ...]  # sentences about throttling and missing measurements


def telemetry_picture(telemetry: Telemetry, recorded_unix_ns: tuple[int, int] | None = None) -> TelemetryPicture | None:
    """Build the plots of one rank's telemetry; None without samples.

    Args:
        recorded_unix_ns: wall-clock start and end of the trace shown beside it.
    """
    samples = telemetry.samples
    if samples.is_empty():
        return None
    begin_ns, end_ns = samples.select(pl.col("unix_ns").min(), pl.col("unix_ns").max().alias("end")).row(0)
    timed = samples.with_columns(((pl.col("unix_ns") - begin_ns) / 1e9).alias("time_s"))
    plots = _plots(timed, max((end_ns - begin_ns) / 1e9, 1e-9))
    kept = [plot for _, group in groupby(plots, attrgetter("group")) for plot in islice(group, MAXIMUM_PLOTS)]
    recorded = None
    if recorded_unix_ns is not None and recorded_unix_ns[1] >= begin_ns and recorded_unix_ns[0] <= end_ns:
        recorded = ((recorded_unix_ns[0] - begin_ns) / 1e9, (recorded_unix_ns[1] - begin_ns) / 1e9)
    return TelemetryPicture(
        duration_s=(end_ns - begin_ns) / 1e9,
        recorded_s=recorded,
        plots=tuple(kept),
        plots_left_out=len(plots) - len(kept),
        notes=tuple(_notes(telemetry)),
    )


def _plots(timed: pl.DataFrame, duration_s: float) -> list[TelemetryPlot]:
    lines: dict[tuple[str, str, str], list[PlotLine]] = {}
    for series in timed.partition_by("source", "name", "device", "unit", maintain_order=True):
        first = series.row(0, named=True)
        if (first["source"], first["name"]) not in _NOT_DRAWN:
            title, label = _place(first["source"], first["name"])
            lines.setdefault((_group(first), title, first["unit"] or ""), []).append(_line(label, series, duration_s))
    order = {group: number for number, group in enumerate(dict.fromkeys(_GROUPS.values()))}
    plots = [TelemetryPlot(*place, *_largest(drawn)) for place, drawn in lines.items()]
    return sorted(plots, key=lambda plot: (order.get(plot.group.rstrip(" 0123456789"), len(order)), plot.group))


def _group(row: dict[str, Any]) -> str:
    group = _GROUPS.get(row["source"], row["source"])
    return group if row["device"] is None else f"{group} {row['device']}"


def _place(source: str, name: str) -> tuple[str, str]:
    """The plot of a series, and its name there: norms of modules share a plot, and so do rates of groups."""
    if (source, name) in _SAMPLED:
        return _SAMPLED[source, name]
    if source in ("gradient", "activation", "optimizer"):
        kind, _, member = name.partition("/")
        return kind.replace("_", " "), member
    return name.replace("_per_s", " a second") if source == "throughput" else name, ""


def _line(label: str, series: pl.DataFrame, duration_s: float) -> PlotLine:
    value = pl.col("value")
    odd = series.filter(value.is_not_null() & ~value.is_finite())["time_s"]
    points = series.select(list(POINT_SCHEMA)).filter(value.is_null() | value.is_finite())
    if points.height > 2 * BUCKETS:
        points = _thinned(points, duration_s)
    return PlotLine(label, points, tuple(odd.gather_every(max(odd.len() // BUCKETS, 1)).to_list()))


def _thinned(points: pl.DataFrame, duration_s: float) -> pl.DataFrame:
    """Lowest and highest value of each interval of the run; an empty interval breaks the line."""
    bucket = (pl.col("time_s") / duration_s * BUCKETS).floor().cast(pl.Int64).alias("bucket")
    parts = [
        points.group_by(bucket, maintain_order=True).agg(pl.col(name).get(place).alias(name) for name in POINT_SCHEMA)
        for place in (pl.col("value").arg_min().fill_null(0), pl.col("value").arg_max().fill_null(0))
    ]
    return pl.concat(parts).select(list(POINT_SCHEMA)).unique(maintain_order=True).sort("time_s", maintain_order=True)


def _largest(lines: list[PlotLine]) -> tuple[tuple[PlotLine, ...], int]:
    """Lines with the largest values, and the number left out."""

    def peak(line: PlotLine) -> float:
        return max(line.points["value"].drop_nulls().to_list(), default=float("-inf"))

    if len(lines) > 8:
        lines = sorted(lines, key=peak, reverse=True)
    return tuple(lines[:MAXIMUM_LINES]), max(len(lines) - MAXIMUM_LINES, 0)


def _notes(telemetry: Telemetry) -> Iterable[str]:
    for row in throttle_table(telemetry).iter_rows(named=True):
        yield f"device {row['device']} was held back in {row['share']:.1%} of the samples: {row['reason']}"
    reasons = telemetry.missing.group_by("source", "device", "reason", maintain_order=True).agg("name")
    for row in reasons.iter_rows(named=True):
        names = list(dict.fromkeys(row["name"]))
        few = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        what = f"device {row['device']}" if row["device"] is not None else row["source"]
        yield f"not measured: {what}: {few}: {row['reason']}"
