"""The dimensions of the loops in an operator's call, from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final, NamedTuple

from stepscope.analysis.traffic import base_name
from stepscope.analysis.work_inputs import LARGEST, Call, Shape, broadcast
from stepscope.analysis.work_products import CONVOLUTIONS, Layout, spatial_size


class Dimensions(NamedTuple):
    """As in `stepscope.predict.operations.Operations`; None where shapes do not tell."""

    batch: float | None = None
    rows: float | None = None
    columns: float | None = None
    inner: float | None = None


UNKNOWN: Final = Dimensions()


def dimensions(name: str, call: Call, output: Shape | None = None) -> Dimensions:
    """The dimensions of a call; what is neither a product nor works row by row is one row of the numbers it writes.

    Args:
        name: such as "aten::mm".
        output: spatial size of a convolution's output, where it is known from elsewhere.
    """
    short = base_name(name)
    if short in CONVOLUTIONS:
        return _convolution(CONVOLUTIONS[short], call, output)
    formula = _FORMULAS.get(short)
    return formula(call) if formula is not None else _written(call)


def _written(call: Call) -> Dimensions:
    shapes = [shape for index in range(len(call.shapes)) if (shape := call.shape(index))]
    spread = broadcast(shapes) if shapes else None
    numbers = prod(spread) if spread is not None else max(map(prod, shapes), default=None)
    return UNKNOWN if numbers is None else _floats(1, 1, numbers, 1)


# Products


def _product(first: int, second: int) -> Callable[[Call], Dimensions]:
    def formula(call: Call) -> Dimensions:
        left, right = call.shape(first), call.shape(second)
        if not left or not right or len(left) != len(right) or len(left) not in (2, 3):
            return UNKNOWN
        batch = left[0] if len(left) == 3 else 1
        return _floats(batch, left[-2], right[-1], left[-1])

    return formula


def _vector_product(matrix: int) -> Callable[[Call], Dimensions]:
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
    """Those of the product that it is alike: output points x weight; a backward pass is as many as gradients wanted."""
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
    return _floats(products, points[0] * prod(points[2:]), weight[0], prod(weight[1:]))


def _attention(query: int, *, heads_first: bool = True) -> Callable[[Call], Dimensions]:
    """batch x heads times (queries x keys), over the size of a head."""

    def formula(call: Call) -> Dimensions:
        q, k = call.shape(query), call.shape(query + 1)
        if not q or not k or len(q) != 4 or len(k) != 4:
            return UNKNOWN
        heads, positions = (1, 2) if heads_first else (2, 1)
        return _floats(q[0] * q[heads], q[positions], k[positions], q[3])

    return formula


# Row by row


def _rows_of(size: int) -> Callable[[Call], Dimensions]:
    """Formula for what works along the dimension whose place stands in input `size`, the last where it does not."""

    def formula(call: Call) -> Dimensions:
        shape = call.shape(0)
        if not shape:
            return UNKNOWN
        text = call.values[size] if size < len(call.values) else ""
        place = int(text) if text.lstrip("-").isdecimal() and len(text) < 4 else -1
        along = shape[place] if -len(shape) <= place < len(shape) else shape[-1]
        return _floats(1, prod(shape) // along if along else 0, along, 1)

    return formula


def _normalised_by(weight: int) -> Callable[[Call], Dimensions]:
    """Formula for what normalises over as many last dimensions as the weight has."""

    def formula(call: Call) -> Dimensions:
        shape, scale = call.shape(0), call.shape(weight)
        if not shape:
            return UNKNOWN
        columns = prod(scale) if scale else shape[-1]
        return _floats(1, prod(shape) // columns if columns else 0, columns, 1)

    return formula


def _by_channel(call: Call) -> Dimensions:
    """Batch normalisation: each channel is a row."""
    shape = call.shape(0)
    if not shape or len(shape) < 2:
        return UNKNOWN
    return _floats(1, shape[1], shape[0] * prod(shape[2:]), 1)


def _by_group(call: Call) -> Dimensions:
    """Group normalisation: each group of each sample is a row; the input, then batch, channels, points and groups."""
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


_FORMULAS: Final[Mapping[str, Callable[[Call], Dimensions]]] = {
    "mm": _product(0, 1),
    "bmm": _product(0, 1),
    "_int_mm": _product(0, 1),
    "_scaled_mm": _product(0, 1),
    "addmm": _product(1, 2),
    "_addmm_activation": _product(1, 2),
    "baddbmm": _product(1, 2),
    "mv": _vector_product(0),
    "addmv": _vector_product(1),
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention(0),
    "_scaled_dot_product_flash_attention": _attention(0),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0),
    "_scaled_dot_product_efficient_attention": _attention(0),
    "_scaled_dot_product_cudnn_attention": _attention(0),
    "_flash_attention_forward": _attention(0, heads_first=False),
    "_efficient_attention_forward": _attention(0, heads_first=False),
    "_scaled_dot_product_flash_attention_backward": _attention(1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1),
    "_flash_attention_backward": _attention(1, heads_first=False),
    "_scaled_dot_product_efficient_attention_backward": _attention(1),
    "_scaled_dot_product_cudnn_attention_backward": _attention(1),
    "_efficient_attention_backward": _attention(1, heads_first=False),
    "_softmax": _rows_of(1),
    "_log_softmax": _rows_of(1),
    "softmax": _rows_of(1),
    "log_softmax": _rows_of(1),
    "_softmax_backward_data": _rows_of(2),
    "_log_softmax_backward_data": _rows_of(2),
    "native_layer_norm": _normalised_by(2),
    "layer_norm": _normalised_by(2),
    "rms_norm": _normalised_by(2),
    "_fused_rms_norm": _normalised_by(2),
    "native_layer_norm_backward": _normalised_by(5),
    "_fused_rms_norm_backward": _normalised_by(4),
    "native_group_norm": _by_group,
    **{
        f"{library}_batch_norm{direction}": _by_channel
        for library in ("native", "cudnn", "miopen")
        for direction in ("", "_backward")
    },
}
