"""What rules about the program's own operators share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.loops import Loop
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.patterns import Chain
from stepscope.analysis.work import (
    ARITHMETIC,
    PLAIN,
    REDUCTIONS,
    VIEWS,
    base_name,
)
from stepscope.analysis.work import (
    TrafficShape as Shape,
)
from stepscope.analysis.work import (
    traffic_shapes_of as shapes_of,
)
from stepscope.diagnosis.finding import Remedy
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times
from stepscope.whatif import Change
from stepscope.whatif.changes import Lanes, scaled_host_time, scaled_operators, together

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


HostTime: TypeAlias = tuple[Lanes, Times, Times]
"""Threads, starts and ends of intervals; nanoseconds, each of shape (n,)."""
LONGEST_PAUSE_NS: Final = 50_000
"""Between two operators that follow each other; what takes longer is not Python's way from one to the next."""


def called_from_python(view: View) -> Rows:
    """Rows of the operators in the span that no operator of a library called, in order; the backward pass's left out.

    What runs inside a function of autograd that the program defined counts as the program's.
    """
    operators = view.operators
    parents = view.trace.operators["name"].gather(operators["parent"])
    libraries = parents.str.contains("::") | parents.str.contains(BACKWARD_NAME)
    mine = operators.filter(~libraries.fill_null(False) & ~operators["name"].str.contains(BACKWARD_NAME))
    return mine["row"].to_numpy().astype(np.int64)


def working_ns(view: View) -> Rows:
    """For each row of `operators`, the time in which its work was done: the device's, or without one the thread's."""
    if view.device is None:
        return view.trace.operators["duration_ns"].to_numpy()
    return view.operator_costs["device_total_ns"].to_numpy()


def work_left(view: View) -> WorkLeft:
    """What the trace shows of how fast work can be done."""
    return WorkLeft(view.trace, working_ns(view), on_device=view.device is not None)


def pauses_ns(view: View, rows: Rows) -> int:
    """Without a device: a thread's time between each of these operators, given in order, and the next."""
    return 0 if view.device is not None else _length(pauses(view, rows))


def pauses(view: View, rows: Rows) -> HostTime:
    """A thread's time between each of these operators, given in order, and the next."""
    lanes = view.trace.operators["lane"].to_numpy()[rows]
    start = view.trace.operators["start_ns"].to_numpy()[rows]
    end = start + view.trace.operators["duration_ns"].to_numpy()[rows]
    return lanes[:-1], end[:-1], np.clip(start[1:], end[:-1], end[:-1] + LONGEST_PAUSE_NS)


def pauses_of_all(view: View, sequences: Sequence[Rows]) -> HostTime:
    """A thread's time between the operators of each of these sequences; at least one."""
    each = [pauses(view, rows) for rows in sequences]
    return (
        np.concatenate([lanes for lanes, _, _ in each]),
        np.concatenate([starts for _, starts, _ in each]),
        np.concatenate([ends for _, _, ends in each]),
    )


def engine_pauses_ns(view: View, rows: Rows) -> int:
    """Without a device: the time after each of these outermost operators until the next one of its thread begins."""
    return 0 if view.device is not None else _length(engine_pauses(view, rows))


def engine_pauses(view: View, rows: Rows) -> HostTime:
    """The time after each of these outermost operators until the next one of its thread begins."""
    outermost = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    end = pl.col("start_ns") + pl.col("duration_ns")
    pause = (pl.col("start_ns").shift(-1).over("lane") - end).fill_null(0).clip(0, LONGEST_PAUSE_NS)
    following = outermost.select(pl.col("row").cast(pl.Int64), "lane", end=end, pause=pause)
    mine = following.filter(pl.col("row").is_in(pl.Series(rows, dtype=pl.Int64).implode()))
    ends = mine["end"].to_numpy()
    return mine["lane"].to_numpy(), ends, ends + mine["pause"].to_numpy()


def scaled_with_pauses(rows: Rows, between: Sequence[HostTime], factor: float) -> Change:
    """These operators, on the host and on the device, and these pauses between them take so many times as long."""
    return together(scaled_operators(rows, factor), *(scaled_host_time(*each, factor) for each in between))


def _length(time: HostTime) -> int:
    _, start, end = time
    return int((end - start).sum())


def outermost_in_order(view: View) -> tuple[Rows, Rows]:
    """All outermost operators, thread by thread in order of time, and each one's position there; -1 for others."""
    table = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    ordered: Rows = table["row"].to_numpy().astype(np.int64)
    position = np.full(view.trace.operators.height, -1, np.int64)
    position[ordered] = np.arange(len(ordered))
    return ordered, position


@dataclass(frozen=True, slots=True)
class FusedFunction:
    """One function that a framework has.

    Attributes:
        name: as it is written in a program.
        what: for a title.
        text, code: the remedy.
    """

    name: str
    what: str
    text: str
    code: str

    @property
    def remedy(self) -> Remedy:
        return Remedy(self.text, self.code)


def _function(name: str, code: str) -> FusedFunction:
    return FusedFunction(name, f"{name}()", f"Call {name}(), which does all of it in one kernel.", code)


