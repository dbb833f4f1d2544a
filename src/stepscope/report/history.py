"""Report the history of runs: for each series what changed and when, a plot, and the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl

from stepscope.compare.history import (
    CONFIDENCE,
    FEWEST_RUNS,
    Change,
    History,
    LeftOut,
    PlacedRun,
    RunSeries,
    moment,
    series_table,
)
from stepscope.report.comparison_words import verdict_sentence
from stepscope.report.document import (
    Block,
    Document,
    Drawing,
    Group,
    Items,
    Plot,
    Section,
    Table,
    Text,
    Verbatim,
    fields,
    section_if,
    stamped,
    texts,
)
from stepscope.report.format import change_words, count, duration, interval_words, plot_range, share, share_of
from stepscope.report.html import TemplateVariables

_SOURCE_WORDS: Final = {"unprofiled": "steps without the profiler", "profiled": "steps slowed down by the profiler"}
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
_HIDDEN: Final = ("series", "place", "source", "change_low_share", "change_high_share", "left_out")


def history_document(history: History, *, is_overview: bool = False) -> Document:
    """Report each series in full, or one line each in an overview."""
    if is_overview and len(history.series) > 1:
        table = Table(overview_table(history.series), "series")
        blocks: tuple[Block, ...] = (table, Text("stepscope history SERIES shows one of them."))
    else:
        blocks = tuple(
            Group(each.name, tuple(_series(each, f"s{number}")), f"s{number}", is_quiet=True)
            for number, each in enumerate(history.series)
        )
    title = history.series[0].name if len(history.series) == 1 else "Runs over time"
    return Document(title, (*blocks, *_left_out(history.left_out)), "--csv -")


def _series(series: RunSeries, key: str) -> Iterator[Block]:
    runs = series.runs
    place = f", in {series.place}" if series.place else ""
    head = f"{series.name}: {count(len(runs))} run{'s' if len(runs) > 1 else ''}{place}"
    about = f"Mean time of {_SOURCE_WORDS[series.source]}, from {moment(runs[0].started_unix_s)} on."
    point = Text("Each point is a run, the bar through it the interval of its mean.", "muted", "page")
    plot = Plot(tuple(run.step_ns for run in runs), tuple(change.position for change in series.changes))
    plots = (Section("", (plot,), is_quiet=True),) if len(runs) > 1 else ()
    changes = (_change(series, change) for change in series.changes)
    blocks = (
        Text(head, only="off page"),
        Text(about, "muted"),
        point,
        *plots,
        Drawing("history", history_view(series)),
        *changes,
        Section("", texts(*series_sentences(series)), is_quiet=True),
    )
    yield Section(head, blocks, id=f"{key}-history", link="History", style="summary", is_quiet=True)
    table = Table(_run_table(series), "runs")
    yield Section(f"Runs of {series.name}, the latest first", (table,), id=f"{key}-runs", link="Runs")
    yield from _left_out(series.left_out)


def _change(series: RunSeries, change: Change) -> Section:
    frame = pl.DataFrame(
        [(name, before or "not there", after or "not there") for name, before, after in change.differences],
        schema={"what differs there": pl.String, "run before": pl.String, "first run after": pl.String},
        orient="row",
    )
    nothing = Text("run.json shows no difference between the run before and this one.", "muted")
    commits = commits_between(change)
    blocks = (Table(frame), *((Text(Verbatim(commits)),) if commits else ())) if frame.height else (nothing,)
    worse = " worse" if change.comparison.verdict == "slower" else ""
    return Section(change_sentence(series, change), blocks, style=f"change{worse}")


def _run_table(series: RunSeries) -> pl.DataFrame:
    table = series_table(series)
    table = table.filter(table["left_out"].is_null()).drop(_HIDDEN).reverse()
    table = table.drop([name for name in ("git_commit", "device") if set(table[name]) <= {None, "none"}])
    if table["change_share"].null_count() == table.height:
        return table.drop("change_share", "differs")
    return table.with_columns(pl.col("differs").list.join("; "))


def _left_out(runs: Sequence[LeftOut]) -> tuple[Section, ...]:
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        by_reason.setdefault(run.why, []).append(run.name)
    items = tuple(
        ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") + f": {why}"
        for why, names in by_reason.items()
    )
    title = f"Left out: {count(len(runs))} run{'s' if len(runs) > 1 else ''}"
    return section_if(title, *([Items(items)] if items else []))


def overview_table(series: Sequence[RunSeries]) -> pl.DataFrame:
    """One row per series: its name, how many runs and changes, the last change, the latest run, which steps, where."""
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


def series_sentences(series: RunSeries) -> list[str]:
    """Describe a series apart from its changes: whether it is stable, and changes it only hints at."""
    sentences = []
    if len(series.runs) < FEWEST_RUNS:
        runs = f"{len(series.runs)} run{'s' if len(series.runs) > 1 else ''}"
        sentences.append(f"With {runs} no change can be told from chance; that takes at least {FEWEST_RUNS}.")
    elif not series.changes:
        least = series.smallest_detectable
        known = least is not None and 0 < least < 1
        could = f"; one of {share(least)} halfway would most likely have been" if known and least is not None else ""
        sentences.append(f"No change is shown{could}.")
    if series.doubtful:
        places = "One place" if series.doubtful == 1 else f"{series.doubtful} places"
        sentences.append(f"{places} looked like a change, but the runs before and after differ by no more than chance.")
    if series.latest is not None:
        sentences.append(
            f"The latest run, {(series.runs[-1].name)}, differs from those before it. "
            f"{verdict_sentence(series.latest)} One run is not yet a change: run it again."
        )
    return sentences


def change_sentence(series: RunSeries, change: Change) -> str:
    """Describe one change: when, by how much and from what to what, with the interval."""
    run, found = series.runs[change.position], change.comparison
    known = found.change is not None and found.change_low is not None and found.change_high is not None
    much = ""
    if known and found.change is not None and found.change_low is not None and found.change_high is not None:
        interval = interval_words(found.change_low, found.change_high)
        much = f"{change_words(found.change)} ({share_of(CONFIDENCE)} interval: {interval}), "
    runs = f"{count(found.before_runs)} runs before, {count(found.after_runs)} from there on"
    times = f"{duration(found.after_ns or 0.0)} a step instead of {duration(found.before_ns or 0.0)}"
    since = f"{found.verdict.capitalize()} from {run.name} on, {moment(run.started_unix_s)}"
    return f"{since}: {much}{times} ({runs})."


def commits_between(change: Change) -> str:
    """The git command that lists the commits between the two runs; empty if there are none to list."""
    commits = next(((before, after) for name, before, after in change.differences if name == "git commit"), None)
    if commits is None or not all(commits):
        return ""
    first, second = (commit.split(" ")[0] for commit in commits)
    return f"git log --oneline {first}..{second}" if first != second else ""


def history_json(history: History) -> dict[str, Any]:
    return stamped(series=[_series_json(series) for series in history.series], left_out=history.left_out)


def _series_json(series: RunSeries) -> dict[str, Any]:
    changes = [
        {
            **fields(change),
            "run": series.runs[change.position].name,
            "differences": [
                {"name": name, "before": before or None, "after": after or None}
                for name, before, after in change.differences
            ],
        }
        for change in series.changes
    ]
    return {**fields(series), "changes": changes}


_UNITS: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def history_view(series: RunSeries) -> TemplateVariables:
    """Every run's mean step with its interval, the changes, and the means between them."""
    low, high = _range(series)
    ticks, digits, (divisor, unit) = _time_ticks(low, high)
    low, high = ticks[0], ticks[-1]
    return {
        "count": len(series.runs),
        "first": moment(series.runs[0].started_unix_s),
        "last": moment(series.runs[-1].started_unix_s),
        "ticks": [f"{tick / divisor:.{digits}f} {unit}" for tick in reversed(ticks)],
        "runs": [_history_dot(run, (at + 0.5) / len(series.runs), low, high) for at, run in enumerate(series.runs)],
        "levels": _levels(series, low, high),
        "marks": [100 * change.position / len(series.runs) for change in series.changes],
    }


