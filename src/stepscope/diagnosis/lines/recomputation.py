"""Forward operators that run again inside the backward pass: activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.loops import PARAMETRISED
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.work import base_name
from stepscope.diagnosis.view import View, rows_of
from stepscope.trace.nesting import Rows

_LAYERS: Final = PARAMETRISED - {"addmm", "convolution", "_convolution"}
"""Operators that only a program calls, and no backward pass by itself."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What the backward passes of the span compute again.

    Attributes:
        rows: rows of `operators`, outermost among these.
        stretches: from the first to the last of them in each node; columns lane, start_ns, duration_ns.
        calls: the forward calls of the modules that are computed again, as in `modules`; maybe none.
        bytes: memory that these operators allocate in a step.
        peak_bytes: memory at the peak, with parameters, gradients and optimizer state where they are known.
        capacity_bytes: memory that there is.
    """

    rows: Rows
    stretches: pl.DataFrame
    calls: pl.DataFrame
    bytes: int
    peak_bytes: int
    capacity_bytes: int


def recomputation(view: View) -> Recomputation | None:
    """Find operators that make autograd nodes inside autograd nodes; None without them, or if memory is unknown.

    Only nodes that run a layer again count, so a backward pass that is differentiated itself does not.
    """
    operators = view.operators
    nodes = rows_of(operators.filter(pl.col("parent").is_null() & pl.col("name").str.contains(BACKWARD_NAME)))
    is_forward = (pl.col("sequence_number") >= 0) & ~pl.col("name").str.contains(BACKWARD_NAME)
    inner = operators.filter(is_forward & pl.Series(view.inside(nodes)[rows_of(operators)]))
    if inner.is_empty():
        return None
    around = _outermost_of(view)[rows_of(inner)]
    layers = inner["name"].map_elements(base_name, pl.String).is_in(list(_LAYERS)).to_numpy()
    mine = np.isin(around, around[layers])
    memory = _memory(view)
    if not mine.any() or memory is None:
        return None
    table = inner.filter(pl.Series(mine)).with_columns(node=pl.Series(around[mine]))
    end = (pl.col("start_ns") + pl.col("duration_ns")).max()
    stretches = table.group_by("node", maintain_order=True).agg(
        pl.col("lane").first(), pl.col("start_ns").min(), (end - pl.col("start_ns").min()).alias("duration_ns")
    )
    rows = view.outermost(rows_of(table))
    allocated = view.operator_costs["bytes_allocated"].to_numpy()[view.inside(rows)].clip(0)
    calls = _forward_calls(view, np.unique(around[mine]))
    return Recomputation(rows, stretches, calls, int(allocated.sum()) // view.step_count, *memory)


def _outermost_of(view: View) -> Rows:
    """For each operator the outermost one around it, or itself."""
    result = np.arange(len(view.parents), dtype=np.int64)
    for row in np.flatnonzero(view.parents >= 0).tolist():
        result[row] = result[view.parents[row]]
    return result


def _memory(view: View) -> tuple[int, int] | None:
    """Memory at the peak and memory that there is, of what computes; None where either is unknown."""
    device = "cpu" if view.device is None else view.device
    memory = next((each for each in view.memories if each.device == device), None)
    if memory is None or memory.capacity_bytes is None:
        return None
    model, before = view.program.model, 0
    if not memory.is_total and model is not None:  # made before the recording
        sizes = (model.parameter_bytes, model.gradient_bytes, model.optimizer_state_bytes, model.buffer_bytes)
        before = sum(size or 0 for size in sizes)
    return memory.peak_bytes + before, memory.capacity_bytes


def _forward_calls(view: View, nodes: Rows) -> pl.DataFrame:
    """The calls, outside of backward passes, of the modules that are called first in these nodes."""
    modules = view.begin_in_span(view.trace.modules).sort("start_ns")
    spans = view.trace.operators.select("start_ns", "duration_ns")[nodes].sort("start_ns")
    begin = spans["start_ns"].to_numpy()
    end = begin + spans["duration_ns"].to_numpy()
    starts = modules["start_ns"].to_numpy()
    node = np.searchsorted(begin, starts, side="right") - 1
    within = (node >= 0) & (starts < end[np.maximum(node, 0)])
    inside = modules.with_columns(node=pl.Series(node, dtype=pl.Int64)).filter(pl.Series(within))
    first = inside.unique("node", keep="first", maintain_order=True)
    return modules.filter(pl.Series(~within) & pl.col("name").is_in(first["name"].implode()))
