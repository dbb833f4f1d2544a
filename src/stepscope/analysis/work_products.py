"""Arithmetic and memory traffic of matrix products, convolutions and fused attention, from their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

from stepscope.analysis.work_inputs import ELEMENT_BYTES, NUMBER_TYPES, Call, Shape, Work, broadcast

# Matrix products


def product(first: int, second: int, *added: int) -> Callable[[Call], Work | None]:
    """Formula for `first` times `second`, both of two dimensions or of three with the same batch."""

    def formula(call: Call) -> Work | None:
        left, right = call.shape(first), call.shape(second)
        if not left or not right or len(left) != len(right) or len(left) not in (2, 3):
            return None
        batch = left[0] if len(left) == 3 else 1
        rows, inner, columns = left[-2], left[-1], right[-1]
        if right[-2] != inner:
            return None
        return _matrix(call, batch * rows * columns, inner, first, (first, second, *added))

    return formula


def _matrix(call: Call, outputs: int, inner: int, typed: int, read: Sequence[int]) -> Work:
    element = call.type(typed)
    moved = sum(call.bytes(index) for index in read) + outputs * ELEMENT_BYTES[element]
    return Work("matrix", 2 * outputs * inner, moved, NUMBER_TYPES.get(element))


def vector_product(matrix: int, vector: int) -> Callable[[Call], Work | None]:
    def formula(call: Call) -> Work | None:
        left, right = call.shape(matrix), call.shape(vector)
        if not left or not right or len(left) != 2 or right != left[1:]:
            return None
        return _matrix(call, left[0], left[1], matrix, (matrix, vector))

    return formula


def linear(call: Call) -> Work | None:
    left, weight = call.shape(0), call.shape(1)
    if not left or not weight or len(weight) != 2 or left[-1] != weight[1]:
        return None
    return _matrix(call, prod(left[:-1]) * weight[0], weight[1], 0, (0, 1, 2))


def matmul(call: Call) -> Work | None:
    left, right = call.shape(0), call.shape(1)
    if not left or not right:
        return None
    rows = left if len(left) > 1 else (1, *left)
    columns = right if len(right) > 1 else (*right, 1)
    batch = broadcast([rows[:-2], columns[:-2]])
    if batch is None or rows[-1] != columns[-2]:
        return None
    return _matrix(call, prod(batch) * rows[-2] * columns[-1], rows[-1], 0, (0, 1))


# Convolutions


class Layout(NamedTuple):
    """Where a convolution operator has its inputs; None for what it does not take."""

    input: int
    weight: int
    stride: int | None = None
    padding: int | None = None
    dilation: int | None = None
    transposed: int | bool = False  # place of the flag, or what the operator always does
    gradient: int | None = None  # of the output, in the backward pass
    wanted: int | None = None  # place of the flags of the gradients that are wanted: input, weight, bias
    bias: int | None = None


CONVOLUTIONS: Final[Mapping[str, Layout]] = {
    **{f"conv{n}d": Layout(0, 1, 3, 4, 5, bias=2) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": Layout(0, 1, transposed=True, bias=2) for n in (1, 2, 3)},
    "convolution": Layout(0, 1, 3, 4, 5, 6, bias=2),
    "convolution_overrideable": Layout(0, 1, 3, 4, 5, 6, bias=2),
    "_convolution": Layout(0, 1, 3, 4, 5, 6, bias=2),
    "cudnn_convolution": Layout(0, 1, 3, 2, 4),
    "cudnn_convolution_relu": Layout(0, 1, 3, 4, 5, bias=2),
    "cudnn_convolution_transpose": Layout(0, 1, transposed=True),
    "miopen_convolution": Layout(0, 1, 4, 3, 5, bias=2),
    "miopen_depthwise_convolution": Layout(0, 1, 4, 3, 5, bias=2),
    "miopen_convolution_transpose": Layout(0, 1, transposed=True, bias=2),
    "mkldnn_convolution": Layout(0, 1, 4, 3, 5, bias=2),
    "_slow_conv2d_forward": Layout(0, 1, 4, 5, bias=3),
    "_conv_depthwise2d": Layout(0, 1, 4, 5, 6, bias=3),
    "convolution_backward": Layout(1, 2, transposed=7, gradient=0, wanted=10),
    "convolution_backward_overrideable": Layout(1, 2, transposed=6, gradient=0, wanted=9),
    # Until PyTorch 1.11: one gradient each, of which the operator around them says the sizes.
    **{f"{library}_convolution_backward_input": Layout(0, 2, gradient=1) for library in ("cudnn", "miopen")},
    **{f"{library}_convolution_backward_weight": Layout(0, 2, gradient=1) for library in ("cudnn", "miopen")},
}
SIZES_FROM_PARENT: Final = tuple(name for name in CONVOLUTIONS if name.endswith(("backward_input", "backward_weight")))
"""Operators whose sizes stand in the inputs of the operator around them: input, gradient of the output, weight."""


def convolution(layout: Layout, call: Call, output: Shape | None) -> Work | None:
    weight = call.shape(layout.weight)
    given = call.shape(layout.input)
    transposed = layout.transposed if isinstance(layout.transposed, bool) else call.flag(layout.transposed)
    if not weight or len(weight) < 3:
        return None
    element = call.type(layout.weight)
    if layout.gradient is not None:
        return _convolution_backward(layout, call, layout.gradient, transposed)
    if not given or len(given) != len(weight):
        return None
    if transposed is None:  # without values; only backward passes show
        return Work("convolution", None, None, NUMBER_TYPES.get(element))
    if transposed:
        # Each input element meets the whole weight of its channel; the output's size does not matter.
        return Work("convolution", 2 * given[0] * prod(given[2:]) * prod(weight), None, NUMBER_TYPES.get(element))
    spatial = spatial_size(layout, call, given, weight) or output
    if spatial is None:
        return Work("convolution", None, None, NUMBER_TYPES.get(element))
    points = given[0] * prod(spatial)
    read = (index for index in (layout.input, layout.weight, layout.bias) if index is not None)
    moved = sum(map(call.bytes, read)) + points * weight[0] * ELEMENT_BYTES[element]
    return Work("convolution", 2 * points * prod(weight), moved, NUMBER_TYPES.get(element))


def _convolution_backward(layout: Layout, call: Call, output: int, transposed: bool | None) -> Work:
    """Each of the gradients of input and weight takes as many operations as the forward pass."""
    weight, given, gradient = call.shape(layout.weight), call.shape(layout.input), call.shape(output)
    element = call.type(layout.weight)
    flags = (True, False) if layout.wanted is None else call.flags(layout.wanted)
    unknown = Work("convolution", None, None, NUMBER_TYPES.get(element))
    if transposed is None or not weight or not given or not gradient or not flags or len(flags) < 2:
        return unknown
    if not len(given) == len(gradient) == len(weight):
        return unknown
    meets = given if transposed else gradient
    into_input, into_weight = flags[:2]
    small, large = call.bytes(layout.weight), call.bytes(layout.input)
    # The gradient of either is as large as it is, and takes the other one to compute.
    moved = call.bytes(output) + (small + large) * (into_input + into_weight)
    flops = 2 * meets[0] * prod(meets[2:]) * prod(weight) * (into_input + into_weight)
    return Work("convolution", flops, moved, NUMBER_TYPES.get(element))


def spatial_size(layout: Layout, call: Call, given: Shape, weight: Shape) -> Shape | None:
    """Size of a convolution's output without batch and channels."""
    if layout.stride is None or layout.padding is None:
        return None
    sizes, kernel = given[2:], weight[2:]
    stride, padding = call.integers(layout.stride), call.integers(layout.padding)
    dilation = (1,) if layout.dilation is None else call.integers(layout.dilation)
    if not stride or not padding or not dilation or min(stride) < 1:
        return None
    strides, paddings, dilations = (_spread(one, len(sizes)) for one in (stride, padding, dilation))
    if strides is None or paddings is None or dilations is None:
        return None
    places = zip(sizes, kernel, strides, paddings, dilations, strict=True)
    return tuple(max((size + 2 * pad - gap * (k - 1) - 1) // step + 1, 0) for size, k, step, pad, gap in places)


def _spread(values: Shape, count: int) -> Shape | None:
    """One value for each dimension, where one stands for all."""
    return values if len(values) == count else values * count if len(values) == 1 else None


# Attention


def attention(
    causal: int, query: int = 0, *, heads_first: bool = True, backward: bool = False, lengths: int | None = None
) -> Callable[[Call], Work | None]:
    """Formula for fused attention: query, key and value from place `query` on; `causal` is the place of the flag.

    Args:
        heads_first: whether shapes are (batch, heads, positions, size), else (batch, positions, heads, size).
        backward: whether the output's gradient stands before the query, the output after the value.
        lengths: place of the sequences' ends, of which a tensor says that the batch is packed into one row.
    """

    def formula(call: Call) -> Work | None:
        shapes = [call.shape(query + number) for number in range(3)]
        if lengths is not None and call.shape(lengths) is not None:
            return None
        if any(shape is None or len(shape) != 4 for shape in shapes):
            return None
        order = (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
        q, k, v = (tuple(shape[place] for place in order) for shape in shapes if shape is not None)
        flag = call.mask(causal, same_length=q[2] == k[2])
        element = call.type(query)
        wide = prod(q[:3]) * v[3] * ELEMENT_BYTES[element]
        inputs = sum(call.bytes(query + number) for number in range(3))
        moved = 2 * inputs + 2 * wide if backward else inputs + wide
        if flag is None:
            return Work("attention", None, moved, NUMBER_TYPES.get(element))
        pairs = q[0] * q[1] * (_below_diagonal(q[2], k[2]) if flag else q[2] * k[2])
        # Backward computes the scores again, and the gradients of the scores, of all three inputs.
        flops = 2 * pairs * (3 * q[3] + 2 * v[3]) if backward else 2 * pairs * (q[3] + v[3])
        return Work("attention", flops, moved, NUMBER_TYPES.get(element))

    return formula


def _below_diagonal(rows: int, columns: int) -> int:
    """How many (query, key) pairs a causal mask leaves: in row i, columns 0 to i."""
    full = min(rows, columns)
    return full * (full + 1) // 2 + max(rows - columns, 0) * columns
