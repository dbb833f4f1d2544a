"""Losses over the scores of many classes, and embedding tables with gradients as large as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attention import NUMBER_BYTES
from stepscope.analysis.shapes import Shape, elements, shapes_of, types_of
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

_LOG_SOFTMAX: Final = "aten::_log_softmax"
_PROJECTIONS: Final = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm")
_TABLES: Final = ("aten::embedding", "aten::embedding_bag")
_VIEWS: Final = ("aten::index_select", "aten::select", "aten::as_strided")
_FARTHEST: Final = 200
"""Operators before a loss among which the projection that made its scores is looked for."""


@dataclass(frozen=True, slots=True)
class LogitsLoss:
    """One loss over (positions, classes) scores.

    Attributes:
        positions, classes: of the scores.
        projection: row of `operators` that computed them, -1 where it was not found.
        operators: rows of what works on the scores between the projection and the loss, and of the loss, nested or not.
        log_softmax: row of the normalisation.
        score_bytes: of one tensor of scores as the loss takes them; 0 where their type is unknown.
    """

    positions: int
    classes: int
    projection: int
    operators: Rows
    log_softmax: int
    score_bytes: int


def logits_losses(trace: Trace, rows: Rows, fewest_classes: int) -> list[LogitsLoss]:
    """The losses among these rows of `operators` that are taken over at least so many classes. Needs input shapes."""
    calls = trace.operators[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64)).select(
        "row", "lane", "name", "input_shapes", "input_types"
    )  # fmt: skip
    found = []
    for _, mine in calls.group_by("lane", maintain_order=True):
        names, shapes = mine["name"].to_list(), mine["input_shapes"].to_list()
        for place in np.flatnonzero((mine["name"] == _LOG_SOFTMAX).to_numpy()).tolist():
            scores = next(iter(shapes_of(shapes[place])), ())
            if len(scores) < 2 or scores[-1] < fewest_classes:
                continue
            loss = _loss(mine, names, shapes, place, scores)
            if loss is not None:
                found.append(loss)
    return found


def _loss(
    calls: pl.DataFrame, names: list[str], shapes: list[str | None], place: int, scores: Shape
) -> LogitsLoss | None:
    size, classes = elements(scores), scores[-1]
    first = max(place - _FARTHEST, 0)
    makers = [number for number in range(first, place) if names[number] in _PROJECTIONS
              and _made(shapes_of(shapes[number])) == (size // classes, classes)]  # fmt: skip
    if not makers:
        return None
    # Of products inside each other the outermost comes first; of several, the last before the loss made the scores.
    after = max(makers)
    outer = [number for number in makers if after - number < 16]
    mine = [number for number in range(outer[0] + 1, min(place + _FARTHEST, len(names)))
            if size in map(elements, shapes_of(shapes[number])[:1]) and "Backward" not in names[number]
            and "backward" not in names[number]]  # fmt: skip
    around = [number for number in range(outer[0] + 1, place) if names[number] == "aten::cross_entropy_loss"]
    rows = calls["row"].to_numpy()
    types = types_of(calls["input_types"][place])
    return LogitsLoss(
        positions=size // classes,
        classes=classes,
        projection=int(rows[outer[0]]),
        operators=np.unique(rows[[*mine, *around]]),
        log_softmax=int(rows[place]),
        score_bytes=size * NUMBER_BYTES.get(types[0] if types else "", 0),
    )


def _made(shapes: tuple[Shape, ...]) -> tuple[int, int]:
    """(rows, columns) of what a product of these inputs makes; a linear layer's weights are transposed."""
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if len(matrices) < 2:
        return (0, 0)
    left, right = matrices[-2], matrices[-1]
    width = left[-1]
    columns = right[-1] if right[-2] == width else right[-2]
    return (elements(left) // max(width, 1), columns)


@dataclass(frozen=True, slots=True)
class DenseTable:
    """An embedding table whose gradient is a whole table.

    Attributes:
        shape: (rows, width) of the table.
        lookups: rows of `operators`.
        indices: how many rows were looked up in the mean call, repetitions counted.
        whole: rows of `operators` on tensors of the table's shape that are not the lookups themselves.
    """

    shape: Shape
    lookups: Rows
    indices: float
    whole: Rows


def dense_tables(trace: Trace, rows: Rows, fewest_rows: int) -> list[DenseTable]:
    """Tables of at least so many rows, of which lookups among these `operators` take some and whose gradient is dense.

    A table that also stands in a matrix product, as tied output weights do, has a dense gradient by nature and is left
    out. Needs input shapes.
    """
    calls = trace.operators[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64))
    names, texts, numbers = calls["name"].to_list(), calls["input_shapes"].to_list(), calls["row"].to_numpy()
    lookups: dict[Shape, list[int]] = {}
    for place, name in enumerate(names):
        table = next(iter(shapes_of(texts[place])), ()) if name in _TABLES else ()
        if len(table) == 2 and table[0] >= fewest_rows:
            lookups.setdefault(table, []).append(place)
    if not lookups:
        return []
    firsts = [next(iter(shapes_of(text)), ()) for text in texts]
    found = []
    for table, places in lookups.items():
        multiplied = any(
            name in _PROJECTIONS and any(shape in (table, table[::-1]) for shape in shapes_of(text))
            for name, text in zip(names, texts, strict=True)
        )
        whole = [place for place, shape in enumerate(firsts) if shape == table and "embedding" not in names[place]
                 and not names[place].startswith(_VIEWS)]  # fmt: skip
        cleared = any(names[place] in ("aten::zero_", "aten::fill_") for place in whole)
        indices = [elements(shapes_of(texts[place])[1]) for place in places if len(shapes_of(texts[place])) > 1]
        if not multiplied and cleared and indices:
            found.append(DenseTable(table, numbers[places], float(np.mean(indices)), numbers[whole]))
    return found
