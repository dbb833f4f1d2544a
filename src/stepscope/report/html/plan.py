"""A plan for a browser: what to take, time against cost of every machine, and the machines as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl

from stepscope.compare.history import History, PlacedRun, RunSeries, moment, series_table
from stepscope.predict.cost.plan import Machine, Plan
from stepscope.report.format import duration, printable
from stepscope.report.history import (
    SOURCE_WORDS,
    change_sentence,
    commits_between,
    difference_rows,
    plot_range,
    series_sentences,
)
from stepscope.report.html.page import page
from stepscope.report.html.picture import View, table_view
from stepscope.report.plan import (
    asked_sentence,
    asked_time,
    basis_sentences,
    cost_band,
    devices_words,
    doubt_sentences,
    head_sentence,
    hours_band,
    left_out_sentences,
    machine_name,
    money,
    price_sentences,
    price_words,
    range_words,
    recommendation,
    samples_sentence,
    warning_sentences,
)

_ROOM: Final = 0.06
"""Of the plot's width and height beside the outermost points."""
_NAME_WIDTH: Final = 20.0
_NAME_HEIGHT: Final = 5.0
"""Percent of the plot that a name takes."""
_STEPS: Final = (1, 2, 5)
_MANY: Final = 150
"""Points that are drawn smaller."""
_MOST_TICKS: Final = 9


def html_plan(plan: Plan) -> bytes:
    """The page: it needs no network, and no name in it is ever markup."""
    return page(
        "plan.html.j2",
        title=f"plan for {printable(plan.recorded.path).rsplit('/', 1)[-1]}",
        head=head_sentence(plan),
        asked=asked_sentence(plan),
        recommendation=[*doubt_sentences(plan), *recommendation(plan)],
        chart=_chart(plan) if plan.machines else None,
        table=table_view(plan_frame(plan)) if plan.machines else None,
        prices=[sentence for sentence in (samples_sentence(plan), *price_sentences(plan)) if sentence],
        left_out=list(left_out_sentences(plan)),
        basis=[*warning_sentences(plan), *basis_sentences(plan)],
    )


def plan_frame(plan: Plan) -> pl.DataFrame:
    """A row a machine with numbers to sort by, the cheapest first."""
    machines = plan.machines
    columns: dict[str, list[object]] = {
        "machine": [f"{each.price.provider} {each.price.instance}" for each in machines],
        "devices": [devices_words(each) for each in machines],
        "hours": [each.hours for each in machines],
        "band of time": [_band(hours_band(each)) for each in machines],
        "cost_usd": [each.usd for each in machines],
        "band of cost": [_band(cost_band(each)) for each in machines],
        "price_usd_h": [each.usd_h for each in machines],
        "days since seen": [each.price.age_days(plan.today) for each in machines],
        "old": [each.price.is_old(plan.today) for each in machines],
        "limit": [each.limit for each in machines],
        "step_ns": [each.step_ns for each in machines],
        "of ideal_share": [None if each.scaled is None else each.scaled.efficiency for each in machines],
        "energy (estimate)": [range_words(each.kwh, "kWh") for each in machines],
        "CO2 (estimate)": [range_words(each.kilograms, "kg") for each in machines],
        "region": [each.price.region for each in machines],
        "source": [each.price.source for each in machines],
    }
    kept = {name: cells for name, cells in columns.items() if any(cell not in (None, "") for cell in cells)}
    return pl.DataFrame(kept, strict=False)


def _band(text: str) -> str:
    """What stands in parentheses behind a time or a cost."""
    return text.partition(" (")[2].removesuffix(")")


