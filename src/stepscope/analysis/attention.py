"""Attention that is written out: a softmax between two matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.shapes import Shape, elements, shapes_of, types_of
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit

NUMBER_BYTES: Final = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}

_SOFTMAX: Final = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
_PRODUCTS: Final = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::addmm")
_WRAPPERS: Final = frozenset({"aten::matmul", "aten::einsum", "aten::__matmul__", *_PRODUCTS})
_MASKS: Final = frozenset({"aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::add", "aten::add_"})
_DROPOUT: Final = frozenset({"aten::dropout", "aten::dropout_", "aten::native_dropout", "aten::bernoulli_"})
_NEAREST: Final = 4
"""Matrix products before and after a softmax that are looked at."""
_FEWEST_KEYS: Final = 16
"""Scores over fewer keys are those of a gate or a classifier."""
_MATH: Final = "aten::_scaled_dot_product_attention_math"


@dataclass(frozen=True, slots=True)
class WrittenOutAttention:
    """One computation of attention by operators of its own.

    Attributes:
        operators: rows of `operators`: both products and what works on the scores between them.
        softmax: row of the softmax.
        second_product: row of the product of the weights and the values, innermost.
        scores: shape of the scores.
        score_bytes: of one tensor of scores; 0 where their type is unknown.
        causal: whether one square mask is laid on all scores.
        masked: whether any mask or bias is.
        dropout: whether weights are dropped.
        within: name of the operator around all of it, "" where the program calls the operators itself.
    """

    operators: Rows
    softmax: int
    second_product: int
    scores: Shape
    score_bytes: int
    causal: bool
    masked: bool
    dropout: bool
    within: str

    @property
    def is_fallback(self) -> bool:
        """Whether the program calls the fused operator, which falls back to this."""
        return self.within == _MATH


def written_out_attention(trace: Trace, rows: Rows) -> list[WrittenOutAttention]:
    """Every computation of attention among these rows of `operators` whose scores are tensors of their own.

    A softmax over scores (..., queries, keys), with a matrix product (queries, ..) x (.., keys) shortly before it and
    one of (queries, keys) with something shortly after it, on one thread. Needs input shapes.
    """
    operators = trace.operators[rows].select("lane", "name").with_columns(row=pl.Series(rows, dtype=pl.Int64))
    calls = _Calls(trace)
    products = operators.filter(pl.col("name").is_in(_PRODUCTS))
    softmax = operators.filter(pl.col("name").is_in(_SOFTMAX))["row"].to_numpy()
    by_lane = {lane: mine["row"].to_numpy() for (lane,), mine in products.group_by("lane", maintain_order=True)}
    found = []
    for row in calls.outermost_of(softmax).tolist():
        mine = by_lane.get(calls.lane[row])
        written = None if mine is None else _around(calls, row, mine)
        if written is not None:
            found.append(written)
    return found


class _Calls:
    """Columns of `operators` for looking calls up one by one."""

    def __init__(self, trace: Trace) -> None:
        operators = trace.operators
        self.name = operators["name"].to_list()
        self.lane = operators["lane"].to_list()
        self.start: Rows = operators["start_ns"].to_numpy()
        self.end: Rows = self.start + operators["duration_ns"].to_numpy()
        self.parent: Rows = operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
        self.lanes = operators["lane"].to_numpy()
        self._shapes = operators["input_shapes"]
        self._types = operators["input_types"]

    def shapes(self, row: int) -> tuple[Shape, ...]:
        return shapes_of(self._shapes[row])

    def types(self, row: int) -> tuple[str, ...]:
        return types_of(self._types[row])

    def outermost_of(self, rows: Rows) -> Rows:
        """Those of the rows that are inside no other of them."""
        own = np.full(len(self.parent), -1, np.int64)
        own[rows] = 1
        around = inherit(own, self.parent)
        parent = self.parent[rows]
        return rows[~((parent >= 0) & (around[np.maximum(parent, 0)] > 0))]

    def wrapped(self, row: int) -> int:
        """The outermost matrix product around a product, or itself."""
        while self.parent[row] >= 0 and self.name[self.parent[row]] in _WRAPPERS:
            row = int(self.parent[row])
        return row


def _around(calls: _Calls, softmax: int, products: Rows) -> WrittenOutAttention | None:
    """The attention whose softmax this is, None where it is another softmax; `products` of its thread, in order."""
    scores = next(iter(calls.shapes(softmax)), ())
    if len(scores) < 2 or scores[-1] < _FEWEST_KEYS:
        return None
    position = int(np.searchsorted(calls.start[products], calls.start[softmax]))
    before = [row for row in products[max(position - _NEAREST, 0) : position].tolist() if _makes(calls, row, scores)]
    after = [row for row in products[position : position + _NEAREST].tolist() if _takes(calls, row, scores)]
    if not before or not after:
        return None
    first, second = calls.wrapped(before[-1]), calls.wrapped(after[0])
    within = int(calls.parent[first])
    name = calls.name[within] if within >= 0 else ""
    if name.startswith("aten::") and name != _MATH:
        return None
    between = _on_scores(calls, first, second, scores)
    names = {calls.name[row] for row in between.tolist()}
    masks = [row for row in between.tolist() if calls.name[row] in _MASKS and _mask(calls, row, scores)]
    types = calls.types(softmax)
    return WrittenOutAttention(
        operators=np.concatenate([[first], between, [second]]).astype(np.int64),
        softmax=softmax,
        second_product=after[0],
        scores=scores,
        score_bytes=elements(scores) * NUMBER_BYTES.get(types[0] if types else "", 0),
        causal=scores[-1] == scores[-2]
        and any(elements(_mask(calls, row, scores)) == scores[-1] ** 2 for row in masks),
        masked=bool(masks),
        dropout=bool(names & _DROPOUT),
        within=name,
    )


def _matrices(calls: _Calls, row: int) -> tuple[Shape, Shape] | None:
    """The shapes of the two factors of a product."""
    shapes = [shape for shape in calls.shapes(row) if len(shape) >= 2]
    wanted = shapes[-2:]
    return (wanted[0], wanted[1]) if len(wanted) == 2 and wanted[0][-1] == wanted[1][-2] else None


def _makes(calls: _Calls, row: int, scores: Shape) -> bool:
    factors = _matrices(calls, row)
    return factors is not None and (factors[0][-2], factors[1][-1]) == scores[-2:]


def _takes(calls: _Calls, row: int, scores: Shape) -> bool:
    factors = _matrices(calls, row)
    return factors is not None and factors[0][-2:] == scores[-2:]


def _on_scores(calls: _Calls, first: int, second: int, scores: Shape) -> Rows:
    """The outermost calls between two products of a thread whose first input is as large as the scores."""
    begin, end = np.searchsorted(calls.start, [calls.end[first], calls.start[second]])
    rows = np.arange(begin, end)
    rows = calls.outermost_of(rows[calls.lanes[rows] == calls.lanes[first]])
    size = elements(scores)
    return np.array([row for row in rows.tolist() if size in map(elements, calls.shapes(row)[:2])], np.int64)


def _mask(calls: _Calls, row: int, scores: Shape) -> Shape:
    """The shape of what a call lays on the scores; () where it is as large as they are, or a number."""
    shapes = [shape for shape in calls.shapes(row)[:3] if len(shape) >= 2 and shape[-1] == scores[-1]]
    return next((shape for shape in shapes if elements(shape) < elements(scores)), ())
