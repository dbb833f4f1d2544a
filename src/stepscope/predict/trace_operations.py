"""Operator calls of a trace, described independently of any device, and the device work that each launched.

Work (`stepscope.analysis.work_formulas`) and dimensions come from the shapes of the inputs; what shapes do not show is
not-a-number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import operator_places
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.operators import arithmetic
from stepscope.analysis.roofline import roofline_calls
from stepscope.analysis.work import ELEMENT_BYTES, LARGEST, NUMBER_TYPES, Call, Shape, Work, base_name, broadcast
from stepscope.analysis.work_formulas import CONVOLUTIONS, Layout, distinct_calls, spatial_size, work_of
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.operation_times import operation_times
from stepscope.predict.operations import (
    NO_TF32,
    Cast,
    Operations,
    OperationTimes,
    Tf32,
    by_type,
    in_precision,
    types_on,
)
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit


class Dimensions(NamedTuple):
    """Dimensions as in `stepscope.predict.operations.Operations`; None where shapes do not give them."""

    batch: float | None = None
    rows: float | None = None
    columns: float | None = None
    inner: float | None = None


UNKNOWN: Final = Dimensions()
_COPIES: Final = ("copy", "clone", "contiguous", "_to_copy")
_CHANNELS_AT_ONCE: Final = 8  # convolutions in 16 bits pad their channels to a multiple: 16 bytes
Formula: TypeAlias = Callable[[Call], Dimensions]


def dimensions(name: str, call: Call, output: Shape | None = None) -> Dimensions:
    """Compute the dimensions of a call.

    A call that is neither a product nor row-wise is one row of its output numbers, or as many rows of one number if
    its kernel reads one at a time: for operands that are broadcast, and for copies of three dimensions or more, which
    mostly permute them.

    Args:
        name: such as "aten::mm".
        output: spatial size of a convolution's output, if known from elsewhere.
    """
    short = base_name(name)
    if short in CONVOLUTIONS:
        return _convolution(CONVOLUTIONS[short], call, output)
    if short in _FORMULAS:
        return _FORMULAS[short](call)
    shapes = [shape for index in range(len(call.shapes)) if (shape := call.shape(index))]
    spread = broadcast(shapes) if shapes else None
    numbers = prod(spread) if spread is not None else max(map(prod, shapes), default=None)
    if numbers is None:
        return UNKNOWN
    is_broadcast = spread is not None and any(1 < prod(shape) < numbers for shape in shapes)
    is_permuted = short in _COPIES and len(shapes[0]) > 2
    return _floats(1, numbers, 1, 1) if is_broadcast or is_permuted else _floats(1, 1, numbers, 1)


# Products


def _product(first: int, second: int) -> Formula:
    def formula(call: Call) -> Dimensions:
        left, right = call.shape(first), call.shape(second)
        if not left or not right or len(left) != len(right) or len(left) not in (2, 3):
            return UNKNOWN
        return _floats(left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1])

    return formula


def _vector_product(matrix: int) -> Formula:
    def formula(call: Call) -> Dimensions:
        left = call.shape(matrix)
        return _floats(1, left[0], 1, left[1]) if left and len(left) == 2 else UNKNOWN

    return formula


def _linear(call: Call) -> Dimensions:
    left, weight = call.shape(0), call.shape(1)
    if not left or not weight or len(weight) != 2:
        return UNKNOWN
    return _floats(1, prod(left[:-1]), weight[0], weight[1])


def _matmul(call: Call) -> Dimensions:
    left, right = call.shape(0), call.shape(1)
    if not left or not right:
        return UNKNOWN
    columns = right[-1] if len(right) > 1 else 1
    if len(right) <= 2:  # one matrix for all of the left: PyTorch folds the batch into the rows
        return _floats(1, prod(left[:-1]), columns, left[-1])
    rows = left if len(left) > 1 else (1, *left)
    batch = broadcast([rows[:-2], right[:-2]])
    return UNKNOWN if batch is None else _floats(prod(batch), rows[-2], columns, rows[-1])


def _convolution(layout: Layout, call: Call, output: Shape | None) -> Dimensions:
    """Dimensions of the equivalent product, output points x weight; a backward pass has one per wanted gradient."""
    weight, given = call.shape(layout.weight), call.shape(layout.input)
    if not weight or not given or len(weight) != len(given) or len(weight) < 3:
        return UNKNOWN
    transposed = layout.transposed if isinstance(layout.transposed, bool) else call.flag(layout.transposed)
    products = 1
    if layout.gradient is not None:
        gradient = call.shape(layout.gradient)
        flags = (True, False) if layout.wanted is None else call.flags(layout.wanted)
        if not gradient or flags is None or transposed is None:
            return UNKNOWN
        products, points = sum(flags[:2]), given if transposed else gradient
    elif transposed:
        points = given
    else:
        spatial = spatial_size(layout, call, given, weight) or output
        if spatial is None:
            return UNKNOWN
        points = (given[0], weight[0], *spatial)
    channels = weight[1]
    if ELEMENT_BYTES[call.type(layout.weight)] == 2:
        channels = -(-channels // _CHANNELS_AT_ONCE) * _CHANNELS_AT_ONCE
    return _floats(products, points[0] * prod(points[2:]), weight[0], channels * prod(weight[2:]))


def _attention(query: int, *, heads_first: bool = True) -> Formula:
    """Formula for attention: batch * heads products of queries x keys, with the head size as inner dimension."""

    def formula(call: Call) -> Dimensions:
        q, k = call.shape(query), call.shape(query + 1)
        if not q or not k or len(q) != 4 or len(k) != 4:
            return UNKNOWN
        heads, positions = (1, 2) if heads_first else (2, 1)
        return _floats(q[0] * q[heads], q[positions], k[positions], q[3])

    return formula


# Row by row


def _row_wise(columns: Callable[[Call, Shape], int]) -> Formula:
    def formula(call: Call) -> Dimensions:
        shape = call.shape(0)
        if not shape:
            return UNKNOWN
        along = columns(call, shape)
        return _floats(1, prod(shape) // along if along else 0, along, 1)

    return formula


def _along(place: int) -> Formula:
    """Formula for rows along the dimension given by input `place`, by default the last."""

    def columns(call: Call, shape: Shape) -> int:
        text = call.values[place] if place < len(call.values) else ""
        at = int(text) if text.lstrip("-").isdecimal() and len(text) < 4 else -1
        return shape[at] if -len(shape) <= at < len(shape) else shape[-1]

    return _row_wise(columns)


def _normalised_by(weight: int) -> Formula:
    """Formula for rows of as many trailing dimensions as the weight has."""
    return _row_wise(lambda call, shape: prod(call.shape(weight) or shape[-1:]))


def _by_channel(call: Call) -> Dimensions:
    """Batch normalisation: each channel is a row."""
    shape = call.shape(0)
    if not shape or len(shape) < 2:
        return UNKNOWN
    return _floats(1, shape[1], shape[0] * prod(shape[2:]), 1)


def _by_group(call: Call) -> Dimensions:
    """Group normalisation: each group of each sample is a row; inputs are tensor, batch, channels, points, groups."""
    shape = call.shape(0)
    if not shape:
        return UNKNOWN
    text = call.values[6] if len(call.values) > 6 else ""
    groups = int(text) if text.isdecimal() and 0 < len(text) < 7 and int(text) else 1
    rows = shape[0] * groups
    return _floats(1, rows, prod(shape) // rows if rows else 0, 1)


def _floats(batch: int, rows: int, columns: int, inner: int) -> Dimensions:
    if max(batch, rows, columns, inner) >= LARGEST:
        return UNKNOWN
    return Dimensions(float(batch), float(rows), float(columns), float(inner))


_FORMULAS: Final[Mapping[str, Formula]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), _product(0, 1)),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm"), _product(1, 2)),
    "mv": _vector_product(0),
    "addmv": _vector_product(1),
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention(0),
    **{
        f"_scaled_dot_product_{kind}{direction}": _attention(place)
        for place, direction in enumerate(("", "_backward"))
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
    "_efficient_attention_backward": _attention(1),
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _attention(0, heads_first=False)),
    "_flash_attention_backward": _attention(1, heads_first=False),
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), _along(1)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along(2)),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"), _normalised_by(2)),
    "native_layer_norm_backward": _normalised_by(5),
    "_fused_rms_norm_backward": _normalised_by(4),
    "native_group_norm": _by_group,
    **{
        f"{library}_batch_norm{direction}": _by_channel
        for library in ("native", "cudnn", "miopen")
        for direction in ("", "_backward")
    },
}


_TENSOR_LIST_BYTES: Final = 4  # profilers do not record number types of tensors in lists; optimizer state has 32 bits
_OPTIMIZER: Final = re.compile(r"^_(?:foreach|fused_(?:adam|adamw|sgd|adagrad))_?")
_COMPILED: Final = re.compile(r"^triton_(poi|red|per)_")
_MOST_DIMENSIONS: Final = 64  # PyTorch's limit on the dimensions of a tensor
_LONGEST: Final = 4_000_000
"""Most characters in the shapes of one call; a list of a thousand parameters has some ten thousand."""


def further_work(name: str, shapes: str | None, call: Call) -> Work | None:
    """Work of a call of one of these operators; None for other operators or where shapes do not give it.

    Args:
        shapes: JSON, as in the table `operators`.
    """
    short = base_name(name)
    if _OPTIMIZER.match(short):
        found = _optimizer(short, _lists(shapes), in_place=name.endswith("_"))
    elif short == "cat":
        first = next(iter(_lists(shapes)), 0)
        found = Work("copy", 0, 2 * first * _TENSOR_LIST_BYTES, None) if first else None
    elif _COMPILED.match(short):
        found = _compiled(short, call)
    else:
        formula = _WORK_FORMULAS.get(short)
        found = formula(call) if formula is not None else None
    if found is None or any(number is not None and number >= LARGEST for number in (found.flops, found.bytes)):
        return None
    return found


def _lists(shapes: str | None) -> list[int]:
    """Total numbers in each list of tensors among the inputs."""
    if not shapes or len(shapes) > _LONGEST:
        return []
    try:
        parsed = json.loads(shapes)
    except (ValueError, RecursionError):
        return []
    lists = [one for one in parsed if _is_list(one)] if isinstance(parsed, list) else []
    return [min(sum(prod(one) for one in tensors if _is_shape(one)), LARGEST) for tensors in lists]


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(inner, list) for inner in value)


def _is_shape(value: list[Any]) -> bool:
    return len(value) <= _MOST_DIMENSIONS and all(type(size) is int and 0 <= size < LARGEST for size in value)


def _optimizer(short: str, lists: list[int], *, in_place: bool) -> Work | None:
    """One optimizer step over lists of tensors, all read; gradients, the second list, are not written."""
    if not lists:
        return None
    if short.startswith("_fused"):
        written = sum(lists) - (lists[1] if len(lists) > 1 else 0)
        read = sum(lists)
    elif short == "_foreach_zero":
        written, read = lists[0], 0
    elif short == "_foreach_norm":
        written, read = 0, lists[0]
    else:
        copies = short == "_foreach_copy" and in_place
        written, read = lists[0], sum(lists) - (lists[0] if copies else 0)
    return Work("optimizer", 0, (read + written) * _TENSOR_LIST_BYTES, "fp32")


def _compiled(short: str, call: Call) -> Work | None:
    """A kernel fused by torch.compile: it moves each tensor once."""
    places = range(len(call.shapes))
    moved = sum(map(call.bytes, places))
    known = (call.type(index) for index in places if call.shape(index))
    types = (NUMBER_TYPES[one] for one in known if one in NUMBER_TYPES)
    kind = "elementwise" if short.startswith("triton_poi") else "reduction"
    return Work(kind, 0, moved, next(types, None)) if moved else None


def _moving(kind: str, places: tuple[int, ...], *, extra: int = 0) -> Callable[[Call], Work | None]:
    """Formula for work that moves as much as these inputs hold, plus `extra` bytes per number of the first."""

    def formula(call: Call) -> Work | None:
        shape = call.shape(0)
        if not shape:
            return None
        moved = sum(map(call.bytes, places)) + extra * prod(shape)
        return Work(kind, 0, moved, NUMBER_TYPES.get(call.type(0)))

    return formula


def _selected(call: Call) -> Work | None:
    """index_select: one slice along a dimension for each index."""
    shape, indices = call.shape(0), call.shape(2)
    text = call.values[1] if len(call.values) > 1 else "0"
    place = int(text) if text.isdecimal() and len(text) < 3 else 0
    if not shape or not indices or place >= len(shape) or not shape[place]:
        return None
    element = ELEMENT_BYTES[call.type(0)]
    written = prod(shape) // shape[place] * prod(indices) * element
    moved = written + min(written, call.bytes(0)) + call.bytes(2)
    return Work("embedding", 0, moved, NUMBER_TYPES.get(call.type(0)))


def _embedding_backward(call: Call) -> Work | None:
    """Gradient of an embedding table with as many rows as the third input says, written in whole, once as zeros."""
    gradient = call.shape(0)
    text = call.values[2] if len(call.values) > 2 else ""
    if not gradient or not text.isdecimal() or len(text) > 18:
        return None
    table = int(text) * gradient[-1] * ELEMENT_BYTES[call.type(0)]
    return Work("embedding", 0, call.bytes(0) + call.bytes(1) + table, NUMBER_TYPES.get(call.type(0)))


_ONCE: Final = _moving("elementwise", (0,))
_READ_AND_WRITTEN: Final = _moving("elementwise", (0, 0))
_WITH_MASK: Final = _moving("elementwise", (0, 0), extra=1)
_NORM_BACKWARD: Final = _moving("normalisation", (0, 0, 1))
_WORK_FORMULAS: Final[Mapping[str, Callable[[Call], Work | None]]] = {
    **dict.fromkeys(("native_dropout", "_fused_dropout"), _WITH_MASK),
    "native_dropout_backward": _moving("elementwise", (0, 0, 1)),
    **dict.fromkeys(("bernoulli", "normal", "uniform", "random"), _ONCE),
    **dict.fromkeys(("square", "expm1", "tril", "triu"), _READ_AND_WRITTEN),
    **dict.fromkeys(("flip", "roll"), _moving("copy", (0, 0))),
    "mse_loss": _moving("elementwise", (0, 1, 0)),
    "mse_loss_backward": _moving("elementwise", (1, 1, 2)),
    **dict.fromkeys(("native_group_norm_backward", "_fused_rms_norm_backward"), _NORM_BACKWARD),
    # Indices of the maxima have eight bytes each.
    "max_pool2d_with_indices_backward": _moving("reduction", (0, 1), extra=8),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), _moving("reduction", (0, 1))),
    "index_select": _selected,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _moving("reduction", (1,)),
    "nll_loss_backward": _moving("elementwise", (1,)),
}


Mask: TypeAlias = npt.NDArray[np.bool_]
Labels: TypeAlias = npt.NDArray[np.str_]

SIDES: Final = ("compute", "memory bandwidth")
_KNOWN: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "number_type": pl.String,
    "flops": pl.Float64,
    "bytes": pl.Float64,
    "batch": pl.Float64,
    "rows": pl.Float64,
    "columns": pl.Float64,
    "inner": pl.Float64,
}
_LONGEST_NAME: Final = 100  # characters; NumPy reserves the longest name's size for every name of an array
_BACKWARD_OPERATOR: Final = r"_backward(?:_|$)"


def operations_of_calls(trace: Trace) -> tuple[Rows, Operations]:
    """Find every operator call that itself launched device work, and describe its work.

    Returns:
        Rows in `operators`, ascending, and the operations in the same order; `kind` is "" for unknown operators,
            `number_type` is "tf32" where kernel names say so.
    """
    calls = roofline_calls(trace).unique("row", keep="first", maintain_order=True).sort("row")
    rows: Rows = calls["row"].to_numpy()
    found = described(trace, rows)
    is_tf32 = (calls["number_type"] == "tf32").fill_null(False).to_numpy()
    return rows, replace(found, number_type=np.where(is_tf32, "tf32", found.number_type))


def described(trace: Trace, rows: Rows) -> Operations:
    """Describe the operator calls of these rows, whether or not a device ran them."""
    distinct = distinct_calls(trace)
    shapes = distinct.texts["input_shapes"].to_list()
    known = [
        _known(name, text, call, output)
        for name, text, call, output in zip(distinct.names, shapes, distinct.calls, distinct.outputs, strict=True)
    ]
    table = distinct.spread(pl.DataFrame(known, dict(_KNOWN), orient="row"))[rows]
    names = trace.operators["name"][rows]
    numbers = {name: table[name].fill_null(np.nan).to_numpy() for name, kind in _KNOWN.items() if kind is pl.Float64}
    return Operations(
        name=np.array([base_name(name)[:_LONGEST_NAME] for name in names.to_list()], np.str_),
        kind=table["kind"].fill_null("").to_numpy().astype(np.str_),
        number_type=table["number_type"].fill_null("").to_numpy().astype(np.str_),
        is_backward=is_backward(trace)[rows],
        **numbers,
    )


def is_backward(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether each operator computes gradients, by its name or an enclosing autograd node; shape (operators,)."""
    names = trace.operators["name"]
    nodes = names.str.contains(BACKWARD_NAME).fill_null(False).to_numpy()
    own: npt.NDArray[np.bool_] = names.str.contains(_BACKWARD_OPERATOR).fill_null(False).to_numpy()
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    inside: npt.NDArray[np.bool_] = inherit(np.where(nodes, 1, -1), parent) > 0
    return inside | own


