"""The history of runs for a terminal: for each series what changed and when, a plot, and the runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from stepscope import __version__
from stepscope.compare.history import CONFIDENCE, FEWEST_RUNS, Change, History, LeftOut, RunSeries, moment, series_table
from stepscope.report.comparison import change_words, interval_words, share_of, verdict_sentence
from stepscope.report.format import count, duration, printable, printable_json, share
from stepscope.report.tables import table_lines

SOURCE_WORDS: Final = {
    "unprofiled": "steps without the profiler",
    "profiled": "steps slowed down by the profiler",
}
PLOT_ROWS: Final = 8
_WIDEST: Final = 4
"""Columns a run takes in the plot where there are few."""
_MOST_DIFFERENCES: Final = 12
_SMALLEST_SPREAD: Final = 0.02
"""A plot spans at least this share of the step: less would make chance look large."""
_OVERVIEW_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "series": pl.String,
    "runs": pl.Int64,
    "changes": pl.Int64,
    "last_change_share": pl.Float64,
    "latest_step_ns": pl.Float64,
    "latest_run": pl.String,
    "steps": pl.String,
    "place": pl.String,
}
_HIDDEN: Final = ("series", "place", "source", "change_low_share", "change_high_share", "differs", "left_out")


def history_lines(history: History, *, width: int, top: int, overview: bool) -> Iterator[str]:
    """The whole report, line by line.

    Args:
        top: runs of a series at most, the latest ones; of an overview, series; 0 for all.
        overview: one line a series instead of everything about each, where there are several.
    """
    if overview and len(history.series) > 1:
        yield from _overview_lines(history, width, top)
    else:
        for number, series in enumerate(history.series):
            if number:
                yield ""
            yield from _series_lines(series, width, top)
    if history.left_out:
        yield from ["", *_left_out_lines(history.left_out)] if history.series else _left_out_lines(history.left_out)


def series_sentences(series: RunSeries) -> list[str]:
    """What a series shows where it shows no change, and what it may show; the changes have lines of their own."""
    sentences = []
    if len(series.runs) < FEWEST_RUNS:
        runs = f"{len(series.runs)} run{'s' if len(series.runs) > 1 else ''}"
        sentences.append(f"With {runs} no change can be told from chance: it takes {FEWEST_RUNS} or more.")
    elif not series.changes:
        least = series.smallest_detectable
        known = least is not None and 0 < least < 1
        could = f"; one of {share(least)} halfway would most likely have been" if known and least is not None else ""
        sentences.append(f"No change is shown{could}.")
    if series.doubtful:
        places = "One place" if series.doubtful == 1 else f"{series.doubtful} places"
        sentences.append(
            f"{places} looked like a change, but the runs before and after do not differ by more than chance."
        )
    if series.latest is not None:
        sentences.append(
            f"The latest run, {printable(series.runs[-1].name)}, stands apart from those before it. "
            f"{verdict_sentence(series.latest)} One run is not yet a change: run it again."
        )
    return sentences


def change_sentence(series: RunSeries, change: Change) -> str:
    """When, by how much and from what to what, with the interval."""
    run, found = series.runs[change.position], change.comparison
    known = found.change is not None and found.change_low is not None and found.change_high is not None
    much = ""
    if known and found.change is not None and found.change_low is not None and found.change_high is not None:
        interval = interval_words(found.change_low, found.change_high)
        much = f"{change_words(found.change)} ({share_of(CONFIDENCE)} interval: {interval}), "
    runs = f"{count(found.before_runs)} runs before, {count(found.after_runs)} from there on"
    times = f"{duration(found.after_ns or 0.0)} a step instead of {duration(found.before_ns or 0.0)}"
    since = f"{found.verdict.capitalize()} from {printable(run.name)} on, {moment(run.started_unix_s)}"
    return f"{since}: {much}{times} ({runs})."


def difference_rows(change: Change) -> list[tuple[str, str, str]]:
    """The settings that differ: name, before, after; ready to print."""
    return [
        (printable(name), printable(before) or "not there", printable(after) or "not there")
        for name, before, after in change.differences
    ]


def commits_between(change: Change) -> str:
    """The command that lists the commits between the two runs; empty where there are none to list."""
    commits = next(((before, after) for name, before, after in change.differences if name == "git commit"), None)
    if commits is None or not all(commits):
        return ""
    first, second = (printable(commit).split(" ")[0] for commit in commits)
    return f"git log --oneline {first}..{second}" if first != second else ""


def _series_lines(series: RunSeries, width: int, top: int) -> Iterator[str]:
    place = f", in {printable(series.place)}" if series.place else ""
    yield f"{printable(series.name)}: {count(len(series.runs))} run{'s' if len(series.runs) > 1 else ''}{place}"
    yield f"Mean time of {SOURCE_WORDS[series.source]}, from {moment(series.runs[0].started_unix_s)} on."
    yield ""
    if len(series.runs) > 1:
        yield from plot_lines(series, width)
        yield ""
    for change in series.changes:
        yield change_sentence(series, change)
        yield from _difference_lines(change)
    yield from series_sentences(series)
    yield ""
    yield from _run_lines(series, width, top)
    if series.left_out:
        yield ""
        yield from _left_out_lines(series.left_out)


def _overview_lines(history: History, width: int, top: int) -> Iterator[str]:
    shown = history.series[:top] if top else history.series
    yield from _table(overview_table(shown), width)
    if len(shown) < len(history.series):
        yield f"showing the latest {len(shown):,} of {len(history.series):,} series, --top 0 for all"
    yield "stepscope history SERIES shows one of them."


def overview_table(series: Sequence[RunSeries]) -> pl.DataFrame:
    """One row a series: its name, how many runs and changes, the last change, the latest run, which steps, where."""
    rows = [
        {
            "series": each.name,
            "runs": len(each.runs),
            "changes": len(each.changes),
            "last_change_share": each.changes[-1].comparison.change if each.changes else None,
            "latest_step_ns": each.runs[-1].step_ns,
            "latest_run": moment(each.runs[-1].started_unix_s),
            "steps": each.source,
            "place": each.place,
        }
        for each in series
    ]
    return pl.DataFrame(rows, schema=_OVERVIEW_SCHEMA, orient="row")


def _difference_lines(change: Change) -> Iterator[str]:
    rows = difference_rows(change)
    if not rows:
        yield "  nothing that run.json holds differs between the run before and this one"
    names = max((len(name) for name, _, _ in rows), default=0)
    for name, before, after in rows[:_MOST_DIFFERENCES]:
        yield f"  {name:<{names}}  {before} -> {after}"
    if len(rows) > _MOST_DIFFERENCES:
        yield f"  and {len(rows) - _MOST_DIFFERENCES} settings more; --json - has all"
    if commits := commits_between(change):
        yield f"  {commits}"


def _run_lines(series: RunSeries, width: int, top: int) -> Iterator[str]:
    table = series_table(series)
    table = table.filter(table["left_out"].is_null()).drop(_HIDDEN).reverse()
    table = table.drop(
        [name for name in ("change_share", "git_commit", "device") if set(table[name]) <= {None, "none"}]
    )
    shown = table.head(top) if top else table
    yield from _table(shown, width)
    if shown.height < table.height:
        yield f"showing the latest {shown.height:,} of {table.height:,} runs, --top 0 for all"


def _table(table: pl.DataFrame, width: int) -> Iterator[str]:
    return (line.replace("--format csv", "--csv -") for line in table_lines(table, width=width))


def _left_out_lines(runs: tuple[LeftOut, ...]) -> Iterator[str]:
    """Each reason once, with the runs it holds for."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        by_reason.setdefault(printable(run.why), []).append(printable(run.name))
    yield f"Left out: {count(len(runs))} run{'s' if len(runs) > 1 else ''}"
    for why, names in by_reason.items():
        few = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        yield f"  {few}: {why}"


