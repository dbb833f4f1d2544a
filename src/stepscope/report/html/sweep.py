"""A sweep for a browser: the best values, every trial as a line over parallel axes, what matters, and the trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl

from stepscope.report.format import printable, share
from stepscope.report.html.page import page
from stepscope.report.html.picture import View, table_view
from stepscope.report.sweep import (
    best_sentences,
    correlation_words,
    duration_words,
    effect_sentences,
    failure_sentences,
    head_sentence,
    number_words,
    searched_words,
    value_words,
)
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.results import Effect, SweepResults, SweepTrial

MOST_LINES: Final = 400
MOST_AXES: Final = 10
MOST_ROWS: Final = 1000
_COLOURS: Final = 7
_WIDTH: Final = 1000
_HEIGHT: Final = 400
_ROUND: Final = (1, 2, 2.5, 5, 10)
_TICKS: Final = 5
_MOST_CHOICES: Final = 16
_WIDE: Final = 50.0
"""Where the largest value of the metric is so many times the least one, its axis is logarithmic."""
_LARGEST: Final = 1e300


def html_sweep(results: SweepResults) -> bytes:
    """The page: it needs no network, and no name or value in it is ever markup."""
    sweep = results.sweep
    return page(
        "sweep.html.j2",
        title=f"sweep {printable(sweep.name)}",
        head=head_sentence(results),
        best=list(best_sentences(results)),
        chart=_chart(results),
        effects=[_effect(each) for each in results.effects] if results.of_state("complete") else [],
        effect_notes=list(effect_sentences(results)),
        table=table_view(trials_frame(results)) if results.trials else None,
        cut=f"showing {MOST_ROWS:,} of {len(results.trials):,} trials" if len(results.trials) > MOST_ROWS else "",
        failures=list(failure_sentences(results)),
        basis=list(_basis(results)),
    )


def trials_frame(results: SweepResults) -> pl.DataFrame:
    """A row a trial with numbers to sort by, the best first, then those that have no value; MOST_ROWS at most."""
    rest = [trial for trial in results.trials if trial.state != "complete"]
    trials = [*results.ranked, *rest][:MOST_ROWS]
    columns: dict[str, list[Any]] = {
        "trial": [each.number for each in trials],
        "state": [each.state for each in trials],
        printable(results.sweep.metric.name): [each.value for each in trials],
        **{
            f"{printable(effect.parameter.name)} ": _cells(
                [each.values.get(effect.parameter.name) for each in trials], effect.parameter
            )
            for effect in results.effects
        },
        "iterations": [each.iterations for each in trials],
        "seconds": [None if each.seconds is None else round(each.seconds, 3) for each in trials],
        "why": [each.reason or "" for each in trials],
    }
    if not any(columns["why"]):
        del columns["why"]
    return pl.DataFrame(columns, strict=False)


def _cells(values: Sequence[Any], parameter: Parameter) -> list[Any]:
    """Numbers as such, so that the table sorts by them; else texts."""
    if not parameter.is_choice and all(value is None or _is_number(value) for value in values):
        return [None if value is None else float(value) for value in values]
    return ["" if value is None else value_words(value) for value in values]


def _effect(effect: Effect) -> View:
    part = effect.importance or 0.0
    return {
        "name": printable(effect.parameter.name),
        "importance": "-" if effect.importance is None else share(effect.importance),
        "width": 100 * part,
        "correlation": correlation_words(effect),
        "searched": searched_words(effect.parameter),
    }


def _basis(results: SweepResults) -> Iterator[str]:
    sweep = results.sweep
    program = sweep.command.program
    yield printable(f"Command: {sweep.command.shown}{f', with program {program}' if program else ''}.")
    constants = {each.name: each.values[0] for each in sweep.parameters if each.is_constant}
    if constants:
        yield f"Held: {', '.join(f'{printable(name)} {value_words(value)}' for name, value in constants.items())}."
    if sweep.description:
        yield printable(sweep.description)
    if results.abandoned:
        yield f"{results.abandoned} trials were interrupted and repeated; they count for nothing."
    yield from (printable(each) for each in sweep.warnings)


class Axis:
    """Where the values of a parameter, or of the metric, stand on an axis; 0 is its lower end and 1 its upper.

    Args:
        values: that are drawn; where they are numbers the axis reaches from the least to the largest.
        choices: in their order, where there are only these.
    """

    def __init__(self, name: str, values: Sequence[Any], *, log: bool = False, choices: Sequence[Any] = ()) -> None:
        self.name = name
        self._choices = [value_words(each) for each in choices]
        numbers = [float(value) for value in values if _is_number(value)]
        self._log = log and bool(numbers) and min(numbers) > 0
        ends = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
        self._low, self._high = (self._scaled(min(max(each, -_LARGEST), _LARGEST)) for each in ends)

    def at(self, value: Any) -> float:
        """The place of a value."""
        if self._choices:
            place = self._choices.index(value_words(value))
            return 0.5 if len(self._choices) == 1 else place / (len(self._choices) - 1)
        scaled = self._scaled(min(max(float(value), -_LARGEST), _LARGEST))
        return 0.5 if self._high <= self._low else (scaled - self._low) / (self._high - self._low)

    def marks(self) -> list[View]:
        """What is written beside the axis: each choice, or the ends and round numbers between."""
        if self._choices:
            each = -(-len(self._choices) // _MOST_CHOICES)
            found = [(self.at_place(number), text) for number, text in enumerate(self._choices)][::each]
        else:
            found = [(self.at(value), number_words(value)) for value in self._numbers()]
        return [{"at": 100 * place, "text": printable(text)} for place, text in found]

    def at_place(self, number: int) -> float:
        """The place of a choice by its number."""
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
    """Powers of ten, or 1, 2 and 5 times them where there are few of those."""
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


def _chart(results: SweepResults) -> View | None:
    """The axes, the parameters in order of importance and the metric last, and a line for each trial."""
    complete = results.ranked
    pruned = results.of_state("pruned")
    if not complete:
        return None
    lines = [*complete, *pruned][:MOST_LINES]
    effects = results.effects[:MOST_AXES]
    axes = [
        Axis(
            each.parameter.name,
            [trial.values.get(each.parameter.name) for trial in lines],
            log=each.parameter.is_logarithmic,
            choices=each.parameter.values if each.parameter.is_choice else (),
        )
        for each in effects
    ]
    values = [trial.value for trial in complete if trial.value is not None]
    log = min(values) > 0 and max(values) / min(values) >= _WIDE
    metric = Axis(results.sweep.metric.name, values, log=log)
    drawn = [_line(trial, results, axes, metric, number, len(complete)) for number, trial in enumerate(lines)]
    every = [*axes, metric]
    return {
        "axes": [
            {
                "name": printable(axis.name),
                "x": 100 * number / (len(every) - 1),
                "marks": axis.marks(),
                "metric": number == len(axes),
            }
            for number, axis in enumerate(every)
        ],
        "width": _WIDTH,
        "height": _HEIGHT,
        "lines": drawn[::-1],  # the best on top
        "sentence": _chart_sentence(results, lines),
        "pruned": any(trial.state == "pruned" for trial in lines),
        "goal": "largest" if results.sweep.metric.is_maximized else "smallest",
    }


def _line(
    trial: SweepTrial, results: SweepResults, axes: Sequence[Axis], metric: Axis, rank: int, complete: int
) -> View:
    gap = _WIDTH / len(axes)
    places = [axis.at(trial.values[axis.name]) for axis in axes]
    if trial.state == "complete":
        places.append(metric.at(trial.value))
    elif len(places) == 1:  # a line has two ends
        places = [*places, *places]
        gap /= 20
    points = " ".join(f"{number * gap:.1f},{_HEIGHT * (1 - place):.1f}" for number, place in enumerate(places))
    name = printable(results.sweep.metric.name)
    end = f"pruned at iteration {trial.iterations}, {name}" if trial.state == "pruned" else name
    about = [
        f"trial {trial.number}: {end} {number_words(trial.value)}",
        *(
            f"{printable(each.parameter.name)} {value_words(trial.values[each.parameter.name])}"
            for each in results.effects
        ),
        f"in {duration_words(trial.seconds)}",
    ]
    colour = "pruned" if trial.state == "pruned" else f"c{min(rank * _COLOURS // max(complete, 1), _COLOURS - 1)}"
    return {"points": points, "colour": colour, "about": "\n".join(about), "best": rank == 0}


def _chart_sentence(results: SweepResults, lines: Sequence[SweepTrial]) -> str:
    parts = []
    total = len(results.ranked) + len(results.of_state("pruned"))
    if len(lines) < total:
        parts.append(f"showing the best {len(lines)} of {total} trials")
    if len(results.effects) > MOST_AXES:
        parts.append(f"the {MOST_AXES} most important of {len(results.effects)} parameters")
    return "; ".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
