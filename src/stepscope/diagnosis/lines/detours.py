"""Products that shapes show to be detours: a weight merged from thin factors, and a one-hot table times a matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from stepscope.analysis.rows import at
from stepscope.analysis.work import Shape, base_name, elements, tensor_shapes_of
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows

_PRODUCTS: Final = frozenset({"mm", "matmul", "linear", "addmm"})
_THIN: Final = 4
"""Times that the factors' common size goes into the smaller size of their product."""
_FEWEST: Final = 32
"""Fewest classes of a one-hot table."""
_NEAR: Final = 6
"""Operators after the first among which the product stands."""


@dataclass(frozen=True, slots=True)
class Detour:
    """Operators of one line whose result needs less work.

    Attributes:
        kind: "merged" for a product of two thin matrices that is added to a weight, "one-hot" for a lookup.
        place: line of the user's code.
        rows: rows of `operators`, forward, that are not needed.
        operations: of the products that take their place, forward.
        elements: moved in what takes their place, forward.
    """

    kind: Literal["merged", "one-hot"]
    place: int
    rows: Rows
    operations: int
    elements: int


@dataclass(frozen=True, slots=True)
class _Called:
    name: str
    inputs: tuple[Shape, ...]


_Found = tuple[list[int], int, int]
"""Positions among the operators that are not needed, operations and elements that take their place."""


def detours(view: View, called: Rows) -> Iterator[Detour]:
    """Find detours, by kind and line.

    Args:
        called: rows of `operators` that no library operator called, in order.
    """
    operators = view.trace.operators
    calls = [
        _Called(base_name(name), tensor_shapes_of(shapes))
        for name, shapes in operators.select("name", "input_shapes")[called].iter_rows()
    ]
    place = at(view.attribution.place, view.slices_of_operators(called))
    found: defaultdict[tuple[Literal["merged", "one-hot"], int], list[_Found]] = defaultdict(list)
    for first in range(len(calls)):
        if place[first] < 0:
            continue
        following = calls[first : first + _NEAR]
        merged, looked_up = _merged(following), _one_hot(following)
        if merged is not None:
            found["merged", int(place[first])].append(([first + one for one in merged[0]], *merged[1:]))
        elif looked_up is not None:
            found["one-hot", int(place[first])].append(([first + one for one in looked_up[0]], *looked_up[1:]))
    for (kind, number), each in found.items():
        rows = called[np.array([one for positions, _, _ in each for one in positions], np.int64)]
        yield Detour(kind, number, rows, sum(work for _, work, _ in each), sum(moved for _, _, moved in each))


def _merged(calls: list[_Called]) -> _Found | None:
    """A product of thin matrices, its scaling and its sum with a weight, if a product takes the result."""
    first = calls[0]
    if first.name not in ("mm", "matmul") or [len(shape) for shape in first.inputs] != [2, 2]:
        return None
    (height, thin), (_, width) = first.inputs
    result = (height, width)
    if not 0 < thin * _THIN <= min(result):
        return None
    gone = [0]
    for position, call in enumerate(calls[1:], 1):
        if call.name in ("mul", "div") and call.inputs[:1] == (result,) and gone[-1] == position - 1:
            gone.append(position)
        elif call.name in ("add", "sub") and call.inputs[:2] == (result, result):
            rows = next((rows for each in calls[position + 1 :] if (rows := _rows_through(each, result))), None)
            return None if rows is None else ([*gone, position], 2 * rows * thin * (height + width), 3 * rows * width)
    return None


def _rows_through(call: _Called, weight: Shape) -> int | None:
    """Rows that a product multiplies by this weight or its transpose; None if it is no such product."""
    if call.name not in _PRODUCTS:
        return None
    others = [shape for shape in call.inputs if shape not in (weight, weight[::-1]) and len(shape) > 1]
    if not others or len(call.inputs) < 2 or not {weight, weight[::-1]} & set(call.inputs):
        return None
    length = others[0][-1]
    return elements(others[0]) // length if length in weight and length > 0 else None


def _one_hot(calls: list[_Called]) -> _Found | None:
    """The making of a one-hot table up to its product with a matrix."""
    count = _marked(calls[0])
    if not count:
        return None
    for position, call in enumerate(calls[1:], 1):
        if call.name in _PRODUCTS and len(call.inputs) >= 2:
            table, matrix = call.inputs[:2]
            classes = table[-1] if table else 0
            if classes < _FEWEST or elements(table) != count * classes or matrix[0] != classes or len(matrix) != 2:
                return None
            is_own = calls[0].name == "one_hot" or (*calls[0].inputs[0][:-1], classes) == table
            moved = (2 * count + classes) * matrix[1]
            return (list(range(position + 1)), 0, moved) if is_own else None
    return None


def _marked(call: _Called) -> int:
    """How many rows of a one-hot table an operator makes; 0 if it makes none."""
    if call.name == "one_hot" and call.inputs:
        return elements(call.inputs[0])
    if call.name == "scatter" and len(call.inputs) == 2 and call.inputs[1][-1] == 1:  # of one number
        return elements(call.inputs[1])
    if call.name == "eq" and len(call.inputs) == 2 and call.inputs[0][-1] == 1 and len(call.inputs[1]) == 1:
        return elements(call.inputs[0]) if elements(call.inputs[0]) != call.inputs[1][0] else 0
    return 0
