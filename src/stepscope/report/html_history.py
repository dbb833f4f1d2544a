"""The history of runs for a browser: for each series a plot with the intervals, what changed and when, and the runs."""

from __future__ import annotations

import math
from typing import Final

import polars as pl

from stepscope.compare.history import History, PlacedRun, RunSeries
from stepscope.compare.history_table import moment, series_table
from stepscope.report.format import duration, printable
from stepscope.report.history_text import (
    SOURCE_WORDS,
    change_sentence,
    commits_between,
    difference_rows,
    plot_range,
    series_sentences,
)
from stepscope.report.html import page
from stepscope.report.html_picture import View
from stepscope.report.html_table import table_view

_HIDDEN: Final = ("series", "place", "source", "change_low_share", "change_high_share", "left_out")
_UNITS: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def html_history(history: History) -> bytes:
    """The page: it needs no network, and no name in it is ever markup."""
    left_out = [{"name": printable(run.name), "why": printable(run.why)} for run in history.left_out]
    series = [_series(number, each) for number, each in enumerate(history.series)]
    title = series[0]["name"] if len(series) == 1 else "Runs over time"
    return page("history.html.j2", title=title, series=series, left_out=left_out)


def _series(number: int, series: RunSeries) -> View:
    low, high = _range(series)
    ticks, digits, (divisor, unit) = _ticks(low, high)
    low, high = ticks[0], ticks[-1]
    first, last = series.runs[0], series.runs[-1]
    return {
        "id": f"s{number}",
        "name": printable(series.name),
        "place": printable(series.place),
        "count": len(series.runs),
        "source": SOURCE_WORDS[series.source],
        "first": moment(first.started_unix_s),
        "last": moment(last.started_unix_s),
        "ticks": [f"{tick / divisor:.{digits}f} {unit}" for tick in reversed(ticks)],
        "runs": [_dot(run, (at + 0.5) / len(series.runs), low, high) for at, run in enumerate(series.runs)],
        "levels": _levels(series, low, high),
        "marks": [100 * change.position / len(series.runs) for change in series.changes],
        "changes": [
            {
                "sentence": change_sentence(series, change),
                "worse": change.comparison.verdict == "slower",
                "differences": difference_rows(change),
                "commits": commits_between(change),
            }
            for change in series.changes
        ],
        "sentences": series_sentences(series),
        "table": _table(series),
        "left_out": [{"name": printable(run.name), "why": printable(run.why)} for run in series.left_out],
    }


def _range(series: RunSeries) -> tuple[float, float]:
    """From the lowest end of an interval to the highest; a wild interval of few steps does not press the rest flat."""
    low, high = plot_range([run.step_ns for run in series.runs])
    ends = [end for run in series.runs for end in (run.low_ns, run.high_ns) if end is not None]
    room = high - low
    return max(min([low, *ends]), low - room, 0.0), min(max([high, *ends]), high + room)


def _dot(run: PlacedRun, across: float, low: float, high: float) -> View:
    def up(ns: float) -> float:
        return min(max(100 * (ns - low) / (high - low), 0.0), 100.0)

    interval = None
    words = ""
    if run.low_ns is not None and run.high_ns is not None:
        interval = {"bottom": up(run.low_ns), "height": up(run.high_ns) - up(run.low_ns)}
        words = f"\n95 % interval: {duration(run.low_ns)} to {duration(run.high_ns)}, {run.steps} steps"
    commit = run.settings.get("git commit")
    about = f"{printable(run.name)}: {duration(run.step_ns)}{words}\n{moment(run.started_unix_s)}"
    return {
        "left": 100 * across,
        "bottom": up(run.step_ns),
        "interval": interval,
        "about": about + (f"\ncommit {printable(commit)}" if commit else ""),
    }


def _levels(series: RunSeries, low: float, high: float) -> list[View]:
    """The mean of the runs between two changes, as lines."""
    count = len(series.runs)
    bounds = [0, *(change.position for change in series.changes), count]
    means = [change.comparison.before_ns for change in series.changes]
    means += [change.comparison.after_ns for change in series.changes[-1:]]
    return [
        {"left": 100 * begin / count, "width": 100 * (end - begin) / count, "bottom": 100 * (ns - low) / (high - low)}
        for begin, end, ns in zip(bounds, bounds[1:], means, strict=False)
        if ns is not None
    ]


def _ticks(low: float, high: float) -> tuple[list[float], int, tuple[float, str]]:
    """Round numbers from below the lowest time to above the highest, their digits, and the unit to write them in."""
    rough = max((high - low) / 4, 1e-3)
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    unit = next((each for each in _UNITS if high >= each[0]), _UNITS[-1])
    digits = max(0, math.ceil(-math.log10(step / unit[0]) - 1e-9))
    return [each * step for each in range(first, max(last, first + 1) + 1)], digits, unit


def _table(series: RunSeries) -> View:
    """The runs, the latest first, as the page's sortable table."""
    table = series_table(series)
    table = table.filter(table["left_out"].is_null()).drop(_HIDDEN).reverse()
    table = table.drop([name for name in ("git_commit", "device") if set(table[name]) <= {None, "none"}])
    if table["change_share"].null_count() == table.height:
        table = table.drop("change_share", "differs")
    else:
        table = table.with_columns(pl.col("differs").list.join("; "))
    return table_view(table)