def plot_lines(series: RunSeries, width: int) -> Iterator[str]:
    """The step times from left to right in the order of the runs, with a line where a change lies."""
    times = np.array([run.step_ns for run in series.runs])
    low, high = plot_range(times.tolist())
    labels = [duration(high), duration((low + high) / 2), duration(low)]
    gutter = max(map(len, labels))
    room = max(width - gutter - 3, 10)
    columns = min(room, len(times) * _WIDEST)
    place = np.arange(len(times)) * (columns / len(times))
    grid = [[" "] * columns for _ in range(PLOT_ROWS)]
    for change in series.changes:
        # Between the run before and the first one after.
        at = min(max(int((place[change.position - 1] + place[change.position]) / 2 + 0.5), 0), columns - 1)
        for row in grid:
            row[at] = "┆"
    for at, ns in zip(place.astype(int), times, strict=True):
        grid[min(int((high - ns) / (high - low) * PLOT_ROWS), PLOT_ROWS - 1)][at] = "●"
    named = {0: labels[0], PLOT_ROWS // 2: labels[1], PLOT_ROWS - 1: labels[2]}
    for number, row in enumerate(grid):
        yield f"{named.get(number, ''):>{gutter}} │{''.join(row)}".rstrip()
    if len(times) > columns:
        yield f"{'':>{gutter}}  each column is {count(-(-len(times) // columns))} runs or fewer"


def plot_range(times_ns: list[float]) -> tuple[float, float]:
    """The lowest and the highest time of a plot; they are never so near that chance looks large."""
    low, high = min(times_ns), max(times_ns)
    short = max(_SMALLEST_SPREAD * high, 1.0) - (high - low)
    return (max(low - short / 2, 0.0), high + short / 2) if short > 0 else (low, high)


SCHEMA: Final = 1


def history_json(history: History) -> bytes:
    """Everything in the history: times in nanoseconds, shares from 0 to 1, what is not known is null."""
    content = {
        "schema": SCHEMA,
        "stepscope": __version__,
        "series": [_series(series) for series in history.series],
        "left_out": [dataclasses.asdict(run) for run in history.left_out],
    }
    return printable_json(msgspec.json.format(msgspec.json.encode(_plain(content)), indent=2)) + b"\n"


def _series(series: RunSeries) -> dict[str, Any]:
    content = dataclasses.asdict(series)
    for change, kept in zip(content["changes"], series.changes, strict=True):
        change["run"] = series.runs[kept.position].name
        change["differences"] = [
            {"name": name, "before": before or None, "after": after or None} for name, before, after in kept.differences
        ]
    return content


def _plain(value: Any) -> Any:
    """Without what JSON has no word for."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
