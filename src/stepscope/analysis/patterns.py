"""Computations recognised from their operators: attention, losses over many classes, element-wise chains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.work import (
    ARITHMETIC,
    LARGEST,
    PLAIN,
    REDUCTIONS,
    VIEWS,
    Shape,
    Traffic,
    base_name,
    elements,
    first_shape,
    shapes_of,
    traffic,
    types_of,
)
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, meeting, outermost, row_numbers

NUMBER_BYTES: Final = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}

_SOFTMAX: Final = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
_PRODUCTS: Final = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::addmm")
_WRAPPERS: Final = frozenset({"aten::matmul", "aten::einsum", "aten::__matmul__", *_PRODUCTS})
_MASKS: Final = frozenset({"aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::add", "aten::add_"})
_DROPOUT: Final = frozenset({"aten::native_dropout", "aten::bernoulli_"})
"""Operators that draw what is dropped; `aten::dropout` alone does nothing, as in evaluation."""
_NEAREST: Final = 4
"""Number of matrix products to examine before and after a softmax."""
_FEWEST_KEYS: Final = 16
"""Least number of keys for attention; scores over fewer are those of a gate or a classifier."""
_MATH: Final = "aten::_scaled_dot_product_attention_math"


@dataclass(frozen=True, slots=True)
class WrittenOutAttention:
    """An attention computed by separate operators."""

    operators: Rows  # rows of `operators`: both products and the operators on the scores between them
    softmax: int  # row of the softmax
    second_product: int  # row of the innermost product of weights and values
    scores: Shape
    score_bytes: int  # one tensor of scores; 0 where their number type is unknown
    causal: bool  # whether one square mask is applied to all scores
    masked: bool  # whether any mask or bias is applied
    dropout: bool  # whether dropout is applied to the weights
    within: str  # name of the operator around all of it, "" if the program calls the operators itself

    @property
    def is_fallback(self) -> bool:
        """Whether the program calls the fused operator, which falls back to this."""
        return self.within == _MATH


def written_out_attention(trace: Trace, rows: Rows) -> list[WrittenOutAttention]:
    """Find attention computations among these rows of `operators` whose scores are separate tensors.

    The pattern is a softmax over scores (..., queries, keys), with a matrix product (queries, ..) x (.., keys) shortly
    before it and one of (queries, keys) with something shortly after it, on one thread. Needs input shapes.
    """
    operators = meeting(trace.operators.select("lane", "name"), rows, pl.col("name").is_in([*_PRODUCTS, *_SOFTMAX]))
    softmax = operators.filter(pl.col("name").is_in(_SOFTMAX))["row"].to_numpy()
    if not len(softmax):
        return []
    calls = _Calls(trace)
    products = operators.filter(pl.col("name").is_in(_PRODUCTS))
    by_lane = {lane: mine["row"].to_numpy() for (lane,), mine in products.group_by("lane", maintain_order=True)}
    found = []
    for row in outermost(softmax, calls.parent).tolist():
        mine = by_lane.get(calls.lane[row])
        written = None if mine is None else _around(calls, row, mine)
        if written is not None:
            found.append(written)
    return found


class _Calls:
    """Columns of `operators`, for access to single calls."""

    def __init__(self, trace: Trace) -> None:
        operators = trace.operators
        self.name = operators["name"].to_list()
        self.lane = operators["lane"].to_list()
        self.start: Rows = operators["start_ns"].to_numpy()
        self.end: Rows = self.start + operators["duration_ns"].to_numpy()
        self.parent: Rows = row_numbers(operators["parent"])
        self.lanes = operators["lane"].to_numpy()
        self._shapes = operators["input_shapes"]
        self._types = operators["input_types"]

    def shapes(self, row: int) -> tuple[Shape, ...]:
        return shapes_of(self._shapes[row])

    def types(self, row: int) -> tuple[str, ...]:
        return types_of(self._types[row])

    def wrapped(self, row: int) -> int:
        """Outermost matrix product around a product, or the product itself."""
        while self.parent[row] >= 0 and self.name[self.parent[row]] in _WRAPPERS:
            row = int(self.parent[row])
        return row


def _around(calls: _Calls, softmax: int, products: Rows) -> WrittenOutAttention | None:
    """Attention with this softmax, None for any other softmax; `products` of its thread, in order."""
    scores = next(iter(calls.shapes(softmax)), ())
    if len(scores) < 2 or scores[-1] < _FEWEST_KEYS:
        return None
    position = int(np.searchsorted(calls.start[products], calls.start[softmax]))
    before = [
        row
        for row in products[max(position - _NEAREST, 0) : position].tolist()
        if (pair := _matrices(calls, row)) and pair[0][-2:-1] + pair[1][-1:] == scores[-2:]
    ]
    after = [
        row
        for row in products[position : position + _NEAREST].tolist()
        if (pair := _matrices(calls, row)) and pair[0][-2:] == scores[-2:]
    ]
    if not before or not after:
        return None
    first, second = calls.wrapped(before[-1]), calls.wrapped(after[0])
    within = int(calls.parent[first])
    name = calls.name[within] if within >= 0 else ""
    if name.startswith("aten::") and name != _MATH:
        return None
    between = _on_scores(calls, first, second, scores)
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
        dropout=any(calls.name[row] in _DROPOUT for row in _between(calls, first, second).tolist()),
        within=name,
    )


def _matrices(calls: _Calls, row: int) -> tuple[Shape, Shape] | None:
    """Shapes of the two factors of a product."""
    shapes = [shape for shape in calls.shapes(row) if len(shape) >= 2]
    wanted = shapes[-2:]
    return (wanted[0], wanted[1]) if len(wanted) == 2 and wanted[0][-1] == wanted[1][-2] else None


def _on_scores(calls: _Calls, first: int, second: int, scores: Shape) -> Rows:
    """Outermost calls between two products of a thread whose first input has the size of the scores."""
    rows = outermost(_between(calls, first, second), calls.parent)
    size = elements(scores)
    return np.array([row for row in rows.tolist() if size in map(elements, calls.shapes(row)[:2])], np.int64)


def _between(calls: _Calls, first: int, second: int) -> Rows:
    """All calls between two products of a thread, also those inside others."""
    begin, end = np.searchsorted(calls.start, [calls.end[first], calls.start[second]])
    rows: Rows = np.arange(begin, end)
    mine: Rows = rows[calls.lanes[rows] == calls.lanes[first]]
    return mine


def _mask(calls: _Calls, row: int, scores: Shape) -> Shape:
    """Shape of the tensor that a call applies to the scores; () if as large as the scores, or a number."""
    shapes = [shape for shape in calls.shapes(row)[:3] if len(shape) >= 2 and shape[-1] == scores[-1]]
    return next((shape for shape in shapes if elements(shape) < elements(scores)), ())


_LOG_SOFTMAX: Final = "aten::_log_softmax"
_PROJECTIONS: Final = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm")
_TABLES: Final = ("aten::embedding", "aten::embedding_bag")
_VIEWS: Final = ("aten::index_select", "aten::select", "aten::as_strided")
_PARTS: Final = frozenset({"slice", "select", "as_strided", "narrow", "resolve_conj", "resolve_neg"})
_CONVERSIONS: Final = frozenset({"to", "_to_copy", "copy", "clone", "contiguous", "float", "empty_strided"})
_FARTHEST: Final = 200
"""Number of operators before a loss to search for the projection that made its scores."""


@dataclass(frozen=True, slots=True)
class LogitsLoss:
    """A loss over (positions, classes) scores."""

    positions: int
    classes: int
    projection: int  # row of `operators` that computed the scores, -1 if not found
    # rows of the operators on the scores between the projection and the loss, and of the loss, nested or not
    operators: Rows
    log_softmax: int
    score_bytes: int  # one tensor of scores as passed to the loss; 0 where their number type is unknown


def logits_losses(trace: Trace, rows: Rows, fewest_classes: int) -> list[LogitsLoss]:
    """Find losses over at least this many classes among these rows of `operators`. Needs input shapes."""
    calls = trace.operators[rows].select(
        "lane", "name", "input_types", pl.col("input_shapes").fill_null(""), row=pl.Series(rows, dtype=pl.Int64)
    )
    found = []
    for _, mine in calls.group_by("lane", maintain_order=True):
        places = np.flatnonzero((mine["name"] == _LOG_SOFTMAX).to_numpy()).tolist()
        scores = [first_shape(text) for text in mine["input_shapes"].gather(places)]
        large = [len(shape) > 1 and shape[-1] >= fewest_classes for shape in scores]
        losses = _Losses(mine) if any(large) else None
        for place, shape in compress(zip(places, scores, strict=True), large):
            if losses is not None and (loss := losses.at(place, shape)) is not None:
                found.append(loss)
    return found


class _Losses:
    """One thread's operators, for the search around its losses."""

    def __init__(self, calls: pl.DataFrame) -> None:
        names, shapes = calls["name"], calls["input_shapes"]
        self._calls = calls
        self._rows = calls["row"].to_numpy()
        self._projections = np.flatnonzero(names.is_in(_PROJECTIONS).to_numpy())
        self._made = [_made(shapes_of(text)) for text in shapes.gather(self._projections)]
        self._losses = np.flatnonzero((names == "aten::cross_entropy_loss").to_numpy())
        different = shapes.unique().to_list()
        sizes = shapes.replace_strict(different, [*map(_first_size, different)], return_dtype=pl.Int64)
        self._sizes = np.where(names.str.contains("[Bb]ackward").to_numpy(), -1, sizes.to_numpy())

    def at(self, place: int, scores: Shape) -> LogitsLoss | None:
        """The loss whose log-softmax stands at `place`, if a projection before it made the scores."""
        size, classes = elements(scores), scores[-1]
        first, last = np.searchsorted(self._projections, [place - _FARTHEST, place]).tolist()
        made = (size // classes, classes)
        makers = [int(self._projections[each]) for each in range(first, last) if self._made[each] == made]
        if not makers:
            return None
        # Nested products come outermost first; the last product before the loss made the scores.
        projection = next(number for number in makers if makers[-1] - number < 16)
        mine = np.flatnonzero(self._sizes[projection + 1 : place + _FARTHEST] == min(size, LARGEST)) + projection + 1
        around = self._losses[slice(*np.searchsorted(self._losses, [projection + 1, place]))]
        types = types_of(self._calls["input_types"][place])
        return LogitsLoss(
            positions=size // classes,
            classes=classes,
            projection=int(self._rows[projection]),
            operators=np.unique(self._rows[np.concatenate([mine, around])]),
            log_softmax=int(self._rows[place]),
            score_bytes=size * NUMBER_BYTES.get(types[0] if types else "", 0),
        )


def _first_size(input_shapes: str | None) -> int:
    """Elements of the first input, 1 for a number; -1 without inputs."""
    return min(next(map(elements, shapes_of(input_shapes)), -1), LARGEST)


def _made(shapes: tuple[Shape, ...]) -> tuple[int, int]:
    """Output size (rows, columns) of a product of these inputs; a linear layer's weights are transposed."""
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if len(matrices) < 2:
        return (0, 0)
    left, right = matrices[-2], matrices[-1]
    width = left[-1]
    columns = right[-1] if right[-2] == width else right[-2]
    return (elements(left) // max(width, 1), columns)


@dataclass(frozen=True, slots=True)
class UnreadScores:
    """Scores (positions, classes) of which only some positions are used."""

    positions: int
    kept: int  # positions that the next operators take
    classes: int
    rows: Rows  # of `operators`: the product, and conversions of all scores


def unread_scores(trace: Trace, rows: Rows, fewest_classes: int) -> Iterator[UnreadScores]:
    """Find products with at least this many classes whose next use takes fewer positions. Needs input shapes.

    Args:
        rows: of `operators`, in order of time.
    """
    operators = trace.operators
    around = operators["name"].gather(operators["parent"].gather(pl.Series(rows, dtype=pl.UInt32)))
    is_product = pl.col("name").is_in(_PROJECTIONS) & ~around.is_in(_PROJECTIONS).fill_null(value=False)
    calls = operators[rows].select(
        "lane", "name", "input_shapes", row=pl.Series(rows, dtype=pl.Int64), is_product=is_product
    )
    for _, mine in calls.group_by("lane", maintain_order=True):
        numbers, names = mine["row"].to_numpy(), mine["name"].to_list()
        shapes = mine["input_shapes"].to_list()
        for place in np.flatnonzero(mine["is_product"].to_numpy()).tolist():
            given = shapes_of(shapes[place])
            positions, classes = _made(given)
            if classes < fewest_classes or not given or len(given[0]) < 3 or given[0][-2] < 2:
                continue
            kept, handling = _next_use(names, shapes, place, positions, classes)
            if 0 < kept < positions:
                yield UnreadScores(positions, kept, classes, numbers[[place, *handling]])


def _next_use(
    names: list[str], shapes: list[str | None], place: int, positions: int, classes: int
) -> tuple[int, list[int]]:
    """How many positions the next use of scores takes, 0 if unknown, and the places of conversions before it."""
    handling: list[int] = []
    for number in range(place + 1, min(place + _FARTHEST, len(names))):
        taken = first_shape(shapes[number])
        if taken[-1:] != (classes,) or elements(taken) > positions * classes:
            continue
        if elements(taken) < positions * classes:
            return elements(taken) // classes, handling
        base = base_name(names[number])
        if base in _CONVERSIONS:
            handling.append(number)
        elif base not in VIEWS | _PARTS:
            return 0, []
    return 0, []


@dataclass(frozen=True, slots=True)
class DenseTable:
    """An embedding table with a dense gradient."""

    shape: Shape  # (rows, width) of the table
    lookups: Rows
    indices: float  # mean number of indices per call, including repeated ones
    whole: Rows  # rows of `operators` on tensors of the table's shape, without the lookups


def dense_tables(trace: Trace, rows: Rows, fewest_rows: int) -> list[DenseTable]:
    """Find tables with at least this many rows that these `operators` look up and whose gradient is dense.

    A table that is also used in a matrix product, as tied output weights do, has a dense gradient by nature and is left
    out. Needs input shapes.
    """
    operators = trace.operators.select("name", "input_shapes")
    lookups: dict[Shape, list[tuple[int, str]]] = {}
    looking_up = meeting(operators, rows, pl.col("name").is_in(_TABLES))
    for row, text in looking_up.select("row", "input_shapes").iter_rows():
        table = first_shape(text)
        if len(table) == 2 and table[0] >= fewest_rows:
            lookups.setdefault(table, []).append((row, text))
    if not lookups:
        return []
    calls = operators[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64))
    texts = calls["input_shapes"].unique().to_list()
    projected = calls.filter(pl.col("name").is_in(_PROJECTIONS))["input_shapes"].unique().to_list()
    multiplied = {shape for text in projected for shape in shapes_of(text)}
    is_view = pl.any_horizontal(pl.col("name").str.starts_with(view) for view in _VIEWS)
    found = []
    for table, looked_up in lookups.items():
        whole = calls.filter(
            pl.col("input_shapes").is_in([text for text in texts if first_shape(text) == table])
            & ~pl.col("name").str.contains("embedding", literal=True)
            & ~is_view
        )
        cleared = whole["name"].is_in(["aten::zero_", "aten::fill_"]).any()
        indices = [elements(shapes_of(text)[1]) for _, text in looked_up if len(shapes_of(text)) > 1]
        if multiplied.isdisjoint((table, table[::-1])) and cleared and indices:
            rows = np.array([row for row, _ in looked_up], np.int64)
            found.append(DenseTable(table, rows, float(np.mean(indices)), whole["row"].to_numpy()))
    return found


LONGEST_CHAIN: Final = 24
"""Most operators in a chain; longer ones are cut, since no single function would hold them."""
FUSIBLE: Final = PLAIN | ARITHMETIC | REDUCTIONS | {"rand_like", "bernoulli", "softmax", "log_softmax"}


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that one fused kernel could replace."""

    names: tuple[str, ...]  # operators, named as by `base_name`; views in between are left out
    in_place: tuple[bool, ...]  # whether each of them overwrites its first input
    operators: tuple[int, ...]  # rows of `operators`, in order
    traffic: tuple[Traffic, ...]  # memory traffic of each
    place: tuple[str | None, str | None]  # file and function of the user's line, or None

    @property
    def elements(self) -> int:
        """Number of elements in the largest tensor of the chain."""
        return max(prod(each.output) for each in self.traffic)

    @property
    def elements_moved(self) -> int:
        """Numbers read and written by the separate operators."""
        return sum(each.elements for each in self.traffic)

    @property
    def elements_moved_fused(self) -> int:
        """Numbers read and written after fusion: the first input, further inputs of its size, one result.

        Shapes decide which tensors are internal: of each operator but the first, at most one input, of the largest
        size, comes from outside.
        """
        full = self.elements
        result = prod(self.traffic[-1].output)
        first = sum(map(prod, self.traffic[0].inputs))
        extra = sum(
            prod(shape)
            for each in self.traffic[1:]
            for shape in each.inputs
            if len(each.inputs) > 1 and prod(shape) < full
        )
        return min(first + result + min(extra, full), self.elements_moved)


def chains(trace: Trace, rows: Rows, shortest: int = 2) -> Iterator[Chain]:
    """Find chains among these operators.

    Args:
        rows: rows of `operators`: outermost candidates, in order of time. Any other operator between two on one thread
            breaks a chain.
        shortest: least operators in a chain.
    """
    columns = ["lane", "name", "input_shapes", "source_file", "source_function"]
    table = trace.operators.select(columns)[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64))
    for _, mine in table.group_by("lane", maintain_order=True):
        yield from _of_thread(mine, shortest)


def _of_thread(table: pl.DataFrame, shortest: int) -> Iterator[Chain]:
    current = _Growing((None, None))
    for _, name, shapes, file, function, row in table.iter_rows():
        base = base_name(name)
        if base in VIEWS:
            current.see(traffic(shapes))
            continue
        moved = traffic(shapes, reduces=base in REDUCTIONS) if base in FUSIBLE else None
        place = (file, function)
        if not current.takes(moved, place):
            yield from current.chain(shortest)
            current = _Growing(place)
        if moved is not None:
            current.add(base, name.endswith("_"), row, moved)
    yield from current.chain(shortest)


class _Growing:
    """A chain under construction."""

    def __init__(self, place: tuple[str | None, str | None]) -> None:
        self.place = place
        self._rows: list[tuple[str, bool, int, Traffic]] = []
        self._shapes: set[Shape] = set()

    def takes(self, moved: Traffic | None, place: tuple[str | None, str | None]) -> bool:
        """Whether an operator continues with the chain's result in the same function."""
        if moved is None or place != self.place or len(self._rows) >= LONGEST_CHAIN:
            return False
        return not self._rows or not self._shapes.isdisjoint(moved.inputs)

    def add(self, name: str, in_place: bool, row: int, moved: Traffic) -> None:
        self._rows.append((name, in_place, row, moved))
        self._shapes.update(moved.inputs)
        self._shapes.add(moved.output)
        if name in REDUCTIONS:
            self._shapes.add((*moved.output[:-1], 1))
            self._shapes.add(moved.output[:-1])

    def see(self, moved: Traffic | None) -> None:
        """Note a view: its new shape is unknown, the previous shapes still belong to the chain."""
        if moved is not None and self._rows:
            self._shapes.update(moved.inputs)

    def chain(self, shortest: int) -> Iterator[Chain]:
        if len(self._rows) >= shortest:
            names, in_place, rows, moved = zip(*self._rows, strict=True)
            yield Chain(names, in_place, rows, moved, self.place)
