"""The sentences of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepscope.report.format import clock
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.run import BEST_SHARE, FEWEST_FOR_IMPORTANCE, Effect, SweepResults

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
    """The best value and what gave it; or that there is none."""
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
            f"Importance: PED-ANOVA, how much a parameter tells the best {BEST_SHARE:.0%} of the trials from all of "
            "them; the shares sum to 1."
        )
    elif complete < FEWEST_FOR_IMPORTANCE:
        yield f"Importance takes at least {FEWEST_FOR_IMPORTANCE} complete trials."
    else:
        yield "Importance: none can be told, for the best trials have the same values as all of them."
    pruned = len(results.of_state("pruned"))
    if pruned:
        yield f"{counted(pruned, 'pruned trial')} left out: what would have come of them is not known."
    yield (
        f"Correlation: Spearman's, of ranks; positive where a larger value goes with a larger "
        f"{results.sweep.metric.name}. - stands for values without an order."
    )


def failure_sentences(results: SweepResults) -> Iterator[str]:
    """Why trials failed, for the first few."""
    failed = results.of_state("failed")
    for trial in failed[:_MOST_REASONS]:
        where = f" ({trial.folder})" if trial.folder else ""
        yield f"trial {trial.number}{where} failed: {trial.reason or 'for an unknown reason'}"
    if len(failed) > _MOST_REASONS:
        yield f"trial {failed[_MOST_REASONS].number} and {len(failed) - _MOST_REASONS - 1} more failed as well"


def method_words(method: str) -> str:
    """The name of a search method."""
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
        yield f"{results.abandoned} trials were interrupted and repeated; they count for nothing."
    yield from (each for each in sweep.warnings)


def is_number(value: Any) -> bool:
    """Whether a value can be placed on a numeric axis."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