class _Scale:
    """A logarithmic axis from below the least value to above the largest."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        room = max((high - low) * _ROOM, 0.1)
        self.low, self.high = low - room, high + room

    def at(self, value: float) -> float:
        """Percent of the way from the axis's beginning to its end."""
        return min(max(100 * (math.log10(value) - self.low) / (self.high - self.low), 0.0), 100.0)

    def ticks(self, marks: Sequence[tuple[float, str]]) -> list[View]:
        """Those marks that lie on the axis, at most _MOST_TICKS of them."""
        inside = [mark for mark in marks if self.low <= math.log10(mark[0]) <= self.high]
        each = -(-len(inside) // _MOST_TICKS)
        return [{"at": self.at(value), "text": text} for value, text in inside[:: max(each, 1)]]


def _time_marks() -> list[tuple[float, str]]:
    """Round times in hours, and what stands at them."""
    marks = [(step * 10.0**power / 3600, f"{step * 10.0**power:g} s") for power in range(-6, 2) for step in _STEPS]
    marks += [(minutes / 60, f"{minutes} min") for minutes in (1, 2, 5, 10, 20, 30)]
    marks += [(float(hours), f"{hours} h") for hours in (1, 2, 5, 10)]
    days = [step * 10**power for power in range(13) for step in _STEPS]
    return [*marks, *((24.0 * each, "1 day" if each == 1 else f"{each:,} days") for each in days)]


def _money_marks() -> list[tuple[float, str]]:
    return [(step * 10.0**power, money(step * 10.0**power)) for power in range(-9, 16) for step in _STEPS]


def _chart(plan: Plan) -> View:
    request = plan.request
    hours = [each.hours for each in plan.machines] + [request.deadline_h] * (request.deadline_h is not None)
    costs = [each.usd for each in plan.machines] + [request.budget_usd] * (request.budget_usd is not None)
    across, up = _Scale([value for value in hours if value]), _Scale([value for value in costs if value])
    front = sorted(plan.front, key=lambda each: each.hours)
    corners = list(_staircase([(across.at(each.hours), 100 - up.at(each.usd)) for each in front]))
    return {
        "many": len(plan.machines) > _MANY,
        "across": across.ticks(_time_marks()),
        "up": up.ticks(_money_marks()),
        "front": " ".join(f"{x:.3f},{y:.3f}" for x, y in corners),
        "dots": _named(
            [_dot(each, plan, across, up) for each in sorted(plan.machines, key=lambda each: each.on_front)]
        ),
        "deadline": None
        if request.deadline_h is None
        else {"at": across.at(request.deadline_h), "text": f"deadline {asked_time(request.deadline_h)}"},
        "budget": None
        if request.budget_usd is None
        else {"at": up.at(request.budget_usd), "text": f"budget {money(request.budget_usd)}"},
    }


def _named(dots: list[View]) -> list[View]:
    """The dots, those of the front with their names as far as there is room for them."""
    placed: list[tuple[float, float]] = []
    for dot in reversed(dots):
        place = (dot["left"], dot["bottom"])
        crowded = any(abs(place[0] - x) < _NAME_WIDTH and abs(place[1] - y) < _NAME_HEIGHT for x, y in placed)
        if not dot["front"] or crowded:
            dot["name"] = ""
            continue
        placed.append(place)
    return dots


def _staircase(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The border of what nothing beats: from each point to the next, first across and then down."""
    for number, (x, y) in enumerate(points):
        if number:
            yield x, points[number - 1][1]
        yield x, y


def _dot(machine: Machine, plan: Plan, across: _Scale, up: _Scale) -> View:
    left, right = across.at(machine.hours_low), across.at(machine.hours_high)
    low, high = up.at(machine.usd_low), up.at(machine.usd_high)
    lines = [
        machine_name(machine),
        hours_band(machine),
        cost_band(machine),
        f"{price_words(machine, plan)} since it was seen",
    ]
    lines += [f"limit: {machine.limit}"] if machine.limit else []
    return {
        "left": across.at(machine.hours),
        "bottom": up.at(machine.usd),
        "reach_left": left,
        "reach_width": right - left,
        "reach_bottom": low,
        "reach_height": high - low,
        "front": machine.on_front,
        "meets": plan.meets(machine),
        "name": f"{printable(machine.price.provider)} {devices_words(machine)}",
        "about": "\n".join(lines),
    }


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
        "runs": [_history_dot(run, (at + 0.5) / len(series.runs), low, high) for at, run in enumerate(series.runs)],
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


def _history_dot(run: PlacedRun, across: float, low: float, high: float) -> View:
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
