"""Results that are equal in each step, or several times within one, by the values that the recorder looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.lines.costs import LineCosts
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows
from stepscope.trace.program_facts import BindingFacts, ValueFacts

_DIFFERENTIATED: Final = 0.05
"""Share of a line's time in its backward pass above which its result depends on what is trained."""


@dataclass(frozen=True, slots=True)
class EqualLines:
    """Lines whose results are equal in each step, or repeat within a step.

    Attributes:
        what: the function, or the variable, in words.
        numbers: the lines, as indices into the attribution's places.
        calls, distinct: values in a step, and different ones among them.
        is_constant: whether each step has the same values.
    """

    what: str
    numbers: Rows
    calls: int
    distinct: int
    is_constant: bool


@dataclass(frozen=True, slots=True)
class EqualCalls:
    """Calls of one module that give results which an earlier call gave.

    Attributes:
        calls: columns as in `modules`, only those that could be left out.
        in_step, distinct: calls in a step, and different results among them.
        is_constant: whether each step has the same results.
    """

    module: str
    calls: pl.DataFrame
    in_step: int
    distinct: int
    is_constant: bool


def equal_calls(view: View) -> Iterator[EqualCalls]:
    """Find calls of modules whose results are equal; those inside others that are found are left out."""
    facts = view.program.values
    if not _something_varies(facts):
        return
    found = {each.module: each for each in facts if each.module and (each.is_constant or each.distinct < each.calls)}
    for path, each in sorted(found.items()):
        if any(path.startswith(f"{other}.") for other in found):
            continue
        calls = view.begin_in_span(view.trace.modules.filter(pl.col("name") == path)).sort("start_ns")
        if not each.is_constant:
            bounds = view.steps["start_ns"].to_numpy()
            step = np.searchsorted(bounds, calls["start_ns"].to_numpy(), side="right")
            order = pl.int_range(pl.len()).over("step")
            calls = calls.with_columns(step=pl.Series(step)).filter(order >= each.distinct)
        if calls.height:
            yield EqualCalls(path, calls, each.calls, each.distinct, each.is_constant)


def _something_varies(facts: tuple[ValueFacts, ...]) -> bool:
    """Whether the steps differ at all; a program that repeats one step for a measurement computes nothing new."""
    return any(not each.is_constant for each in facts)


def equal_lines(view: View, costs: LineCosts) -> Iterator[EqualLines]:
    """Find functions, or else single variables, whose values are equal."""
    facts = [each for each in view.program.values if not each.module]
    if not _something_varies(view.program.values):
        return
    functions: dict[tuple[str, str, int], list[ValueFacts]] = {}
    for each in facts:
        functions.setdefault((each.file, each.function, each.line), []).append(each)
    bindings: dict[tuple[str, int], list[BindingFacts]] = {}
    for binding in view.program.bindings:
        bindings.setdefault((binding.file, binding.function), []).append(binding)
    for (file, function, line), values in functions.items():
        result = next((each for each in values if not each.name), None)
        if result is not None and _is_equal(result) and all(map(_is_equal, values)):
            numbers = _lines_of(costs, file, [(line, result.last)])
            constant = all(each.is_constant for each in values)
            yield EqualLines(f"{function}()", numbers, result.calls, result.distinct, constant)
        else:
            yield from _variables(costs, values, bindings.get((file, line), []))


def _is_equal(facts: ValueFacts) -> bool:
    return facts.is_constant or facts.distinct < facts.calls


def _variables(costs: LineCosts, values: list[ValueFacts], bindings: list[BindingFacts]) -> Iterator[EqualLines]:
    """Variables with the same value in each step, by the statements that bind and change them and no other name."""
    constant = {each.name for each in values if each.is_constant and each.name}
    varying = {each.name for each in values if not each.is_constant}
    shared = {(each.first, each.last) for each in bindings if each.name in varying}
    names, spans = [], []
    for name in sorted(constant):
        mine = [each for each in bindings if each.name == name]
        own = [(each.first, each.last) for each in mine]
        if sum(not each.is_change for each in mine) == 1 and not shared.intersection(own):
            names.append(name)
            spans += own
    if names:
        what = f"the variable {names[0]}" if len(names) == 1 else f"each of the variables {', '.join(names)}"
        calls = max(each.calls for each in values if each.name in names)
        yield EqualLines(what, _lines_of(costs, values[0].file, spans), calls, 1, is_constant=True)


def _lines_of(costs: LineCosts, file: str, spans: list[tuple[int, int]]) -> Rows:
    """Lines in these spans that cost something and whose results are not trained."""
    mine = [
        line.number
        for line in costs.lines
        if line.place.file == file
        and any(first <= line.place.line <= last for first, last in spans)
        and line.backward_ns <= _DIFFERENTIATED * line.ns
    ]
    return np.array(mine, np.int64)