def _known(name: str, shapes: str | None, call: Call | None, output: Shape | None) -> tuple[object, ...]:
    work = None if call is None else work_of(name, call, output) or further_work(name, shapes, call)
    if call is None or work is None:
        return (None,) * len(_KNOWN)
    loops = dimensions(name, call, output)
    if work.kind == "optimizer":
        loops = Dimensions(1.0, 1.0, float(work.bytes or 0) / 4, 1.0)
    flops, moved = (None if number is None else float(number) for number in (work.flops, work.bytes))
    return work.kind, work.number_type, flops, moved, *loops


class CalledOperations:
    """Operators that launched a trace's device work, described independently of any device, and the work of each.

    Args:
        precision: requested number type; None for the recorded one.
    """

    def __init__(self, trace: Trace, precision: str | None = None) -> None:
        self.trace = trace
        self._precision = precision
        self._rows, self.operations = trace.kept("operations of calls", lambda: operations_of_calls(trace))
        self._times: dict[tuple[str, DevicePeaks, Tf32], OperationTimes] = {}

    @classmethod
    def of(cls, trace: Trace, precision: str | None = None) -> CalledOperations:
        """The trace's operators and their times on devices, kept with it."""
        return trace.kept(f"called operations in {precision}", lambda: cls(trace, precision))

    def times_on(self, device: DevicePeaks) -> OperationTimes:
        """Time of each operation as recorded."""
        return self._times_of("recorded", in_precision(self.operations, None), device)

    def times_in(self, precision: str | None, device: DevicePeaks) -> OperationTimes:
        """Time of each operation with all of them in this number type, whatever was requested."""
        return self._times_of(f"all in {precision}", in_precision(self.operations, precision), device)

    def cast_times_on(self, device: DevicePeaks, added: Tf32) -> OperationTimes:
        """Time of each operation in the requested number type, with a band for the traffic that is uncertain.

        Args:
            added: operations that run in TF32 there but did not where they were recorded.
        """
        return self._times_of("cast", self.cast, device, added)

    def _times_of(self, name: str, cast: Cast, device: DevicePeaks, added: Tf32 = NO_TF32) -> OperationTimes:
        """Predict each distinct operation once for each device."""
        if (name, device, added) not in self._times:
            parts = (cast.operations, cast.least, cast.most)
            distinct = {id(one): one for one in parts}
            found = {key: self._predicted(types_on(one, device, added), device) for key, one in distinct.items()}
            expected, least, most = (found[id(one)] for one in parts)
            times = OperationTimes(expected.ns, least.low_ns, most.high_ns, expected.basis)
            self._times[name, device, added] = times
        return self._times[name, device, added].select(self._distinct[1])

    def _predicted(self, operations: Operations, device: DevicePeaks) -> OperationTimes:
        return operation_times(operations.select(self._distinct[0]), device)

    @cached_property
    def _distinct(self) -> tuple[Rows, Rows]:
        """First index of each operation that differs from the others, and which of these each is."""
        columns = {name: getattr(self.operations, name) for name in self.operations.__dataclass_fields__}
        if self._precision is not None:
            columns["stays"] = in_optimizer(self.trace)[self._rows]
        ranks = pl.DataFrame(columns).select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy()
        _, first, index = np.unique(ranks, return_index=True, return_inverse=True)
        return first.astype(np.int64), index.astype(np.int64).ravel()

    @cached_property
    def known(self) -> Mask:
        """Operations with known work."""
        numbers = np.isfinite(self.operations.flops) & np.isfinite(self.operations.bytes)
        known: Mask = numbers & (self.operations.kind != "")
        return known

    @cached_property
    def cast(self) -> Cast:
        """Operations in the requested number type."""
        if self._precision is None:
            return in_precision(self.operations, None)
        stays = in_optimizer(self.trace)[self._rows]
        return in_precision(self.operations, self._precision, stays=stays)

    @cached_property
    def of_work(self) -> Rows:
        """For each row of `device_work` the index of its call among the operations, -1 if none launched it."""
        operator = launching_operators(self.trace)
        if not len(self._rows):
            return np.full(len(operator), -1, np.int64)
        place = np.minimum(np.searchsorted(self._rows, operator), len(self._rows) - 1)
        return np.where(self._rows[place] == operator, place, -1)

    @cached_property
    def kinds(self) -> Labels:
        """Label shared by works with similar prediction errors: kind of the operator, else of the kernel or work."""
        kind = _of_work(self.trace.device_work, "kind")
        result = np.where(kind == "compute", np.where(self._is_matrix, "matrix", "a kernel by name"), kind)
        if len(self.operations):
            kinds = self.operations.kind[np.maximum(self.of_work, 0)]
            result = np.where((self.of_work >= 0) & (kinds != ""), kinds, result)
        return result.astype(np.str_)

    @cached_property
    def calls(self) -> Rows:
        """Index of each distinct call: operators with the same work, else works with the same name."""
        _, number = np.unique(_of_work(self.trace.device_work, "name"), return_inverse=True)
        result: Rows = number.ravel().astype(np.int64)
        known = self.of_work >= 0
        if known.any():
            result[known] = len(result) + different_calls(self.operations)[self.of_work[known]]
        return result

    def sides(self, device: DevicePeaks, precision: str | None = None) -> Labels:
        """What limits each work on a device: "compute" or "memory bandwidth".

        Where shapes were not recorded the kernel's name decides: matrix products are compute, everything else is memory
        bandwidth.
        """
        by_name = np.where(self._is_matrix, *SIDES)
        if not len(self.operations):
            return by_name
        sides = sides_of(in_precision(self.operations, precision).operations, device)[self.of_work]
        return np.where((self.of_work >= 0) & (sides != ""), sides, by_name)

    @cached_property
    def _is_matrix(self) -> Mask:
        names = self.trace.device_work["name"]
        found = {name: arithmetic(name).is_matrix for name in names.unique().drop_nulls().to_list()}
        return np.array([found.get(name, False) for name in names.to_list()], np.bool_)


