"""Number types and layouts: copies that only change them, and which operators used tensor cores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.module_paths import backward_source
from stepscope.analysis.operators import described_work
from stepscope.analysis.work import Shape, elements, first_shape, shapes_of, types_of
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows, at, beginning_in, conformed, meeting, row_numbers

FLOATS: Final = {"double": "float64", "float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
"""The profiler's names of floating-point types -> PyTorch's."""

_WRAPPERS: Final = ("aten::to", "aten::_to_copy", "aten::type_as", "aten::_autocast_to_reduced_precision",
                    "aten::_autocast_to_full_precision")  # fmt: skip
_SMALLEST: Final = 256
"""Tensors with fewer elements are settings, not data."""


@dataclass(frozen=True, slots=True)
class Cast:
    row: int  # row in `operators` of the outermost operator that only converts
    lane: int
    start_ns: int
    shape: Shape
    source: str  # number types, values of FLOATS
    target: str  # number types, values of FLOATS
    is_backward: bool  # whether the backward pass converts a gradient


def casts(trace: Trace, rows: Rows) -> list[Cast]:
    """Conversions between floating-point types among these rows of `operators`, in order of time."""
    operators = trace.operators
    parent = row_numbers(operators["parent"])
    names = operators["name"]
    copies = meeting(operators, rows, pl.col("name") == "aten::copy_")
    copies = copies.filter(pl.col("input_types").is_in(list(filter(_converts, copies["input_types"].unique()))))
    found = []
    columns = ("row", "lane", "start_ns", "input_shapes", "input_types")
    for row, lane, start, shapes, types in copies.select(columns).iter_rows():
        shape = first_shape(shapes)
        target, source, *_ = types_of(types)
        if elements(shape) < _SMALLEST:
            continue
        outer = row
        while parent[outer] >= 0 and names[int(parent[outer])] in _WRAPPERS:
            outer = int(parent[outer])
        around = int(parent[outer])
        backward = around >= 0 and names[around] == "ToCopyBackward0"
        found.append(Cast(outer, lane, start, shape, FLOATS[source], FLOATS[target], backward))
    return found


def _converts(input_types: str | None) -> bool:
    target, source = (*types_of(input_types), "", "")[:2]
    return source != target and source in FLOATS and target in FLOATS


def there_and_back(found: list[Cast]) -> list[Cast]:
    """Conversions in a forward pass that a later one on the same shape undoes, and the later ones.

    Each conversion is paired with the next reverse conversion of the same shape on the same thread.
    """
    waiting: dict[tuple[int, Shape, str, str], list[Cast]] = {}
    paired: list[Cast] = []
    for cast in found:
        if cast.is_backward:
            continue
        back = waiting.get((cast.lane, cast.shape, cast.target, cast.source))
        if back:
            paired += [back.pop(0), cast]
        else:
            waiting.setdefault((cast.lane, cast.shape, cast.source, cast.target), []).append(cast)
    return sorted(paired, key=lambda cast: cast.start_ns)


def wide_operators(trace: Trace, rows: Rows, conversions: list[Cast]) -> Rows:
    """Rows of these operators that work mostly on float64, without conversions."""
    converting = {cast.row for cast in conversions}
    candidates = meeting(
        trace.operators,
        rows,
        pl.col("input_types").str.contains('"double"', literal=True)
        & ~pl.col("name").is_in([*_WRAPPERS, "aten::copy_", "ToCopyBackward0"])
        & ~pl.col("name").str.contains(r"^autograd::engine|^torch::autograd"),
    )
    found = []
    for row, shapes, types in candidates.select("row", "input_shapes", "input_types").iter_rows():
        tensors = [(elements(shape), kind) for shape, kind in zip(shapes_of(shapes), types_of(types), strict=False)
                   if shape and kind in FLOATS]  # fmt: skip
        wide = sum(count for count, kind in tensors if kind == "double")
        if row not in converting and wide >= _SMALLEST and 2 * wide >= sum(count for count, _ in tensors):
            found.append(row)
    return np.array(found, np.int64)


CONVERTING_KERNEL: Final = (
    r"(?i)nchw_?to_?nhwc|nhwc_?to_?nchw|nchw2nhwc|nhwc2nchw|batched_transpose_\d|convertTensor_kernel|"
    r"transpose_(?:nchw|nhwc)|tensorTransformGeneric"
)
"""Library kernels that change a convolution's layout."""

