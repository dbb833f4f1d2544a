"""What to draw of a run's telemetry: which lines share a plot, each thinned to what an eye can tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final

import polars as pl

from stepscope.analysis.telemetry import throttle_table
from stepscope.trace.telemetry import Telemetry

MAXIMUM_PLOTS: Final = 40
"""Plots in a group, such as what the program logged; the first ones are kept."""
MAXIMUM_LINES: Final = 40
"""Lines in a plot; those with the largest values are kept."""
BUCKETS: Final = 200
"""A longer line keeps the lowest and the highest value of each of so many stretches of the run."""

POINT_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "time_s": pl.Float64,  # since the run's telemetry began
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
    """One series: points as in POINT_SCHEMA, in order of time, and when it was NaN or infinite."""

    label: str
    points: pl.DataFrame
    not_finite_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines of one unit over time; `left_out` counts those that are not drawn."""

    group: str
    title: str
    unit: str
    lines: tuple[PlotLine, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class TelemetryPicture:
    """What a report shows of one rank's telemetry.

    Attributes:
        duration_s: from the first sample to the last.
        recorded_s: when the trace was recorded, on the same clock; None where there is none or its time is not known.
        plots: in the order to draw them.
        plots_left_out: how many more there would be.
        notes: sentences: how devices were slowed down, and what could not be measured.
    """

    duration_s: float
    recorded_s: tuple[float, float] | None
    plots: tuple[Plot, ...]
    plots_left_out: int
    notes: tuple[str, ...]


def telemetry_picture(telemetry: Telemetry, recorded_unix_ns: tuple[int, int] | None = None) -> TelemetryPicture | None:
    """What to draw of one rank's telemetry; None where there are no samples.

    Args:
        recorded_unix_ns: the wall clock at the beginning and end of the trace that is shown beside it.
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


def _plots(timed: pl.DataFrame, duration_s: float) -> list[Plot]:
    lines: dict[tuple[str, str, str], list[PlotLine]] = {}
    for series in timed.partition_by("source", "name", "device", "unit", maintain_order=True):
        first = series.row(0, named=True)
        if (first["source"], first["name"]) not in _NOT_DRAWN:
            title, label = _place(first["source"], first["name"])
            lines.setdefault((_group(first), title, first["unit"] or ""), []).append(_line(label, series, duration_s))
    order = {group: number for number, group in enumerate(dict.fromkeys(_GROUPS.values()))}
    plots = [Plot(*place, *_largest(drawn)) for place, drawn in lines.items()]
    return sorted(plots, key=lambda plot: (order.get(plot.group.rstrip(" 0123456789"), len(order)), plot.group))


def _group(row: dict[str, Any]) -> str:
    group = _GROUPS.get(row["source"], row["source"])
    return group if row["device"] is None else f"{group} {row['device']}"


def _place(source: str, name: str) -> tuple[str, str]:
    """A series' plot, and its name in it: norms of modules and rates of groups stand together."""
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
    """The lowest and the highest value of each stretch of the run; a stretch without any breaks the line."""
    bucket = (pl.col("time_s") / duration_s * BUCKETS).floor().cast(pl.Int64).alias("bucket")
    parts = [
        points.group_by(bucket, maintain_order=True).agg(pl.col(name).get(place).alias(name) for name in POINT_SCHEMA)
        for place in (pl.col("value").arg_min().fill_null(0), pl.col("value").arg_max().fill_null(0))
    ]
    return pl.concat(parts).select(list(POINT_SCHEMA)).unique(maintain_order=True).sort("time_s", maintain_order=True)


def _largest(lines: list[PlotLine]) -> tuple[tuple[PlotLine, ...], int]:
    """The lines with the largest values, and how many are left out."""

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
