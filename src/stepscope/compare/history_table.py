"""The history of runs as a table: one row a run, those that were left out as well."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Final

import polars as pl

from stepscope.compare.history import Change, History, LeftOut, RunSeries

HISTORY_SCHEMA: Final[dict[str, type[pl.DataType] | pl.DataType]] = {
    "run": pl.String,
    "started": pl.String,  # wall clock, UTC
    "step_ns": pl.Float64,  # mean of the steps after the warm-up
    "low_ns": pl.Float64,  # the mean's interval
    "high_ns": pl.Float64,
    "steps": pl.Int64,
    "change_share": pl.Float64,  # where a change lies: of the runs from here on against those before
    "git_commit": pl.String,
    "device": pl.String,
    "series": pl.String,
    "place": pl.String,  # the folder it ran in
    "source": pl.String,  # "unprofiled" or "profiled"
    "change_low_share": pl.Float64,
    "change_high_share": pl.Float64,
    "differs": pl.List(pl.String),  # settings that changed with it
    "left_out": pl.String,  # why it is not in the series
}


def history_table(history: History) -> pl.DataFrame:
    """Columns as in HISTORY_SCHEMA; series by series, the earliest run first."""
    rows = [row for series in history.series for row in _rows(series)]
    rows += [_left_out(each) for each in history.left_out]
    return pl.DataFrame(rows, schema=HISTORY_SCHEMA, orient="row")


def series_table(series: RunSeries) -> pl.DataFrame:
    """The runs of one series; columns as in HISTORY_SCHEMA."""
    return pl.DataFrame(list(_rows(series)), schema=HISTORY_SCHEMA, orient="row")


def moment(unix_s: float) -> str:
    """A wall-clock time, such as "2026-01-02 12:00:30 UTC"; empty where it is none that a calendar knows."""
    try:
        return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return ""


def difference_words(name: str, before: str, after: str) -> str:
    """A setting that differs, such as "version of torch: 2.12.0 -> 2.13.0"."""
    return f"{name}: {before or 'not there'} -> {after or 'not there'}"


def _rows(series: RunSeries) -> Iterator[dict[str, Any]]:
    changes = {change.position: change for change in series.changes}
    for position, run in enumerate(series.runs):
        yield {
            "run": run.name,
            "started": moment(run.started_unix_s),
            "step_ns": run.step_ns,
            "low_ns": run.low_ns,
            "high_ns": run.high_ns,
            "steps": run.steps,
            "git_commit": run.settings.get("git commit"),
            "device": run.settings.get("device"),
            "series": series.name,
            "place": series.place,
            "source": series.source,
            **_change(changes.get(position)),
        }
    for each in series.left_out:
        yield {**_left_out(each), "series": series.name, "place": series.place}


def _change(change: Change | None) -> dict[str, Any]:
    if change is None:
        return {}
    return {
        "change_share": change.comparison.change,
        "change_low_share": change.comparison.change_low,
        "change_high_share": change.comparison.change_high,
        "differs": [difference_words(*each) for each in change.differences],
    }


def _left_out(run: LeftOut) -> dict[str, Any]:
    return {"run": run.name, "left_out": run.why}
