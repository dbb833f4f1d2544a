"""Results that are equal in each step, or repeatedly within one, by the recorder's hashes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.work import VIEWS, base_name
from stepscope.diagnosis.lines.costs import LineCosts
from stepscope.diagnosis.view import View, rows_of
from stepscope.trace.nesting import Rows, at
from stepscope.trace.program_facts import BindingFacts, ConstantFacts, ValueFacts
from stepscope.trace.window import Times

_OPERATORS: Final = {
    "float": "to", "double": "to", "half": "to", "bfloat16": "to", "long": "to", "int": "to", "bool": "to",
    "type": "to", "cuda": "to", "cpu": "to", "setitem": "copy", "invert": "bitwise_not", "true_divide": "div",
    "concat": "cat", "multiply": "mul", "subtract": "sub", "divide": "div", "absolute": "abs",
}  # fmt: skip
"""Operators whose torch functions have another name."""
_DIFFERENTIATED: Final = 0.05
"""Share of a line's time in its backward pass above which its result depends on what is trained."""


@dataclass(frozen=True, slots=True)
class EqualLines:
    """Lines whose results are equal in each step, or repeat within a step.

    Attributes:
        what: the function, or the variable, in words.
        numbers: the lines, as indices into the attribution's places.
        calls, distinct: values in a step, and how many are distinct.
        is_constant: whether each step has the same values.
    """

    what: str
    numbers: Rows
    calls: int
    distinct: int
    is_constant: bool


@dataclass(frozen=True, slots=True)
class EqualCalls:
    """Calls of one module whose results an earlier call already gave.

    Attributes:
        calls: the calls that could be left out; columns as in `modules`.
        in_step, distinct: calls in a step, and how many distinct results they have.
        is_constant: whether each step has the same results.
    """

    module: str
    calls: pl.DataFrame
    in_step: int
    distinct: int
    is_constant: bool


def equal_calls(view: View) -> Iterator[EqualCalls]:
    """Find module calls with equal results, except those inside others that are found."""
    facts = view.program.values
    if not _something_varies(facts):
        return
    found = {each.module: each for each in facts if each.module and (each.is_constant or each.distinct < each.calls)}
    for path, each in sorted(found.items()):
        if any(path.startswith(f"{other}.") for other in found):
            continue
        calls = view.begin_in_span(view.trace.modules.filter(pl.col("name") == path)).sort("start_ns")
        calls = calls.filter(pl.Series(~_in_backward(view, calls["start_ns"].to_numpy())))
        if not each.is_constant:
            bounds = view.steps["start_ns"].to_numpy()
            step = np.searchsorted(bounds, calls["start_ns"].to_numpy(), side="right")
            order = pl.int_range(pl.len()).over("step")
            calls = calls.with_columns(step=pl.Series(step)).filter(order >= each.distinct)
        if calls.height:
            yield EqualCalls(path, calls, each.calls, each.distinct, each.is_constant)


def _in_backward(view: View, times: Times) -> npt.NDArray[np.bool_]:
    """Which times are inside a backward pass's nodes, where checkpointing calls modules again to save memory."""
    nodes = view.operators.filter(pl.col("parent").is_null() & pl.col("name").str.contains(BACKWARD_NAME))
    begin = nodes.sort("start_ns")["start_ns"].to_numpy()
    end = np.sort((nodes["start_ns"] + nodes["duration_ns"]).to_numpy())
    result: npt.NDArray[np.bool_] = np.searchsorted(begin, times, side="right") > np.searchsorted(
        end, times, side="right"
    )
    return result


def _something_varies(facts: tuple[ValueFacts, ...]) -> bool:
    """Whether steps differ at all; a benchmark that repeats one step computes nothing new."""
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
    """Variables with the same value in each step, by the statements that bind or change only them."""
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
        distinct = max(each.distinct for each in values if each.name in names)
        yield EqualLines(what, _lines_of(costs, values[0].file, spans), calls, distinct, is_constant=True)


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


@dataclass(frozen=True, slots=True)
class ConstantLines:
    """Lines of one function that call functions of torch with the same inputs in each step.

    Attributes:
        numbers: lines with only constant calls, as indices into the attribution's places.
        rows: rows of `operators`: the constant calls of other lines.
        places: all these lines.
        calls: constant calls in a step.
    """

    function: str
    numbers: Rows
    rows: Rows
    places: Rows
    calls: int


def constant_lines(view: View, costs: LineCosts) -> Iterator[ConstantLines]:
    """Find lines whose operators have the same inputs in each step, by function."""
    facts = {(each.file, each.line): each for each in view.program.constants}
    if not facts:
        return
    places = {line.number: (line.place.file, line.place.line) for line in costs.lines}
    found = {number: facts[place] for number, place in places.items() if place in facts}
    called = _called_at(view, np.array(list(found), np.int64))
    functions: dict[tuple[str, str], list[int]] = {}
    for number, each in found.items():
        functions.setdefault((each.file, each.function), []).append(number)
    for (_, function), numbers in functions.items():
        whole = [number for number in numbers if len(found[number].constant) == len(found[number].calls)]
        rows = {each: _constant_rows(found[each], called.get(each, [])) for each in numbers if each not in whole}
        mixed = [number for number, mine in rows.items() if mine]
        yield ConstantLines(
            function,
            numbers=np.array(whole, np.int64),
            rows=np.array([row for mine in rows.values() for row in mine], np.int64),
            places=np.array(whole + mixed, np.int64),
            calls=sum(len(found[number].constant) for number in whole + mixed),
        )


def _called_at(view: View, numbers: Rows) -> dict[int, list[list[tuple[int, str]]]]:
    """The operators that each line calls: for each step, their rows and names without namespace."""
    operators = view.operators.filter(
        (pl.col("lane") == pl.lit(view.lane, pl.Int32)) & pl.col("parent").is_null()
        & ~pl.col("name").str.contains(BACKWARD_NAME)
    ).sort("start_ns")  # fmt: skip
    rows = rows_of(operators)
    place = at(view.attribution.place, view.slices_of_operators(rows))
    step = np.searchsorted(view.steps["start_ns"].to_numpy(), operators["start_ns"].to_numpy(), side="right")
    names = [base_name(name) for name in operators["name"]]
    found: dict[int, dict[int, list[tuple[int, str]]]] = {}
    for index in np.flatnonzero(np.isin(place, numbers)).tolist():
        steps = found.setdefault(int(place[index]), {})
        steps.setdefault(int(step[index]), []).append((int(rows[index]), names[index]))
    return {number: list(steps.values()) for number, steps in found.items()}


def _constant_rows(facts: ConstantFacts, steps: list[list[tuple[int, str]]]) -> list[int]:
    """Rows of a line's constant calls; empty if the name of one of its other calls is not found."""
    constant, result = set(facts.constant), []
    needed = {place for place, call in enumerate(facts.calls) if place not in constant and not _is_free(call)}
    for operators in steps:
        current, found = -1, set[int]()
        for row, name in operators:
            following = range(current + 1, len(facts.calls))
            current = next((place for place in following if _is_call(facts.calls[place], name)), current)
            found.add(current)
            if current in constant:
                result.append(row)
        if not needed <= found:
            return []
    return result


def _is_call(call: str, operator: str) -> bool:
    name = call.strip("_")
    return operator == _OPERATORS.get(name, name) or operator.startswith(f"{name}_")


def _is_free(call: str) -> bool:
    """Whether a call costs nothing, so that its operator may be missing."""
    return call.strip("_") in VIEWS | {"getitem", "data", "T", "mT"}