def launching_operators(trace: Trace) -> Rows:
    """For each row of `device_work` the row of the operator that launched it, -1 if none did."""
    launch = trace.device_work["launch"].cast(pl.Int64)
    rows: Rows = trace.launches["operator"].cast(pl.Int64).gather(launch).fill_null(-1).to_numpy()
    return rows


def in_optimizer(trace: Trace) -> Mask:
    """Whether each operator runs in an optimizer step."""

    def found() -> Mask:
        inside: Mask = (operator_places(trace)["phase"] == "optimizer").fill_null(False).to_numpy()
        return inside

    return trace.kept("in optimizer", found)


def different_calls(operations: Operations) -> Rows:
    """Index of each distinct operation: same kind, arithmetic, traffic and dimensions."""
    names = ("name", "number_type", "flops", "bytes", "batch", "rows", "columns", "inner")
    table = pl.DataFrame({name: getattr(operations, name) for name in names})
    found: Rows = table.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy().astype(np.int64)
    return found


def sides_of(operations: Operations, device: DevicePeaks) -> Labels:
    """What limits each operation on a device, one of SIDES; "" where its work is unknown.

    A number type without a peak on the device uses the 32-bit peak.
    """
    usual = device.flops_s.get("fp32") or max(device.flops_s.values(), default=np.nan)
    compute = operations.flops / by_type(operations.number_type, device.flops_s, usual)
    traffic = operations.bytes / device.bandwidth_bytes_s
    return np.where(np.isfinite(compute + traffic), np.where(compute > traffic, *SIDES), "")


def _of_work(work: pl.DataFrame, column: str) -> Labels:
    return work[column].fill_null("other").to_numpy().astype(np.str_)
