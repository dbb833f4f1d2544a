"""Conversions of tensors between number types, and operators that compute in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.shapes import Shape, elements, shapes_of, types_of
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

FLOATS: Final = {"double": "float64", "float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
"""The profiler's words for floating-point types -> PyTorch's."""

_WRAPPERS: Final = ("aten::to", "aten::_to_copy", "aten::type_as", "aten::_autocast_to_reduced_precision",
                    "aten::_autocast_to_full_precision")  # fmt: skip
_SMALLEST: Final = 256
"""Tensors of fewer numbers are settings, not data."""


@dataclass(frozen=True, slots=True)
class Cast:
    """One conversion.

    Attributes:
        row: in `operators`, of the outermost operator that does nothing else.
        source, target: number types, values of FLOATS.
        is_backward: whether the backward pass converts a gradient.
    """

    row: int
    lane: int
    start_ns: int
    shape: Shape
    source: str
    target: str
    is_backward: bool


def casts(trace: Trace, rows: Rows) -> list[Cast]:
    """The conversions between floating-point types among these rows of `operators`, in order of time."""
    operators = trace.operators
    parent = operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    names = operators["name"]
    copies = operators[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64)).filter(pl.col("name") == "aten::copy_")
    found = []
    columns = ("row", "lane", "start_ns", "input_shapes", "input_types")
    for row, lane, start, shapes, types in copies.select(columns).iter_rows():
        shape = next(iter(shapes_of(shapes)), ())
        target, source = (*types_of(types), "", "")[:2]
        if source == target or source not in FLOATS or target not in FLOATS or elements(shape) < _SMALLEST:
            continue
        outer = row
        while parent[outer] >= 0 and names[int(parent[outer])] in _WRAPPERS:
            outer = int(parent[outer])
        around = int(parent[outer])
        backward = around >= 0 and names[around] == "ToCopyBackward0"
        found.append(Cast(outer, lane, start, shape, FLOATS[source], FLOATS[target], backward))
    return found


def there_and_back(found: list[Cast]) -> list[Cast]:
    """Those conversions of a forward pass that a later one of a tensor of the same shape undoes, and the latter.

    A conversion from one type to another is paired with the next one back of the same shape on the same thread.
    """
    waiting: dict[tuple[int, Shape, str, str], list[Cast]] = {}
    paired: list[Cast] = []
    for cast in found:
        if cast.is_backward:
            continue
        back = waiting.get((cast.lane, cast.shape, cast.target, cast.source))
        if back:
            paired += [back.pop(0), cast]
        else:
            waiting.setdefault((cast.lane, cast.shape, cast.source, cast.target), []).append(cast)
    return sorted(paired, key=lambda cast: cast.start_ns)


def wide_operators(trace: Trace, rows: Rows, conversions: list[Cast]) -> Rows:
    """Rows of the operators, among these, whose numbers are float64 for the most part; conversions are none."""
    operators = trace.operators[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64))
    converting = {cast.row for cast in conversions}
    candidates = operators.filter(
        pl.col("input_types").str.contains('"double"', literal=True)
        & ~pl.col("name").is_in([*_WRAPPERS, "aten::copy_", "ToCopyBackward0"])
        & ~pl.col("name").str.contains(r"^autograd::engine|^torch::autograd")
    )
    found = []
    for row, shapes, types in candidates.select("row", "input_shapes", "input_types").iter_rows():
        tensors = [(elements(shape), kind) for shape, kind in zip(shapes_of(shapes), types_of(types), strict=False)
                   if shape and kind in FLOATS]  # fmt: skip
        wide = sum(count for count, kind in tensors if kind == "double")
        if row not in converting and wide >= _SMALLEST and 2 * wide >= sum(count for count, _ in tensors):
            found.append(row)
    return np.array(found, np.int64)
