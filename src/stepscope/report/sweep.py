"""What a sweep found, for a terminal: the best values, what each parameter matters, and the best trials."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import polars as pl

from stepscope import __version__
from stepscope.report.format import duration, filled, printable, share
from stepscope.report.tables import showing, table_lines
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.results import BEST_SHARE, FEWEST_FOR_IMPORTANCE, Effect, SweepResults, SweepTrial

_MOST_REASONS: Final = 3
_LONGEST_VALUE: Final = 40


def sweep_text(results: SweepResults, *, width: int, top: int) -> str:
    """The whole report; `top` trials, 0 for all."""
    lines = [*filled(head_sentence(results), width)]
    for sentence in best_sentences(results):
        lines += filled(sentence, width)
    if results.effects and results.of_state("complete"):
        lines += ["", f"Parameters, over {_count(len(results.of_state('complete')), 'complete trial')}"]
        lines += [f"  {line}" for line in table_lines(effects_table(results), width=width - 2, whole="--html")]
        for sentence in effect_sentences(results):
            lines += filled(sentence, width, "  ", "  ")
    ranked = results.ranked
    shown = ranked[:top] if top else ranked
    if shown:
        lines += ["", "The best trials"]
        lines += [f"  {line}" for line in table_lines(trials_table(results, shown), width=width - 2, whole="--html")]
        cut = showing(len(shown), len(ranked), "complete trials")
        lines += [f"  {cut}"] if cut else []
    for sentence in failure_sentences(results):
        lines += ["", *filled(sentence, width)] if not lines[-1].startswith("trial ") else filled(sentence, width)
    return "\n".join(lines) + "\n"


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
    spent = f"; {duration_words(seconds)} of running programs" if seconds else ""
    return printable(
        f"Sweep {sweep.name}, {goal} {sweep.metric.name} by {method_words(sweep.method)}: "
        f"{len(results.trials)}{of} trials{counts}{spent}."
    )


def best_sentences(results: SweepResults) -> Iterator[str]:
    """The best value and what gave it; or that there is none."""
    best = results.best
    if best is None:
        yield "No trial is complete yet, so there is no best one."
        return
    searched = {each.name: best.values.get(each.name) for each in results.sweep.searched}
    where = f" ({best.folder})" if best.folder else ""
    yield printable(
        f"Best: {results.sweep.metric.name} {number_words(best.value)} in trial {best.number}{where}, with "
        f"{values_words(searched)}."
    )


def effects_table(results: SweepResults) -> pl.DataFrame:
    """A row a parameter: importance, correlation, the best trial's value, and what was searched."""
    best = results.best
    columns: dict[str, list[str]] = {
        "parameter": [printable(each.parameter.name) for each in results.effects],
        "importance": ["-" if each.importance is None else share(each.importance) for each in results.effects],
        "correlation": [correlation_words(each) for each in results.effects],
        "best": ["" if best is None else value_words(best.values.get(e.parameter.name)) for e in results.effects],
        "searched": [searched_words(each.parameter) for each in results.effects],
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def trials_table(results: SweepResults, trials: list[SweepTrial]) -> pl.DataFrame:
    """A row a trial: its number, the metric, the parameters in order of importance, and its time."""
    columns = {
        "trial": [str(each.number) for each in trials],
        printable(results.sweep.metric.name): [number_words(each.value) for each in trials],
        **{
            f"{printable(effect.parameter.name)} ": [
                value_words(each.values.get(effect.parameter.name)) for each in trials
            ]
            for effect in results.effects
        },
        "time": [duration_words(each.seconds) for each in trials],
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def effect_sentences(results: SweepResults) -> Iterator[str]:
    """How the numbers of the table are to be read, and why some are not there."""
    complete = len(results.of_state("complete"))
    if any(each.importance is not None for each in results.effects):
        yield (
            f"Importance: PED-ANOVA, how much a parameter tells the best {BEST_SHARE:.0%} of the trials from all of "
            "them; the shares sum to 1."
        )
    elif complete < FEWEST_FOR_IMPORTANCE:
        yield f"Importance takes at least {FEWEST_FOR_IMPORTANCE} complete trials."
    else:
        yield "Importance: none can be told, for the best trials have the same values as all of them."
    pruned = len(results.of_state("pruned"))
    if pruned:
        yield f"{_count(pruned, 'pruned trial')} left out: what would have come of them is not known."
    yield (
        f"Correlation: Spearman's, of ranks; positive where a larger value goes with a larger "
        f"{printable(results.sweep.metric.name)}. - stands for values without an order."
    )


def failure_sentences(results: SweepResults) -> Iterator[str]:
    """Why trials failed, the first few."""
    failed = results.of_state("failed")
    for trial in failed[:_MOST_REASONS]:
        where = f" ({trial.folder})" if trial.folder else ""
        yield printable(f"trial {trial.number}{where} failed: {trial.reason or 'for an unknown reason'}")
    if len(failed) > _MOST_REASONS:
        yield f"trial {failed[_MOST_REASONS].number} and {len(failed) - _MOST_REASONS - 1} more failed as well"


def method_words(method: str) -> str:
    """The search's name."""
    return {"tpe": "TPE", "hyperband": "TPE and Hyperband", "random": "random search", "grid": "grid"}[method]


def searched_words(parameter: Parameter) -> str:
    """What values a parameter may take, short."""
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
    return ", ".join(f"{printable(name)} {value_words(value)}" for name, value in values.items())


def value_words(value: Any) -> str:
    """A parameter's value, short."""
    if isinstance(value, float):
        return number_words(value)
    text = value if isinstance(value, str) else json.dumps(value)
    text = printable(text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def number_words(value: float | None) -> str:
    """A number with four digits that count."""
    if value is None:
        return "-"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value + 0.0:.4g}"


def duration_words(seconds: float | None) -> str:
    """A time of a trial: minutes and hours where there are any."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return duration(seconds * 1e9)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


SCHEMA: Final = 1


def sweep_json(results: SweepResults) -> dict[str, Any]:
    """Everything as plain values: times in seconds, shares from 0 to 1, null for what is not known."""
    sweep, best = results.sweep, results.best
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "name": sweep.name,
        "command": sweep.command.shown,
        "program": sweep.command.program,
        "method": sweep.method,
        "metric": dataclasses.asdict(sweep.metric),
        "parameters": [_parameter(each) for each in sweep.parameters],
        "asked_trials": sweep.trials,
        "counts": {
            **{state: len(results.of_state(state)) for state in ("complete", "pruned", "failed", "running", "waiting")},
            "repeated": results.abandoned,
        },
        "best": None if best is None else _trial(best),
        "effects": [
            {
                "parameter": each.parameter.name,
                "importance": each.importance,
                "correlation": each.correlation,
                "trials": each.trials,
            }
            for each in results.effects
        ],
        "trials": [_trial(each) for each in results.trials],
        "warnings": list(sweep.warnings),
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    """What is said of it: what its distribution has nothing to do with is null."""
    content = msgspec.to_builtins(parameter)
    normal, beta = "normal" in parameter.distribution, "beta" in parameter.distribution
    unused = {"mu": not normal, "sigma": not normal, "a": not beta, "b": not beta}
    for name in ("values", "probabilities"):
        unused[name] = not content[name]
    return {name: None if unused.get(name) else value for name, value in content.items()}


def _trial(trial: SweepTrial) -> dict[str, Any]:
    content = dataclasses.asdict(trial)
    content["values"] = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in trial.values.items()
    }
    return content
