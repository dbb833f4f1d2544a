"""Shared by rules about the program's own operators: which these are, the pauses between them, and their work's
minimum time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.loops import Loop
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.patterns import WrittenOutAttention, written_out_attention
from stepscope.analysis.work import ARITHMETIC, PLAIN, REDUCTIONS, VIEWS, Shape, base_name
from stepscope.analysis.work import tensor_shapes_of as shapes_of
from stepscope.diagnosis.view import View, once, rows_of
from stepscope.trace.nesting import Rows, by_level, depths
from stepscope.trace.window import Times
from stepscope.whatif import Change
from stepscope.whatif.changes import Lanes, scaled_host_time, scaled_operators, together

_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "matmul", "linear", "baddbmm", "mv", "dot"})
_ELEMENTWISE: Final = PLAIN | ARITHMETIC | REDUCTIONS
_GOOD: Final = 0.9
"""Quantile that counts as the best rate; the very best may be a clock error."""
_SHORT: Final = 0.05
"""Quantile of lengths that counts as an operator's overhead."""
_SLICING: Final = frozenset({"select", "slice", "narrow", "index", "index_select", "unbind", "split", "chunk"})


class WorkLeft:
    """Estimates the least time that operators' work takes, from the trace's own rates."""

    def __init__(self, view: View) -> None:
        self._operators = view.trace.operators
        self._names_and_shapes = self._operators.select("name", "input_shapes")
        self._parents = view.parents
        self._working = working_ns(view)
        self._on_device = view.device is not None

    def ns(self, rows: Rows) -> float:
        """Sum over operators that run one after the other, nanoseconds.

        Matrix products are estimated from their operations and element-wise operators from the data they move;
        slicing counts as zero; other operators lose the overhead of the operators inside them.
        """
        columns = self._names_and_shapes[rows]
        result = 0.0
        for (name, shapes), taken, operators in zip(
            columns.iter_rows(), self._working[rows].tolist(), self._inner[rows].tolist(), strict=True
        ):
            base = base_name(name)
            if base in VIEWS or base in _SLICING:
                continue
            tensors = shapes_of(shapes)
            if base in _RECURRENT and tensors and self._ns_per_operation:
                left = _of_weights(tensors) * self._ns_per_operation
            elif base in _PRODUCTS and (work := operations(tensors)) and self._ns_per_operation:
                left = work * self._ns_per_operation
            elif base in PLAIN and tensors and self._ns_per_element:
                left = _elements(tensors) * self._ns_per_element
            else:
                left = taken - operators * self.overhead_ns
            result += min(max(left, 0.0), taken)
        return result

    def product_ns(self, operations: int) -> float:
        """Time of this many operations in matrix products; 0 if the trace has none."""
        return operations * self._ns_per_operation

    def elementwise_ns(self, elements: int) -> float:
        """Time of moving this many elements in elementwise operators; 0 if the trace has none."""
        return elements * self._ns_per_element

    @cached_property
    def overhead_ns(self) -> float:
        """Cost of a call that does no work."""
        idle = self._working > 0 if self._on_device else (self._inner == 1) & self._is(_ELEMENTWISE)
        lengths = self._working[idle]
        return float(np.quantile(lengths, _SHORT)) if len(lengths) else 0.0

    @cached_property
    def _inner(self) -> Rows:
        """Number of operators inside each operator, itself included."""
        count = np.ones(len(self._parents), np.int64)
        for rows in by_level(depths(self._parents))[:0:-1]:
            np.add.at(count, self._parents[rows], count[rows])
        return count

    def _is(self, names: frozenset[str]) -> npt.NDArray[np.bool_]:
        base = self._operators["name"].str.extract(r"([^:]*?)_?$").fill_null("")
        return base.is_in(list(names)).to_numpy()

    @cached_property
    def _ns_per_operation(self) -> float:
        return self._best_rate(_PRODUCTS, operations)

    @cached_property
    def _ns_per_element(self) -> float:
        return self._best_rate(PLAIN, _elements)

    def _best_rate(self, names: frozenset[str], amount: Callable[[tuple[Shape, ...]], int]) -> float:
        """Nanoseconds per unit of `amount` at these operators' best rate; equal operators count by their median."""
        alike = (
            self._operators.select("name", "input_shapes", working=pl.Series(self._working))
            .filter(pl.Series(self._is(names)) & (pl.col("working") > 0) & pl.col("input_shapes").is_not_null())
            .group_by("name", "input_shapes")
            .agg(pl.col("working").median().cast(pl.Int64))
        )
        rates = [
            taken / work
            for shapes, taken in alike.select("input_shapes", "working").iter_rows()
            if (work := amount(shapes_of(shapes))) and taken > 2 * self.overhead_ns
        ]
        return float(np.quantile(rates, 1 - _GOOD)) if rates else 0.0


@once
def work_left(view: View) -> WorkLeft:
    """The estimates of a view, with what they rest on computed once for all rules."""
    return WorkLeft(view)


def _elements(tensors: tuple[Shape, ...]) -> int:
    return sum(map(prod, tensors))


def _of_weights(tensors: tuple[Shape, ...]) -> int:
    """Multiplications and additions of a recurrent layer's inputs with its weights, which are its matrices."""
    return 2 * prod(tensors[0][:-1]) * sum(prod(shape) for shape in tensors[1:] if len(shape) == 2)