_PERMUTES: Final = ("aten::permute", "aten::transpose", "aten::movedim")
_COPIES: Final = ("aten::contiguous", "aten::clone", "aten::reshape", "aten::flatten")
_MOVED: Final = frozenset({*_COPIES, "aten::copy_"})
_HEAVY: Final = r"(?i)mm|conv|linear|matmul|norm|AccumulateGrad"
_LAYOUTS_SMALLEST: Final = 1024
_NEAR: Final = 12
"""Most operators between a permutation and its copy, and most backward nodes to search after it."""


@dataclass(frozen=True, slots=True)
class LayoutCopy:
    """A change of the dimension order that a copy carries out."""

    lane: int
    permute: int  # row of `operators`
    copy: int  # row of `operators`
    before: Shape  # shape before the permutation
    after: Shape  # shape of the copy
    order: tuple[int, ...]  # dimension of `before` for each one of `after`; () where not recorded


def layout_copies(trace: Trace, rows: Rows) -> list[LayoutCopy]:
    """Copies among these rows of `operators` that follow a permutation of three dimensions or more."""
    copying = _really_copying(trace)
    lanes = trace.operators["lane"].to_numpy()
    columns = ("row", "lane", "name", "input_shapes", "input_values")
    wanted = meeting(trace.operators, rows, pl.col("name").is_in([*_PERMUTES, *_COPIES]))
    found: list[LayoutCopy] = []
    last: dict[int, tuple[int, Shape, tuple[int, ...]]] = {}
    taken = -1
    ends = (trace.operators["start_ns"] + trace.operators["duration_ns"]).to_numpy()
    starts = trace.operators["start_ns"].to_numpy()
    for row, lane, name, text, values in wanted.select(columns).iter_rows():
        shape = first_shape(text)
        if name in _PERMUTES:
            last[lane] = (row, shape, _order(name, values, len(shape)))
            continue
        permute, before, order = last.get(lane, (-1, (), ()))
        if not copying[row] or (taken >= 0 and starts[row] < ends[taken] and lane == lanes[taken]):
            continue
        same = sorted(shape) == sorted(before) and len(shape) >= 3 and elements(shape) >= _LAYOUTS_SMALLEST
        if same and row - permute <= 2 * _NEAR and (not order or tuple(before[place] for place in order) == shape):
            found.append(LayoutCopy(lane, permute, row, before, shape, order))
            taken = row
            last.pop(lane)
    return found


def to_and_fro(found: list[LayoutCopy]) -> list[LayoutCopy]:
    """Copies that a later one undoes, and the later ones.

    The later tensor has the layout of the earlier copy, in all but the last dimension, and returns to the original
    order.
    """
    waiting: list[LayoutCopy] = []
    paired: list[LayoutCopy] = []
    for copy in found:
        match = next((other for other in reversed(waiting[-_NEAR:]) if _undoes(copy, other)), None)
        if match is None:
            waiting.append(copy)
        else:
            waiting.remove(match)
            paired += [match, copy]
    return sorted(paired, key=lambda copy: copy.copy)


def _undoes(copy: LayoutCopy, other: LayoutCopy) -> bool:
    if copy.lane != other.lane or len(copy.before) != len(other.after) or copy.before[:-1] != other.after[:-1]:
        return False
    if copy.order and other.order:
        return tuple(other.order[place] for place in copy.order) == tuple(range(len(copy.order)))
    return copy.before != copy.after and copy.after[0] == other.before[0]


