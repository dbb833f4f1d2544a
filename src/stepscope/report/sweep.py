"""Report a sweep: the best values, how much each parameter matters, and the trials, in a table and on parallel axes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.report.document import Block, Document, Drawing, Items, Section, Table, Text, fields, stamped, texts
from stepscope.report.format import clock, share
from stepscope.report.html import TemplateVariables
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.run import BEST_SHARE, FEWEST_FOR_IMPORTANCE, Effect, SweepResults, SweepTrial

MOST_ROWS: Final = 1000
"""Trials in a page's table."""
_STATES: Final = ("complete", "pruned", "failed", "running", "waiting")


def sweep_document(results: SweepResults) -> Document:
    """Report the best trial, all trials over parallel axes, parameter importance, and a table of trials."""
    best, *more = best_sentences(results)
    head = (Text(head_sentence(results), "muted"), *texts(best, only="off page"), *texts(*more))
    blocks = (
        Section(best, head, id="best", link="Best", style="summary", is_quiet=True),
        *_chart(results),
        *_parameters(results),
        *_trials(results),
        Section("", texts(*failure_sentences(results)), is_quiet=True, only="off page"),
        Section(
            "What was run",
            (Items(tuple(basis_sentences(results)), "said muted"),),
            id="basis",
            link="What was run",
            only="page",
        ),
    )
    return Document(f"sweep {results.sweep.name}", blocks, "--html")


def _chart(results: SweepResults) -> Iterator[Block]:
    view = sweep_view(results)
    if view is not None:
        yield Section("All trials", (Drawing("sweep", view),), id="chart", link="All trials", only="page")


def _parameters(results: SweepResults) -> Iterator[Block]:
    complete = results.of_state("complete")
    if not results.effects or not complete:
        return
    meters = Drawing("effects", {"effects": [_effect(each) for each in results.effects]})
    table = Table(effects_table(results), only="off page")
    notes = texts(*effect_sentences(results), style="muted said")
    title = f"Parameters, over {counted(len(complete), 'complete trial')}"
    yield Section(title, (meters, table, *notes), id="effects", link="What matters")


def _trials(results: SweepResults) -> Iterator[Block]:
    ranked = results.ranked
    if ranked:
        table = Table(trials_table(results, ranked), "complete trials")
        yield Section("The best trials", (table,), only="off page")
    if results.trials:
        cut = f"showing {MOST_ROWS:,} of {len(results.trials):,} trials" if len(results.trials) > MOST_ROWS else ""
        notes = texts(cut, *failure_sentences(results), style="muted said")
        yield Section("Trials", (Table(trials_frame(results)), *notes), id="trials", link="Table", only="page")