def _range(series: RunSeries) -> tuple[float, float]:
    """The range of the intervals, clipped so that one wide interval of few steps does not flatten the rest."""
    low, high = plot_range([run.step_ns for run in series.runs])
    ends = [end for run in series.runs for end in (run.low_ns, run.high_ns) if end is not None]
    room = high - low
    return max(min([low, *ends]), low - room, 0.0), min(max([high, *ends]), high + room)


def _history_dot(run: PlacedRun, across: float, low: float, high: float) -> TemplateVariables:
    def up(ns: float) -> float:
        return min(max(100 * (ns - low) / (high - low), 0.0), 100.0)

    interval = None
    words = ""
    if run.low_ns is not None and run.high_ns is not None:
        interval = {"bottom": up(run.low_ns), "height": up(run.high_ns) - up(run.low_ns)}
        words = f"\n95 % interval: {duration(run.low_ns)} to {duration(run.high_ns)}, {run.steps} steps"
    commit = run.settings.get("git commit")
    about = f"{run.name}: {duration(run.step_ns)}{words}\n{moment(run.started_unix_s)}"
    return {
        "left": 100 * across,
        "bottom": up(run.step_ns),
        "interval": interval,
        "about": about + (f"\ncommit {commit}" if commit else ""),
    }


def _levels(series: RunSeries, low: float, high: float) -> list[TemplateVariables]:
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


def _time_ticks(low: float, high: float) -> tuple[list[float], int, tuple[float, str]]:
    """Round tick values covering the range, their digits, and the unit they are written in."""
    rough = max((high - low) / 4, 1e-3)
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    unit = next((each for each in _UNITS if high >= each[0]), _UNITS[-1])
    digits = max(0, math.ceil(-math.log10(step / unit[0]) - 1e-9))
    return [each * step for each in range(first, max(last, first + 1) + 1)], digits, unit
