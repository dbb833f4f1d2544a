"""Report a sweep: the best values, how much each parameter matters, and the trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.report.document import Block, Document, Drawing, Items, Section, Table, Text, fields, stamped, texts
from stepscope.report.format import clock, share
from stepscope.report.html.charts import sweep_view
from stepscope.report.words.sweep import (
    basis_sentences,
    best_sentences,
    correlation_words,
    counted,
    effect_sentences,
    failure_sentences,
    head_sentence,
    is_number,
    number_words,
    searched_words,
    value_words,
)
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.run import Effect, SweepResults, SweepTrial

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