def effects_table(results: SweepResults) -> pl.DataFrame:
    """One row per parameter: importance, correlation, the best trial's value, and what was searched."""
    best = results.best
    columns: dict[str, list[str]] = {
        "parameter": [each.parameter.name for each in results.effects],
        "importance": ["-" if each.importance is None else share(each.importance) for each in results.effects],
        "correlation": [correlation_words(each) for each in results.effects],
        "best": ["" if best is None else value_words(best.values.get(e.parameter.name)) for e in results.effects],
        "searched": [searched_words(each.parameter) for each in results.effects],
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def trials_table(results: SweepResults, trials: list[SweepTrial]) -> pl.DataFrame:
    """One row per trial: its number, the metric, the parameters in order of importance, and its time."""
    columns = {
        "trial": [str(each.number) for each in trials],
        results.sweep.metric.name: [number_words(each.value) for each in trials],
        **{
            f"{effect.parameter.name} ": [value_words(each.values.get(effect.parameter.name)) for each in trials]
            for effect in results.effects
        },
        "time": [clock(each.seconds) for each in trials],
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def trials_frame(results: SweepResults) -> pl.DataFrame:
    """One row per trial with numeric columns to sort by, the best first, unvalued ones last; MOST_ROWS at most."""
    rest = [trial for trial in results.trials if trial.state != "complete"]
    trials = [*results.ranked, *rest][:MOST_ROWS]
    columns: dict[str, list[Any]] = {
        "trial": [each.number for each in trials],
        "state": [each.state for each in trials],
        results.sweep.metric.name: [each.value for each in trials],
        **{
            f"{effect.parameter.name} ": _cells(
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
    """Numbers stay numbers, so that the table sorts by them; other values become text."""
    if not parameter.is_choice and all(value is None or is_number(value) for value in values):
        return [None if value is None else float(value) for value in values]
    return ["" if value is None else value_words(value) for value in values]


def _effect(effect: Effect) -> dict[str, Any]:
    part = effect.importance or 0.0
    return {
        "name": effect.parameter.name,
        "importance": "-" if effect.importance is None else share(effect.importance),
        "width": 100 * part,
        "correlation": correlation_words(effect),
        "searched": searched_words(effect.parameter),
    }


def sweep_json(results: SweepResults) -> dict[str, Any]:
    """The results as JSON values, times in seconds."""
    sweep, best = results.sweep, results.best
    return stamped(
        **fields(sweep, "name", "method", "metric", "warnings"),
        command=sweep.command.shown,
        program=sweep.command.program,
        parameters=[_parameter(each) for each in sweep.parameters],
        asked_trials=sweep.trials,
        counts={**{state: len(results.of_state(state)) for state in _STATES}, "repeated": results.abandoned},
        best=best,
        effects=[
            {"parameter": each.parameter.name, **fields(each, "importance", "correlation", "trials")}
            for each in results.effects
        ],
        trials=results.trials,
    )


def _parameter(parameter: Parameter) -> dict[str, Any]:
    """A parameter as JSON values; null for fields that its distribution does not use."""
    content = msgspec.to_builtins(parameter)
    normal, beta = "normal" in parameter.distribution, "beta" in parameter.distribution
    unused = {"mu": not normal, "sigma": not normal, "a": not beta, "b": not beta}
    for name in ("values", "probabilities"):
        unused[name] = not content[name]
    return {name: None if unused.get(name) else value for name, value in content.items()}


_MOST_REASONS: Final = 3
_LONGEST_VALUE: Final = 40


def head_sentence(results: SweepResults) -> str:
    """What was searched, how, and how many trials of which kind there are."""
    sweep = results.sweep
    goal = "maximising" if sweep.metric.is_maximized else "minimising"
    words = [
        f"{len(found)} {name}"
        for name, found in (
            ("complete", results.of_state("complete")),
            ("pruned", results.of_state("pruned")),
            ("failed", results.of_state("failed")),
            ("running", results.of_state("running")),
            ("waiting to be repeated", results.of_state("waiting")),
        )
        if found
    ]
    seconds = sum(trial.seconds or 0.0 for trial in results.trials)
    of = f" of {sweep.trials}" if sweep.trials is not None and len(results.trials) <= sweep.trials else ""
    counts = f": {', '.join(words)}" if words else ""
    spent = f"; {clock(seconds)} of running programs" if seconds else ""
    return (
        f"Sweep {sweep.name}, {goal} {sweep.metric.name} by {method_words(sweep.method)}: "
        f"{len(results.trials)}{of} trials{counts}{spent}."
    )


def best_sentences(results: SweepResults) -> Iterator[str]:
    """The best value with the parameters that gave it, or a sentence that no trial has one."""
    best = results.best
    if best is None:
        yield "No trial is complete yet, so there is no best one."
        return
    searched = {each.name: best.values.get(each.name) for each in results.sweep.searched}
    where = f" ({best.folder})" if best.folder else ""
    yield (
        f"Best: {results.sweep.metric.name} {number_words(best.value)} in trial {best.number}{where}, with "
        f"{values_words(searched)}."
    )


def effect_sentences(results: SweepResults) -> Iterator[str]:
    """How to read the effects in the table, and why some are missing."""
    complete = len(results.of_state("complete"))
    if any(each.importance is not None for each in results.effects):
        yield (
            f"Importance: PED-ANOVA, how well a parameter tells the best {BEST_SHARE:.0%} of the trials from all of "
            "them; the shares sum to 1."
        )
    elif complete < FEWEST_FOR_IMPORTANCE:
        yield f"Importance takes at least {FEWEST_FOR_IMPORTANCE} complete trials."
    else:
        yield "Importance: unknown, because the best trials have the same values as all trials."
    pruned = len(results.of_state("pruned"))
    if pruned:
        yield f"{counted(pruned, 'pruned trial')} left out: their final values are unknown."
    yield (
        f"Correlation: Spearman's, of ranks; positive where a larger value goes with a larger "
        f"{results.sweep.metric.name}. - marks values without an order."
    )


def failure_sentences(results: SweepResults) -> Iterator[str]:
    failed = results.of_state("failed")
    for trial in failed[:_MOST_REASONS]:
        where = f" ({trial.folder})" if trial.folder else ""
        yield f"trial {trial.number}{where} failed: {trial.reason or 'for an unknown reason'}"
    if len(failed) > _MOST_REASONS:
        yield f"trial {failed[_MOST_REASONS].number} and {len(failed) - _MOST_REASONS - 1} more failed as well"


def method_words(method: str) -> str:
    return {"tpe": "TPE", "hyperband": "TPE and Hyperband", "random": "random search", "grid": "grid"}[method]


def searched_words(parameter: Parameter) -> str:
    """The values a parameter may take, shortened."""
    if parameter.is_choice:
        shown = ", ".join(value_words(each) for each in parameter.values[:6])
        return shown + (f", ... ({len(parameter.values)})" if len(parameter.values) > 6 else "")
    if parameter.low is None or parameter.high is None:
        about = (
            f"a {parameter.a:g}, b {parameter.b:g}"
            if "beta" in parameter.distribution
            else (f"mu {parameter.mu:g}, sigma {parameter.sigma:g}")
        )
        return f"{parameter.distribution}, {about}" + (f", q {parameter.q:g}" if parameter.q else "")
    words = f"{number_words(parameter.low)} to {number_words(parameter.high)}"
    words += ", log" if parameter.is_logarithmic else ""
    gap = parameter.step if parameter.step is not None else parameter.q
    return words + (f", in steps of {gap:g}" if gap else "")


def correlation_words(effect: Effect) -> str:
    """A correlation with its sign."""
    return "-" if effect.correlation is None else f"{effect.correlation + 0.0:+.2f}"


def values_words(values: Mapping[str, Any]) -> str:
    """Parameters with their values, as "lr 0.003, width 64"."""
    return ", ".join(f"{name} {value_words(value)}" for name, value in values.items())


def value_words(value: Any) -> str:
    """A parameter's value, shortened."""
    if isinstance(value, float):
        return number_words(value)
    text = value if isinstance(value, str) else json.dumps(value)
    text = text
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def number_words(value: float | None) -> str:
    """A number with four significant digits."""
    if value is None:
        return "-"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value + 0.0:.4g}"


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def basis_sentences(results: SweepResults) -> Iterator[str]:
    sweep = results.sweep
    program = sweep.command.program
    yield f"Command: {sweep.command.shown}{f', with program {program}' if program else ''}."
    constants = {each.name: each.values[0] for each in sweep.parameters if each.is_constant}
    if constants:
        yield f"Held: {', '.join(f'{name} {value_words(value)}' for name, value in constants.items())}."
    if sweep.description:
        yield sweep.description
    if results.abandoned:
        yield f"{results.abandoned} trials were interrupted and repeated; they do not count."
    yield from (each for each in sweep.warnings)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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

    def marks(self) -> list[TemplateVariables]:
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


def sweep_view(results: SweepResults) -> TemplateVariables | None:
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
) -> TemplateVariables:
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
