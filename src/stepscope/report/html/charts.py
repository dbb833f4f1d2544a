"""Charts of pages: machines by time and cost, runs over time, and trials over parallel axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from stepscope.compare.history import PlacedRun, RunSeries, moment
from stepscope.predict.cost.plan import Machine, Plan
from stepscope.report.format import clock, duration, plot_range
from stepscope.report.html.picture import View
from stepscope.report.words.plan import (
    asked_time,
    cost_band,
    devices_words,
    hours_band,
    machine_name,
    money,
    price_words,
)
from stepscope.report.words.sweep import is_number, number_words, value_words
from stepscope.tune.sweep.run import SweepResults, SweepTrial

_ROOM: Final = 0.06
"""Share of the plot's width and height left free beyond the outermost points."""
_NAME_WIDTH: Final = 20.0
_NAME_HEIGHT: Final = 5.0
"""Percent of the plot's height that a name takes."""
_STEPS: Final = (1, 2, 5)
_MANY: Final = 150
"""Beyond this many points, all are drawn smaller."""
_MOST_TICKS: Final = 9
_UNITS: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_MOST_LINES: Final = 400
_MOST_AXES: Final = 10
_COLOURS: Final = 7
_LINES_WIDTH: Final = 1000
_LINES_HEIGHT: Final = 400
_ROUND: Final = (1, 2, 2.5, 5, 10)
_TICKS: Final = 5
_MOST_CHOICES: Final = 16
_WIDE: Final = 50.0
"""The metric's axis is logarithmic if its largest value is this many times the least."""
_LARGEST: Final = 1e300


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
        """The marks within the axis, at most _MOST_TICKS of them."""
        inside = [mark for mark in marks if self.low <= math.log10(mark[0]) <= self.high]
        each = -(-len(inside) // _MOST_TICKS)
        return [{"at": self.at(value), "text": text} for value, text in inside[:: max(each, 1)]]


def _time_marks() -> list[tuple[float, str]]:
    marks = [(step * 10.0**power / 3600, f"{step * 10.0**power:g} s") for power in range(-6, 2) for step in _STEPS]
    marks += [(minutes / 60, f"{minutes} min") for minutes in (1, 2, 5, 10, 20, 30)]
    marks += [(float(hours), f"{hours} h") for hours in (1, 2, 5, 10)]
    days = [step * 10**power for power in range(13) for step in _STEPS]
    return [*marks, *((24.0 * each, "1 day" if each == 1 else f"{each:,} days") for each in days)]


def _money_marks() -> list[tuple[float, str]]:
    return [(step * 10.0**power, money(step * 10.0**power)) for power in range(-9, 16) for step in _STEPS]


def plan_view(plan: Plan) -> View:
    """Plot every machine by time and cost."""
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
    """Drop the names of dots off the Pareto front and of those without room for one; modifies `dots`."""
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
    """The Pareto front as a staircase: from each point to the next, first across and then down."""
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
        "name": f"{machine.price.provider} {devices_words(machine)}",
        "about": "\n".join(lines),
    }


def history_view(series: RunSeries) -> View:
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


def _history_dot(run: PlacedRun, across: float, low: float, high: float) -> View:
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


def _time_ticks(low: float, high: float) -> tuple[list[float], int, tuple[float, str]]:
    """Round tick values covering the range, their digits, and the unit they are written in."""
    rough = max((high - low) / 4, 1e-3)
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    unit = next((each for each in _UNITS if high >= each[0]), _UNITS[-1])
    digits = max(0, math.ceil(-math.log10(step / unit[0]) - 1e-9))
    return [each * step for each in range(first, max(last, first + 1) + 1)], digits, unit


