"""How long operators' work would take in one call at the best rate that the trace shows, without their overhead."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.traffic import ARITHMETIC, PLAIN, REDUCTIONS, VIEWS, Shape, base_name, shapes_of
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "matmul", "linear", "baddbmm"})
_ELEMENTWISE: Final = PLAIN | ARITHMETIC | REDUCTIONS
_GOOD: Final = 0.9
"""Quantile of the rates that counts as the best; the very best may be a slip of the clock."""
_SHORT: Final = 0.05
"""Quantile of the lengths that counts as an operator's overhead."""
_SLICING: Final = frozenset({"select", "slice", "narrow", "index", "index_select", "unbind", "split", "chunk"})


class WorkLeft:
    """Estimates from one trace's own operators.

    Args:
        working_ns: for each row of `operators`, the time in which its work was done; shape (operators,).
        on_device: whether that is a device's time.
    """

    def __init__(self, trace: Trace, working_ns: Rows, *, on_device: bool) -> None:
        self._operators = trace.operators
        self._working = working_ns
        self._on_device = on_device

    def ns(self, rows: Rows) -> float:
        """The sum over operators that run one after the other.

        Matrix products count by their operations, element-wise operators by what they move; taking slices is gone; of
        others the overhead of the operators inside them is taken off.
        """
        columns = self._operators.select("name", "input_shapes")[rows]
        working = self._working[rows]
        inner = self._inner[rows]
        result = 0.0
        for (name, shapes), taken, operators in zip(columns.iter_rows(), working.tolist(), inner.tolist(), strict=True):
            base = base_name(name)
            if base in VIEWS or base in _SLICING:
                continue
            tensors = shapes_of(shapes)
            if base in _PRODUCTS and (work := operations(tensors)) and self._ns_per_operation:
                left = work * self._ns_per_operation
            elif base in PLAIN and tensors and self._ns_per_element:
                left = sum(map(prod, tensors)) * self._ns_per_element
            else:
                left = taken - operators * self.overhead_ns
            result += min(max(left, 0.0), taken)
        return result

    @cached_property
    def overhead_ns(self) -> float:
        """What a call costs that has nothing to do."""
        if self._on_device:
            lengths = self._working[self._working > 0]
        else:
            leaf = self._inner == 1
            lengths = self._working[leaf & self._is(_ELEMENTWISE)]
        return float(np.quantile(lengths, _SHORT)) if len(lengths) else 0.0

    @cached_property
    def _inner(self) -> Rows:
        """How many operators each consists of, itself included."""
        parent = self._operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
        count = np.ones(len(parent), np.int64)
        for row in np.flatnonzero(parent >= 0)[::-1].tolist():
            count[parent[row]] += count[row]
        return count

    def _is(self, names: frozenset[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        base = self._operators["name"].str.extract(r"([^:]*?)_?$").fill_null("")
        return base.is_in(list(names)).to_numpy()

    @cached_property
    def _ns_per_operation(self) -> float:
        rates = [
            taken / work
            for taken, tensors in self._measured(_PRODUCTS)
            if (work := operations(tensors)) and taken > 2 * self.overhead_ns
        ]
        return float(np.quantile(rates, 1 - _GOOD)) if rates else 0.0

    @cached_property
    def _ns_per_element(self) -> float:
        rates = [
            taken / sum(map(prod, tensors))
            for taken, tensors in self._measured(PLAIN)
            if tensors and taken > 2 * self.overhead_ns
        ]
        return float(np.quantile(rates, 1 - _GOOD)) if rates else 0.0

    def _measured(self, names: frozenset[str]) -> list[tuple[int, tuple[Shape, ...]]]:
        """Time and shapes of all operators of these names that did work; those alike by their median time."""
        found = (
            self._operators.select("name", "input_shapes", working=pl.Series(self._working))
            .filter(pl.Series(self._is(names)) & (pl.col("working") > 0) & pl.col("input_shapes").is_not_null())
            .group_by("name", "input_shapes")
            .agg(pl.col("working").median().cast(pl.Int64))
        )
        return [(taken, shapes_of(shapes)) for shapes, taken in found.select("input_shapes", "working").iter_rows()]


def operations(tensors: tuple[Shape, ...]) -> int:
    """Multiplications and additions of a matrix product of these inputs; 0 where the shapes do not tell.

    The inputs are those of mm, bmm, matmul and linear (two matrices first) or addmm (a bias, then two).
    """
    matrices = [shape for shape in tensors if len(shape) >= 2]
    if len(matrices) < 2:
        return 0
    left, right = matrices[-2], matrices[-1]
    if left[-1] == right[-2]:
        columns = right[-1]
    elif left[-1] == right[-1]:
        columns = right[-2]
    else:
        return 0
    return 2 * prod(left) * columns