def operations(tensors: tuple[Shape, ...]) -> int:
    """Multiplications and additions of a matrix product of these inputs; 0 if the shapes are unclear.

    The inputs are those of mm, bmm, matmul and linear (two matrices first), addmm (a bias, then two matrices), or of mv
    and dot, which end with a vector.
    """
    if len(tensors) == 2 and len(tensors[1]) == 1 and tensors[0][-1:] == tensors[1]:
        return 2 * prod(tensors[0])
    matrices = [shape for shape in tensors if len(shape) >= 2]
    if len(matrices) < 2:
        return 0
    left, right = matrices[-2], matrices[-1]
    if left[-1] not in right[-2:]:
        return 0
    return 2 * prod(left) * (right[-1] if left[-1] == right[-2] else right[-2])


@once
def attention_by_hand(view: View) -> list[WrittenOutAttention]:
    """The attention in the span whose scores are separate tensors."""
    return written_out_attention(view.trace, rows_of(view.operators))


HostTime: TypeAlias = tuple[Lanes, Times, Times]
"""Threads, starts and ends (nanoseconds) of intervals, each of shape (n,)."""
LONGEST_PAUSE_NS: Final = 50_000
"""Longest pause between consecutive operators that counts: Python needs no longer to reach the next one."""


@once
def called_from_python(view: View) -> Rows:
    """Rows of the forward operators in the span that no library operator called, in order.

    Operators inside a custom autograd function of the program count as the program's.
    """
    operators = view.operators
    parents = view.trace.operators["name"].gather(operators["parent"])
    libraries = parents.str.contains("::") | parents.str.contains(BACKWARD_NAME)
    return rows_of(operators.filter(~libraries.fill_null(False) & ~operators["name"].str.contains(BACKWARD_NAME)))


def working_ns(view: View) -> Rows:
    """For each row of `operators`, the time of its work: on the device, or without a device on the thread."""
    if view.device is None:
        return view.trace.operators["duration_ns"].to_numpy()
    return view.operator_costs["device_total_ns"].to_numpy()


def length_ns(view: View, time: HostTime) -> int:
    """Total length of a thread's pauses; 0 with a device."""
    _, start, end = time
    return int((end - start).sum()) if view.device is None else 0


def pauses(view: View, *sequences: Rows) -> HostTime:
    """A thread's time between each operator and the next one of its sequence; needs at least one operator."""
    operators = view.trace.operators
    starts, durations = operators["start_ns"].to_numpy(), operators["duration_ns"].to_numpy()
    row = np.concatenate([rows[:-1] for rows in sequences])
    following = np.concatenate([rows[1:] for rows in sequences])
    end = starts[row] + durations[row]
    return operators["lane"].to_numpy()[row], end, np.clip(starts[following], end, end + LONGEST_PAUSE_NS)


def engine_pauses(view: View, rows: Rows) -> HostTime:
    """The time after each of these outermost operators until the next operator of its thread begins."""
    outermost = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    end = pl.col("start_ns") + pl.col("duration_ns")
    pause = (pl.col("start_ns").shift(-1).over("lane") - end).fill_null(0).clip(0, LONGEST_PAUSE_NS)
    following = outermost.select(pl.col("row").cast(pl.Int64), "lane", end=end, pause=pause)
    mine = following.filter(pl.col("row").is_in(pl.Series(rows, dtype=pl.Int64).implode()))
    ends = mine["end"].to_numpy()
    return mine["lane"].to_numpy(), ends, ends + mine["pause"].to_numpy()


def scaled_with_pauses(rows: Rows, between: Sequence[HostTime], factor: float) -> Change:
    """Multiply the time of these operators, on the host and the device, and of the pauses between them."""
    return together(scaled_operators(rows, factor), *(scaled_host_time(*each, factor) for each in between))


def outermost_in_order(view: View) -> tuple[Rows, Rows]:
    """All outermost operators, by thread and time, and each operator's position in that order, -1 for others."""
    ordered = rows_of(view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row"))
    position = np.full(view.trace.operators.height, -1, np.int64)
    position[ordered] = np.arange(len(ordered))
    return ordered, position


NORMS: Final = frozenset({"linalg_vector_norm", "norm", "frobenius_norm"})
_AROUND_NORMS: Final = NORMS | {"detach", "item", "pow", "square", "sum", "add", "to", "mul", "_to_copy"}


def reported_elsewhere(found: Sequence[Loop]) -> list[Loop]:
    """Loops that other rules report: zeroing gradients, clipping them, and hand-written updates."""
    clips = any(is_clipping(loop) for loop in found)
    return [
        loop
        for loop in found
        if is_zeroing(loop) or is_clipping(loop) or is_update(loop) or (clips and is_scaling(loop))
    ]


def is_zeroing(loop: Loop) -> bool:
    names = {base_name(name) for name in loop.body}
    return "zero" in names and names <= {"zero", "detach", "requires_grad"}


def is_clipping(loop: Loop) -> bool:
    names = {base_name(name) for name in loop.body}
    is_norm = not names.isdisjoint(NORMS) or {"pow", "sum"} <= names or {"square", "sum"} <= names
    return is_norm and names <= _AROUND_NORMS


def is_scaling(loop: Loop) -> bool:
    return set(loop.body) <= {"aten::mul_", "aten::detach", "aten::to"} and "aten::mul_" in loop.body


def is_update(loop: Loop) -> bool:
    changed = {base_name(name) for name in loop.body if name.endswith("_")}
    return any(base_name(name) == "sqrt" for name in loop.body) and not changed.isdisjoint({"addcdiv", "sub", "add"})
