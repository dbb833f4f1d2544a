"""Short operator sequences that repeat many times in a row: loops in the user's code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSE_CODES, HostActivity
from stepscope.analysis.work import base_name
from stepscope.analysis.work import tensor_shapes_of as shapes_of
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows, at, inherit, row_numbers
from stepscope.trace.window import Times

SHORT_BODY: Final = 24
"""Most operators in the body of a small loop; longer bodies are mostly layers of a model."""
LONGEST_BODY: Final = 256
"""Most operators in a body: a small model that is called repeatedly."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Consecutive repetitions of a body."""

    repetitions: int  # number of consecutive repetitions
    body: tuple[str, ...]  # operator names of one repetition
    operators: Rows  # rows of `operators`: all outermost calls, in order


def loops(
    trace: Trace, activity: HostActivity, window: Window, minimum_repetitions: int, step_starts: Times
) -> list[Loop]:
    """Find repeated sequences of outermost operators on each thread; long bodies may have others in between.

    Operators of the optimizer, of the data loader and of the backward pass itself do not start a loop, and repetitions
    end where a step does.

    Args:
        window: only operators that start in it.
        step_starts: start times of steps, in order; shape (n,).
    """
    operators = trace.operators
    outermost = operators.with_row_index("row").filter(
        pl.col("parent").is_null()
        & pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left")
        & ~pl.col("name").str.contains(r"^autograd::engine|Backward\d*$")
    )
    slices = activity.slices_of("operators")
    excluded = [CAUSE_CODES["optimizer"], CAUSE_CODES["input"]]
    keep = ~np.isin(activity.cause_of(slices[outermost["row"].to_numpy()]), excluded)
    outermost = outermost.filter(pl.Series(keep, dtype=pl.Boolean))
    step = np.searchsorted(step_starts, outermost["start_ns"].to_numpy(), side="right")
    outermost = outermost.with_columns(step=pl.Series(step, dtype=pl.Int64))
    found: list[Loop] = []
    for _, mine in outermost.group_by("lane", "step", maintain_order=True):
        codes = mine["name"].rank("dense").to_numpy().astype(np.int64)
        rows = mine["row"].to_numpy().astype(np.int64)
        for first, last, body in _runs(codes, minimum_repetitions):
            called = rows[first:last]
            names = tuple(mine["name"][first : first + body])
            found.append(Loop((last - first) // body, names, called))
    return found


def _runs(codes: npt.NDArray[np.int64], minimum: int) -> list[tuple[int, int, int]]:
    """Ranges (first, last, body length) in which the sequence repeats itself at least `minimum` times.

    Shorter bodies are found first and excluded from later searches, but a long body may contain short loops or equal
    layers.
    """
    taken = np.zeros(len(codes), np.bool_)
    result: list[tuple[int, int, int]] = []
    for body in range(1, min(LONGEST_BODY, len(codes) // max(minimum, 1)) + 1):
        same = codes[body:] == codes[:-body]
        if np.count_nonzero(same) < (minimum - 1) * body:
            continue
        if body <= SHORT_BODY:
            same &= ~taken[body:] & ~taken[:-body]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = (end - begin + body) // body * body
            # Any multiple of a body also repeats itself.
            is_part = any(first <= begin and begin + length <= last for first, last, _ in result)
            if length >= minimum * body and not is_part:
                result.append((begin, begin + length, body))
                taken[begin : begin + length] = True
    return sorted(result)


PARAMETRISED: Final = frozenset(
    {
        "linear", "addmm", "embedding", "embedding_bag", "layer_norm", "rms_norm", "batch_norm", "group_norm",
        "conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose2d", "lstm", "gru", "rnn_tanh",
    }
)  # fmt: skip
"""Operators that nearly always have a parameter of their layer."""
PRODUCTS: Final = frozenset({"mm", "matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"})
"""Operators that may have a parameter."""
CHOOSING: Final = frozenset({"index", "index_put", "masked_select", "nonzero", "index_select", "index_add"})
"""Operators that select, or write back, some rows of a tensor."""
_WEIGHT: Final = {
    "linear": 1, "conv1d": 1, "conv2d": 1, "conv3d": 1, "convolution": 1, "_convolution": 1, "conv_transpose2d": 1,
    "embedding": 0, "embedding_bag": 0,
}  # fmt: skip
"""Index of the input that is nearly always a parameter."""
_COLLECTING: Final = ("cat", "stack")
_NEAR: Final = 4
"""Number of operators after a loop within which its results must be collected."""
_MOST: Final = 0.5
_ACCUMULATING: Final = r"AccumulateGrad$"


@dataclass(frozen=True, slots=True)
class LoopSigns:
    """Evidence about a repeated sequence; None where the trace does not show it."""

    is_counted: bool | None  # an operator gets another constant in most repetitions, such as an increasing index
    is_collected: bool  # results of the repetitions are combined into one tensor afterwards
    has_parameters: bool  # an operator of the body may have a parameter
    own_modules: bool | None  # most repetitions run in modules of their own
    own_parameters: bool | None  # there are as many gradients as if each repetition had its own parameters
    chooses_rows: bool  # the body selects some rows of a tensor, as for experts
    shares_parameters: bool  # the model is certainly too small for each repetition to have its own parameters

    @property
    def is_clear(self) -> bool:
        """Whether even few repetitions are certainly a loop."""
        return self.is_collected or bool(self.is_counted)

    @property
    def is_loop(self) -> bool:
        """Whether the sequence is a loop rather than a stack of layers."""
        if self.is_collected or not self.has_parameters:
            return True
        if self.is_counted and self.chooses_rows:
            return True
        if self.shares_parameters:
            return True
        if self.own_modules is not None:
            return not self.own_modules
        if self.own_parameters is not None:
            return not self.own_parameters
        return bool(self.is_counted)


class SignsOfLoops:
    """Search for evidence of loops in one trace.

    Args:
        step_count: number of steps in which the loops were found.
        parameters: number of the model's parameters, if known.
    """

    def __init__(self, trace: Trace, activity: HostActivity, step_count: int, parameters: int | None = None) -> None:
        self._parameters = parameters
        self._trace = trace
        self._activity = activity
        self._step_count = step_count

    def of(self, loop: Loop) -> LoopSigns:
        """Collect the evidence about this loop."""
        turns = loop.operators.reshape(loop.repetitions, len(loop.body))
        names = [base_name(name) for name in loop.body]
        parametrised = sum(name in PARAMETRISED for name in names)
        has_parameters = parametrised > 0 or not PRODUCTS.isdisjoint(names)
        return LoopSigns(
            is_counted=self._is_counted(turns),
            is_collected=self._is_collected(loop),
            has_parameters=has_parameters,
            own_modules=self._own_modules(turns) if has_parameters else None,
            own_parameters=self._own_parameters(loop.repetitions * max(parametrised, 1)) if has_parameters else None,
            chooses_rows=not CHOOSING.isdisjoint(names),
            shares_parameters=self._shares_parameters(turns, names),
        )

    def _shares_parameters(self, turns: Rows, names: list[str]) -> bool:
        if not self._parameters:
            return False
        shapes = self._trace.operators["input_shapes"]
        needed = 0
        for column, name in zip(turns.T, names, strict=True):
            if name in _WEIGHT:
                for text, count in shapes.gather(column).value_counts().iter_rows():
                    inputs = shapes_of(text)
                    needed += count * prod(inputs[_WEIGHT[name]]) if len(inputs) > _WEIGHT[name] else 0
        return needed > self._parameters

    def _is_counted(self, turns: Rows) -> bool | None:
        values = self._trace.operators["input_values"]
        if values.null_count() == len(values):
            return None
        shapes = self._trace.operators["input_shapes"]
        for column in turns.T:
            taken = values.gather(column)
            if taken.n_unique() > _MOST * len(column) and shapes.gather(column).n_unique() <= _MOST * len(column):
                return True
        return False

    def _is_collected(self, loop: Loop) -> bool:
        """Whether an operator right after the loop takes a list of as many tensors as there were repetitions."""
        following = self._following[int(loop.operators[-1])]
        if following < 0:
            return False
        names, shapes = self._trace.operators["name"], self._trace.operators["input_shapes"]
        rows = self._outermost[following : following + _NEAR].tolist()
        return any(
            base_name(names[row]) in _COLLECTING
            and len(shapes_of(shapes[row])) in (loop.repetitions, loop.repetitions + 1)
            for row in rows
        )

    @cached_property
    def _outermost(self) -> Rows:
        """Outermost operators, by thread and time."""
        rows = self._trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
        return rows["row"].to_numpy().astype(np.int64)

    @cached_property
    def _following(self) -> Rows:
        """For each operator the position in `_outermost` after its own; -1 for nested ones."""
        position = np.full(self._trace.operators.height, -1, np.int64)
        position[self._outermost] = np.arange(1, len(self._outermost) + 1)
        return position

    def _own_modules(self, turns: Rows) -> bool | None:
        modules = self._modules
        if modules is None:
            return None
        innermost = at(modules, self._activity.slices_of("operators")[turns])
        if (innermost < 0).all():
            return None
        counts = [len(np.unique(column[column >= 0])) for column in innermost.T]
        return max(counts) > _MOST * len(turns)

    @cached_property
    def _modules(self) -> Rows | None:
        """For each slice the index of the innermost module call around it, -1 for none; None without any."""
        is_module = pl.col("name").str.starts_with("nn.Module: ")
        module = self._trace.frames.select(pl.when(is_module).then(pl.col("name").rank("dense"))).to_series()
        if module.null_count() == len(module):
            return None
        return inherit(self._activity.spread("frames", row_numbers(module)), self._activity.around)

    def _own_parameters(self, needed: int) -> bool | None:
        return self._gradients_per_step >= needed if self._gradients_per_step else None

    @cached_property
    def _gradients_per_step(self) -> float:
        names = self._trace.operators.filter(pl.col("parent").is_null())["name"]
        return float(names.str.contains(_ACCUMULATING).sum()) / self._step_count