class _Axis:
    """One of the parallel axes, of a parameter or of the metric; 0 is its lower end and 1 its upper end.

    Args:
        values: the values drawn; numeric ones set the range of the axis.
        choices: the values of a categorical parameter, in their order.
    """

    def __init__(self, name: str, values: Sequence[Any], *, log: bool = False, choices: Sequence[Any] = ()) -> None:
        self.name = name
        self._choices = [value_words(each) for each in choices]
        numbers = [float(value) for value in values if is_number(value)]
        self._log = log and bool(numbers) and min(numbers) > 0
        ends = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
        self._low, self._high = (self._scaled(min(max(each, -_LARGEST), _LARGEST)) for each in ends)

    def at(self, value: Any) -> float:
        if self._choices:
            place = self._choices.index(value_words(value))
            return 0.5 if len(self._choices) == 1 else place / (len(self._choices) - 1)
        scaled = self._scaled(min(max(float(value), -_LARGEST), _LARGEST))
        return 0.5 if self._high <= self._low else (scaled - self._low) / (self._high - self._low)

    def marks(self) -> list[View]:
        """Axis labels: each choice, or the ends and round numbers between."""
        if self._choices:
            each = -(-len(self._choices) // _MOST_CHOICES)
            found = [(self.at_place(number), text) for number, text in enumerate(self._choices)][::each]
        else:
            found = [(self.at(value), number_words(value)) for value in self._numbers()]
        return [{"at": 100 * place, "text": text} for place, text in found]

    def at_place(self, number: int) -> float:
        return 0.5 if len(self._choices) == 1 else number / (len(self._choices) - 1)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def _numbers(self) -> list[float]:
        """The ends, and round numbers that are not too close to them."""
        low, high = (10**each if self._log else each for each in (self._low, self._high))
        if high <= low:
            return [low]
        between = list(_powers(low, high)) if self._log else list(_round_numbers(low, high))
        return [low, *(each for each in between if 0.07 < self.at(each) < 0.93), high]


def _powers(low: float, high: float) -> Iterator[float]:
    """Powers of ten, or 1, 2 and 5 times them if the range has few powers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if last - first > 2 else (1, 2, 5)
    each = max(1, -(-(last - first) // 8))
    for power in range(first, last + 1, each):
        yield from (value for step in steps if low < (value := float(f"{step}e{power}")) < high)


def _round_numbers(low: float, high: float) -> Iterator[float]:
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in _ROUND if each * power >= rough * (1 - 1e-9))
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step


def sweep_view(results: SweepResults) -> View | None:
    """The axes (parameters by importance, then the metric) and a line per trial."""
    complete = results.ranked
    pruned = results.of_state("pruned")
    if not complete:
        return None
    lines = [*complete, *pruned][:_MOST_LINES]
    effects = results.effects[:_MOST_AXES]
    axes = [
        _Axis(
            each.parameter.name,
            [trial.values.get(each.parameter.name) for trial in lines],
            log=each.parameter.is_logarithmic,
            choices=each.parameter.values if each.parameter.is_choice else (),
        )
        for each in effects
    ]
    values = [trial.value for trial in complete if trial.value is not None]
    log = min(values) > 0 and max(values) / min(values) >= _WIDE
    metric = _Axis(results.sweep.metric.name, values, log=log)
    drawn = [_line(trial, results, axes, metric, number, len(complete)) for number, trial in enumerate(lines)]
    every = [*axes, metric]
    return {
        "axes": [
            {
                "name": axis.name,
                "x": 100 * number / (len(every) - 1),
                "marks": axis.marks(),
                "metric": number == len(axes),
            }
            for number, axis in enumerate(every)
        ],
        "width": _LINES_WIDTH,
        "height": _LINES_HEIGHT,
        "lines": drawn[::-1],  # the best is drawn last, on top
        "sentence": _chart_sentence(results, lines),
        "pruned": any(trial.state == "pruned" for trial in lines),
        "goal": "largest" if results.sweep.metric.is_maximized else "smallest",
    }


def _line(
    trial: SweepTrial, results: SweepResults, axes: Sequence[_Axis], metric: _Axis, rank: int, complete: int
) -> View:
    gap = _LINES_WIDTH / len(axes)
    places = [axis.at(trial.values[axis.name]) for axis in axes]
    if trial.state == "complete":
        places.append(metric.at(trial.value))
    elif len(places) == 1:  # a line has two ends
        places = [*places, *places]
        gap /= 20
    points = " ".join(f"{number * gap:.1f},{_LINES_HEIGHT * (1 - place):.1f}" for number, place in enumerate(places))
    name = results.sweep.metric.name
    end = f"pruned at iteration {trial.iterations}, {name}" if trial.state == "pruned" else name
    about = [
        f"trial {trial.number}: {end} {number_words(trial.value)}",
        *(f"{each.parameter.name} {value_words(trial.values[each.parameter.name])}" for each in results.effects),
        f"in {clock(trial.seconds)}",
    ]
    colour = "pruned" if trial.state == "pruned" else f"c{min(rank * _COLOURS // max(complete, 1), _COLOURS - 1)}"
    return {"points": points, "colour": colour, "about": "\n".join(about), "best": rank == 0}


def _chart_sentence(results: SweepResults, lines: Sequence[SweepTrial]) -> str:
    parts = []
    total = len(results.ranked) + len(results.of_state("pruned"))
    if len(lines) < total:
        parts.append(f"showing the best {len(lines)} of {total} trials")
    if len(results.effects) > _MOST_AXES:
        parts.append(f"the {_MOST_AXES} most important of {len(results.effects)} parameters")
    return "; ".join(parts)
