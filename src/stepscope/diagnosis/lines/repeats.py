"""The same work again: a prefix that is computed again with each new position, and ever more work in each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.loops import PARAMETRISED
from stepscope.analysis.rows import outermost
from stepscope.analysis.work import base_name, elements, tensor_shapes_of
from stepscope.diagnosis.lines.graphs import outermost_calls
from stepscope.diagnosis.view import View, rows_of
from stepscope.trace.nesting import Rows

_FEWEST: Final = 8
"""Calls in a step from which growing inputs are a pattern."""
_MOST: Final = 0.8
_GROWTH: Final = 1.5
_SHORT: Final = 0.05
"""Quantile of the calls' times that counts as the shortest; the very shortest may be a clock error."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Calls of one module whose input grows by the same amount from call to call of a step.

    Attributes:
        module: path of the outermost module.
        calls: columns as in `modules`, in order.
        rows: rows of `operators`: the outermost operators of the calls.
        left: for each of them the part of its time that a call with only the new positions would take, 0 to 1.
    """

    module: str
    calls: pl.DataFrame
    rows: Rows
    left: npt.NDArray[np.float64]


def recomputed_prefixes(view: View) -> Iterator[Prefix]:
    """Find modules that are called for a sequence that grows, each time for the whole sequence.

    The inputs of the operators with parameters count: with a cache they stay as large as the new positions.
    """
    calls = outermost_calls(view)
    if calls.height < _FEWEST or view.lane is None:
        return
    bounds = view.steps["start_ns"].to_numpy()
    step = np.searchsorted(bounds, calls["start_ns"].to_numpy(), side="right")
    calls = calls.with_columns(step=pl.Series(step, dtype=pl.Int64), size=pl.Series(_sizes(view, calls)))
    for (name,), mine in calls.group_by("name", maintain_order=True):
        growing = [part for _, part in mine.group_by("step", maintain_order=True) if _grows(part["size"].to_numpy())]
        if growing:
            yield _prefix(view, str(name), pl.concat(growing))


def _sizes(view: View, calls: pl.DataFrame) -> Rows:
    """For each call the sum of the input sizes of its operators with parameters."""
    operators = view.operators.filter((pl.col("lane") == view.lane) & pl.col("input_shapes").is_not_null())
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    sizes = np.zeros(len(begin), np.int64)
    columns = operators.select("name", "input_shapes", "start_ns")
    for name, shapes, start in columns.iter_rows():
        base = base_name(name)
        if base not in PARAMETRISED:
            continue
        call = int(np.searchsorted(begin, start, side="right")) - 1
        inputs = tensor_shapes_of(shapes)
        place = 1 if base.startswith("embedding") else 0
        if call >= 0 and start < end[call] and len(inputs) > place:
            sizes[call] += min(elements(inputs[place]), 2**40)
    return sizes


def _grows(sizes: Rows) -> bool:
    if len(sizes) < _FEWEST or sizes[0] <= 0 or sizes[-1] < _GROWTH * sizes[0]:
        return False
    steps = np.diff(sizes)
    usual = int(np.median(steps))
    return usual > 0 and float(np.mean(steps == usual)) >= _MOST


def _prefix(view: View, name: str, calls: pl.DataFrame) -> Prefix:
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    operators = view.operators.filter(pl.col("lane") == view.lane)
    starts = operators["start_ns"].to_numpy()
    call = np.searchsorted(begin, starts, side="right") - 1
    within = (call >= 0) & (starts < end[np.maximum(call, 0)])
    rows, call = rows_of(operators)[within], call[within]
    top = np.isin(rows, outermost(rows, view.parents))
    rows, call = rows[top], call[top]
    work = (
        view.trace.operators["duration_ns"] if view.device is None else view.operator_costs["device_total_ns"]
    ).to_numpy()[rows]
    taken = np.bincount(call, work, len(begin))
    shortest = float(np.quantile(taken, _SHORT)) if len(taken) else 0.0
    left = shortest / np.maximum(taken, 1.0)
    return Prefix(name, calls, rows, np.minimum(left, 1.0)[call])
