"""What becomes of telemetry: the table of series, the place in a trace, throttling in words, and plots."""

from __future__ import annotations

import math
from typing import Any

import polars as pl
import pytest

from stepscope.analysis.telemetry import (
    BUCKETS,
    SUMMARY_SCHEMA,
    THROTTLE_SCHEMA,
    summary_table,
    telemetry_picture,
    throttle_table,
)
from stepscope.trace.telemetry import MISSING_SCHEMA, SAMPLE_SCHEMA, Telemetry

SECOND = 1_000_000_000


def telemetry(rows: list[tuple[Any, ...]], missing: list[tuple[Any, ...]] | None = None) -> Telemetry:
    """Samples as (source, name, device, unit, seconds, step, value); missing as (source, name, device, reason)."""
    samples = [(0, 1, *row[:4], round(row[4] * SECOND), *row[5:]) for row in rows]
    lacked = [(0, *row, 1) for row in missing or []]
    return Telemetry(
        pl.DataFrame(samples, schema=SAMPLE_SCHEMA, orient="row"),
        pl.DataFrame(lacked, schema=MISSING_SCHEMA, orient="row"),
    )


def loss(seconds: float, step: int | None, value: float | None) -> tuple[Any, ...]:
    return ("log", "loss", None, None, seconds, step, value)


NOTHING = telemetry([])


def test_nothing_is_an_empty_table_each_and_no_picture() -> None:
    assert summary_table(NOTHING).equals(pl.DataFrame(schema=SUMMARY_SCHEMA))
    assert throttle_table(NOTHING).equals(pl.DataFrame(schema=THROTTLE_SCHEMA))
    assert telemetry_picture(NOTHING) is None


def test_the_summary_counts_what_is_no_number_apart() -> None:
    # Given
    values = [1.0, 3.0, math.nan, math.inf, None]
    power = ("device", "power_w", "0")
    given = telemetry([loss(n, n, value) for n, value in enumerate(values)], [(*power, "lost"), (*power, "asleep")])

    # When, then
    assert summary_table(given).rows() == [
        (0, "log", "loss", None, None, 4, 2.0, 1.0, 3.0, math.inf, 2, 1, None),
        (0, "device", "power_w", "0", None, 0, None, None, None, None, 0, 0, "lost; asleep"),
    ]


def test_throttling_in_words() -> None:
    masks = [0x1, 0x4, 0x4 | 0x40, None]
    given = telemetry([("device", "throttle_reasons", "0", "bit mask", n, None, mask) for n, mask in enumerate(masks)])

    assert throttle_table(given).rows() == [
        (0, "0", "software power cap", 2, pytest.approx(2 / 3)),
        (0, "0", "hardware thermal slowdown", 1, pytest.approx(1 / 3)),
    ]


def test_a_long_line_keeps_its_extremes() -> None:
    # Given a spike and a dip among a hundred thousand samples
    values = [1.0] * 100_000
    values[33_333], values[77_777] = 50.0, -50.0
    given = telemetry([loss(n, n, value) for n, value in enumerate(values)])

    # When
    picture = telemetry_picture(given)

    # Then
    assert picture is not None
    points = picture.plots[0].lines[0].points
    assert points.height <= 2 * BUCKETS + 2
    assert points.filter(pl.col("value") != 1.0).select("step", "value").rows() == [(33_333, 50.0), (77_777, -50.0)]


def test_a_long_gap_stays_a_gap() -> None:
    given = telemetry([loss(n, n, None if 4000 < n < 6000 else 1.0) for n in range(10_000)])

    picture = telemetry_picture(given)

    assert picture is not None
    (line,) = picture.plots[0].lines
    values = line.points["value"]
    assert values.is_null().rle_id().n_unique() == 3  # values, nothing, values


def test_norms_share_a_plot_and_metrics_do_not() -> None:
    rows = [
        ("gradient", "gradient_norm", None, None, 0, 0, 1.0),
        ("gradient", "gradient_norm/layers.0", None, None, 0, 0, 2.0),
        ("log", "train/loss", None, None, 1, 0, 1.0),
        ("log", "val/loss", None, None, 1, 0, 1.0),
        ("device", "memory_used_bytes", "1", "bytes", 1, None, 1.0),
        ("device", "memory_bytes", "1", "bytes", 1, None, 2.0),
    ]

    picture = telemetry_picture(telemetry(rows))

    assert picture is not None
    assert [(plot.group, plot.title, [line.label for line in plot.lines]) for plot in picture.plots] == [
        ("Logged", "train/loss", [""]),
        ("Logged", "val/loss", [""]),
        ("Training", "gradient norm", ["", "layers.0"]),
        ("Device 1", "Memory", ["used", "installed"]),
    ]


def test_the_traces_time_is_marked_where_it_overlaps() -> None:
    given = telemetry([loss(at, None, 1.0) for at in (100, 200)])

    def recorded(*seconds: float) -> tuple[float, float] | None:
        picture = telemetry_picture(given, (round(seconds[0] * SECOND), round(seconds[1] * SECOND)))
        assert picture is not None
        return picture.recorded_s

    assert recorded(120, 130) == (20.0, 30.0)
    assert recorded(90, 110) == (-10.0, 10.0)
    assert recorded(10, 20) is None
    assert recorded(210, 220) is None


def test_what_could_not_be_measured_is_said() -> None:
    given = telemetry([loss(0, 0, 1.0)], [("device", name, "0", "Not Supported") for name in ("power_w", "energy_j")])

    picture = telemetry_picture(given)

    assert picture is not None
    assert picture.notes == ("not measured: device 0: power_w, energy_j: Not Supported",)