_GELU_TANH: Final = _function("F.gelu", 'y = torch.nn.functional.gelu(x, approximate="tanh")')
_GELU: Final = _function("F.gelu", "y = torch.nn.functional.gelu(x)")
_SILU: Final = _function("F.silu", "y = torch.nn.functional.silu(x)      # instead of x * torch.sigmoid(x)")
_LAYER_NORM: Final = _function(
    "F.layer_norm", "y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)   # or nn.LayerNorm"
)
_BATCH_NORM: Final = _function(
    "F.batch_norm", "self.norm = torch.nn.BatchNorm1d(features)   # or BatchNorm2d for images"
)
_RMS_NORM: Final = _function(
    "F.rms_norm", "y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)   # or nn.RMSNorm"
)
_RMS_NORM_COMPILED: Final = FusedFunction(
    "torch.compile",
    "one compiled function",
    "Compile the function that holds the normalisation; F.rms_norm() is not fused on a CPU.",
    "@torch.compile                # F.rms_norm() runs the same operators on a CPU\ndef rms_norm(x, weight): ...",
)
_SOFTMAX: Final = _function("torch.softmax", "y = torch.softmax(x, dim=-1)")
_LOG_SOFTMAX: Final = _function(
    "F.log_softmax", "y = torch.nn.functional.log_softmax(x, dim=-1)   # with nll_loss: cross_entropy(x, target)"
)
_DROPOUT: Final = _function("F.dropout", "y = torch.nn.functional.dropout(x, p, training=self.training)")
_OPTIMIZER: Final = FusedFunction(
    "torch.optim",
    "an optimizer with fused=True",
    "Let an optimizer of torch.optim update all parameters in one fused call.",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)\noptimizer.step()",
)


def fused_function(chain: Chain, *, on_device: bool) -> FusedFunction | None:
    """The function that does what this chain does, None where none is known.

    Args:
        on_device: whether a device runs it; some functions are fused only there.
    """
    names = set(chain.names)
    if _updates_parameters(chain):
        return _OPTIMIZER
    if "softmax" in names and "log" in names:
        return _LOG_SOFTMAX
    if "exp" in names and "sum" in names and "div" in names:
        return _LOG_SOFTMAX if "log" in names else _SOFTMAX
    if "logsumexp" in names and "sub" in names:
        return _LOG_SOFTMAX
    if names & {"rand_like", "bernoulli"} and names & {"mul", "div"}:
        return _DROPOUT
    normalisation = _normalisation(chain)
    if normalisation is _RMS_NORM and not on_device:
        return _RMS_NORM_COMPILED
    return normalisation or _activation(chain)


def _updates_parameters(chain: Chain) -> bool:
    """A square root of a running average, and parameters that are overwritten with a quotient: Adam."""
    changed = {name for name, in_place in zip(chain.names, chain.in_place, strict=True) if in_place}
    return "sqrt" in chain.names and bool(changed & {"addcdiv", "sub", "add"}) and bool(changed & {"mul", "lerp"})


def _normalisation(chain: Chain) -> FusedFunction | None:
    names = set(chain.names)
    root = names & {"sqrt", "rsqrt", "std", "pow"} and names & {"div", "mul", "rsqrt"}
    averages = names & {"mean", "var", "var_mean"}
    if not root or not averages or not names & {"sqrt", "rsqrt", "std"}:
        return None
    if "sub" not in names:
        return _RMS_NORM if "mean" in names and names & {"pow", "square", "mul"} else None
    return _LAYER_NORM if _over_last_dimension(chain) else _BATCH_NORM


def _over_last_dimension(chain: Chain) -> bool:
    """Whether the averages that are subtracted are over the last dimension: one number for each row."""
    for name, moved in zip(chain.names, chain.traffic, strict=True):
        if name == "sub" and len(moved.inputs) > 1:
            small = min(moved.inputs, key=prod)
            return bool(small[-1] == 1)
    return True


def _activation(chain: Chain) -> FusedFunction | None:
    names = chain.names
    if "erf" in names and names.count("mul") + names.count("div") >= 2:
        return _GELU
    if "tanh" in names and names.count("mul") >= 3 and "add" in names:
        return _GELU_TANH
    after = names[names.index("sigmoid") + 1 :] if "sigmoid" in names else ()
    return _SILU if after and after[0] == "mul" else None


NORMS: Final = frozenset({"linalg_vector_norm", "norm", "frobenius_norm"})
_AROUND_NORMS: Final = NORMS | {"detach", "item", "pow", "square", "sum", "add", "to", "mul", "_to_copy"}


def told_elsewhere(found: Sequence[Loop]) -> list[Loop]:
    """Those that other rules tell: setting gradients to zero, clipping them, updating parameters by hand."""
    clips = any(is_clipping(loop) for loop in found)
    return [
        loop
        for loop in found
        if is_zeroing(loop) or is_clipping(loop) or is_update(loop) or (clips and is_scaling(loop))
    ]


def is_zeroing(loop: Loop) -> bool:
    """Gradients set to zero one by one."""
    names = {base_name(name) for name in loop.body}
    return "zero" in names and names <= {"zero", "detach", "requires_grad"}


def is_clipping(loop: Loop) -> bool:
    """Norms one by one."""
    names = {base_name(name) for name in loop.body}
    is_norm = not names.isdisjoint(NORMS) or {"pow", "sum"} <= names or {"square", "sum"} <= names
    return is_norm and names <= _AROUND_NORMS


def is_scaling(loop: Loop) -> bool:
    """Tensors multiplied in place one by one."""
    return set(loop.body) <= {"aten::mul_", "aten::detach", "aten::to"} and "aten::mul_" in loop.body


def is_update(loop: Loop) -> bool:
    """Adam, spelled out."""
    changed = {base_name(name) for name in loop.body if name.endswith("_")}
    return any(base_name(name) == "sqrt" for name in loop.body) and not changed.isdisjoint({"addcdiv", "sub", "add"})