def backward_work(trace: Trace, copies: list[LayoutCopy]) -> tuple[Rows, dict[int, int]]:
    """Cost of the permutations in the backward pass.

    Gradients have the other order as well: their consumer copies them first, or reads two orders at once.

    Returns:
        Rows of copies; and by row the nanoseconds that element-wise backward operators take beyond twice their forward
        operator's.
    """
    source = backward_source(trace)
    operators = trace.operators
    nodes = operators.with_row_index("row").filter(
        pl.col("parent").is_null() & pl.col("name").str.starts_with("autograd::engine")
    )  # fmt: skip
    rows, lanes, names = nodes["row"].to_numpy().astype(np.int64), nodes["lane"].to_numpy(), nodes["name"].to_list()
    place_of = {int(source[row]): place for place, row in enumerate(rows.tolist()) if source[row] >= 0}
    durations = operators["duration_ns"].to_numpy()
    heavy = nodes["name"].str.contains(_HEAVY).to_numpy()
    calls = operators.with_row_index("row").filter(pl.col("name").is_in(list(_MOVED))).select("row", "input_shapes")
    moving: list[int] = []
    excess: dict[int, int] = {}
    for copy in copies:
        place = place_of.get(copy.permute)
        if place is None:
            continue
        for following in range(place + 1, min(place + 1 + _NEAR // 2, len(rows))):
            if lanes[following] != lanes[place] or "Permute" in names[following] or "Transpose" in names[following]:
                break
            end = int(rows[following + 1]) if following + 1 < len(rows) else operators.height
            inside = calls.filter(pl.col("row").is_between(rows[following], end, closed="none"))
            size = elements(copy.after)
            copied = next((row for row, text in inside.iter_rows() if elements(first_shape(text)) == size), None)
            if copied is not None:
                moving.append(copied)
            elif not heavy[following] and source[rows[following]] >= 0:
                row = int(rows[following])
                excess[row] = max(int(durations[row] - 2 * durations[source[row]]), 0)
            if copied is not None or heavy[following] or durations[rows[following]] > durations[rows[place]]:
                break
    return np.unique(np.array(moving, np.int64)), excess


def _really_copying(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether a copy runs inside each operator."""
    parent = row_numbers(trace.operators["parent"])
    result = np.zeros(len(parent), np.bool_)
    rows = np.flatnonzero((trace.operators["name"] == "aten::copy_").to_numpy())
    for _ in range(4):
        rows = np.unique(at(parent, rows))
        rows = rows[rows >= 0]
        result[rows] = True
    return result


@lru_cache(maxsize=65536)
def _order(name: str, values: str | None, dimensions: int) -> tuple[int, ...]:
    """Source dimension of each result dimension, from the operator's other inputs; () where not recorded."""
    try:
        parsed = [json.loads(value) if value else None for value in json.loads(values or "[]")]
    except (ValueError, TypeError, RecursionError):
        return ()
    if name == "aten::permute" and len(parsed) > 1 and isinstance(parsed[1], list):
        places = parsed[1]
    elif name == "aten::transpose" and len(parsed) > 2:
        places = list(range(dimensions))
        first, second = (each if isinstance(each, int) else dimensions for each in parsed[1:3])
        if -dimensions <= min(first, second) and max(first, second) < dimensions:
            places[first], places[second] = places[second], places[first]
    else:
        return ()
    if len(places) != dimensions or not all(type(each) is int and -dimensions <= each < dimensions for each in places):
        return ()
    return tuple(each % dimensions for each in places)


TENSOR_CORE_CALLS: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # row in operators; null if no operator launched the work
    "operator": pl.String,
    "input_shapes": pl.String,  # JSON
    "input_types": pl.String,  # JSON
    "device": pl.String,
    "start_ns": pl.Int64,  # start of the first work
    "device_ns": pl.Int64,  # all computation that it launched itself
    "matrix_ns": pl.Int64,  # part in kernels whose names say matrix product, convolution or attention
    "tensor_core_ns": pl.Int64,  # part of that in kernels whose names say tensor cores
    "precision": pl.String,  # number type of the longest matrix kernel, from its name
    "kernel": pl.String,  # longest matrix kernel, or else the longest kernel
    "used": pl.Boolean,  # whether tensor cores were used; null where kernel names do not show it
}

TENSOR_CORE_TABLE: Final[dict[str, type[pl.DataType]]] = {
    "operator": pl.String,
    "input_shapes": pl.String,
    "input_types": pl.String,
    "precision": pl.String,
    "used": pl.Boolean,
    "calls": pl.Int64,
    "device_ns": pl.Int64,
    "matrix_ns": pl.Int64,
    "tensor_core_ns": pl.Int64,
    "share": pl.Float64,  # share of all eligible operators' device time, 0 to 1
    "kernel": pl.String,  # the costliest one
}


def eligible_calls(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """Calls of operators that tensor cores can run, with the computation that each launched itself.

    Work counts for the innermost operator around its launch. A matrix kernel without an operator, such as a graph's, is
    a call of its own.

    Args:
        window: only calls whose first work starts in it.

    Returns:
        Columns as in CALL_SCHEMA, in order of time.
    """
    wanted = pl.col("is_eligible") | (pl.col("operator").is_null() & pl.col("is_matrix"))
    work = described_work(trace).filter((pl.col("kind") == "compute") & wanted.fill_null(False))
    calls = work.group_by(call=pl.coalesce("row", -1 - pl.col("work").cast(pl.Int64))).agg(
        *(pl.col(name).first() for name in ("row", "operator", "input_shapes", "input_types", "device")),
        start_ns=pl.col("start_ns").min(),
        device_ns=pl.col("duration_ns").sum(),
        matrix_ns=pl.col("duration_ns").filter("is_matrix").sum(),
        tensor_core_ns=pl.col("duration_ns").filter(pl.col("tensor_cores").fill_null(False)).sum(),
        precision=_of_longest("precision"),
        kernel=_of_longest("name"),
        used=_used(),
    )
    return conformed(beginning_in(calls, window).sort("start_ns", "call"), TENSOR_CORE_CALLS)


def tensor_core_table(trace: Trace) -> pl.DataFrame:
    """Operators that tensor cores can run, and whether they did, costliest first; as TENSOR_CORE_TABLE."""
    keys = ["operator", "input_shapes", "input_types", "precision", "used"]
    table = (
        eligible_calls(trace)
        .group_by(keys)
        .agg(
            calls=pl.len().cast(pl.Int64),
            device_ns=pl.col("device_ns").sum(),
            matrix_ns=pl.col("matrix_ns").sum(),
            tensor_core_ns=pl.col("tensor_core_ns").sum(),
            kernel=pl.col("kernel").sort_by("device_ns", "kernel", descending=[True, False]).first(),
        )
    )
    total = pl.col("device_ns").sum()
    table = table.with_columns(share=pl.when(total > 0).then(pl.col("device_ns") / total).otherwise(0.0))
    descending = [True, *[False] * len(keys)]
    return table.sort(["device_ns", *keys], descending=descending).select(list(TENSOR_CORE_TABLE))


def _of_longest(column: str) -> pl.Expr:
    """Value of a call's longest work, or of its longest matrix kernel if it has one."""
    order = pl.col(column).sort_by("is_matrix", "duration_ns", "work", descending=[True, True, False])
    return order.first() if column == "name" else order.filter(pl.col("is_matrix").sort(descending=True)).first()


def _used() -> pl.Expr:
    """True if a kernel used tensor cores, False if every matrix kernel is known not to, else null."""
    known_not = (pl.col("tensor_cores").eq(False)).fill_null(False)
    matrix = pl.col("is_matrix")
    return (
        pl.when(pl.col("tensor_cores").fill_null(False).any())
        .then(pl.lit(True))
        .when(matrix.any() & (known_not | ~matrix).all())
        .then(pl.lit(False))
        .otherwise(pl.lit(None, pl.Boolean))
    )
