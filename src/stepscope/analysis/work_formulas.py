"""Least arithmetic and memory traffic of operator calls, from the shapes of their inputs.

FLOPs are those of matrix products, convolutions and attention, counting multiplications and additions as
`torch.utils.flop_counter` does; causal attention counts only the unmasked part. Other operators have 0. Bytes are every
input read once and every output written once: the least traffic without reuse between operators. What shapes do not
show is None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

import polars as pl

from stepscope.analysis.work import ELEMENT_BYTES, LARGEST, NUMBER_TYPES, Call, Shape, Work, broadcast, call_of
from stepscope.trace import Trace

# Matrix products


def product(first: int, second: int, *added: int) -> Callable[[Call], Work | None]:
    """Formula for the product of inputs `first` and `second`, both with two dimensions or three with the same batch."""

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
    """Input positions of a convolution operator; None for inputs that it does not take."""

    input: int
    weight: int
    stride: int | None = None
    padding: int | None = None
    dilation: int | None = None
    transposed: int | bool = False  # position of the flag, or the operator's fixed behaviour
    gradient: int | None = None  # gradient of the output, in the backward pass
    wanted: int | None = None  # position of the flags for wanted gradients: input, weight, bias
    bias: int | None = None
    output_padding: int | None = None  # of transposed convolutions
    groups: int | None = None


CONVOLUTIONS: Final[Mapping[str, Layout]] = {
    **{f"conv{n}d": Layout(0, 1, 3, 4, 5, bias=2) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": Layout(0, 1, transposed=True, bias=2) for n in (1, 2, 3)},
    "convolution": Layout(0, 1, 3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "convolution_overrideable": Layout(0, 1, 3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "_convolution": Layout(0, 1, 3, 4, 5, 6, bias=2, output_padding=7, groups=8),
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
    # Until PyTorch 1.11: one gradient each, with sizes only in the operator around them.
    **{f"{library}_convolution_backward_input": Layout(0, 2, gradient=1) for library in ("cudnn", "miopen")},
    **{f"{library}_convolution_backward_weight": Layout(0, 2, gradient=1) for library in ("cudnn", "miopen")},
}
SIZES_FROM_PARENT: Final = tuple(name for name in CONVOLUTIONS if name.endswith(("backward_input", "backward_weight")))
"""Operators whose sizes are in the inputs of the operator around them: input, gradient of the output, weight."""


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
    if transposed is None:  # without values; only backward passes have them
        return Work("convolution", None, None, NUMBER_TYPES.get(element))
    if transposed:
        # Each input element meets the whole weight of its channel, whatever the output's size.
        flops = 2 * given[0] * prod(given[2:]) * prod(weight)
        return Work("convolution", flops, _transposed_bytes(layout, call, given, weight), NUMBER_TYPES.get(element))
    spatial = spatial_size(layout, call, given, weight) or output
    if spatial is None:
        return Work("convolution", None, None, NUMBER_TYPES.get(element))
    points = given[0] * prod(spatial)
    read = (index for index in (layout.input, layout.weight, layout.bias) if index is not None)
    moved = sum(map(call.bytes, read)) + points * weight[0] * ELEMENT_BYTES[element]
    return Work("convolution", 2 * points * prod(weight), moved, NUMBER_TYPES.get(element))


def _convolution_backward(layout: Layout, call: Call, output: int, transposed: bool | None) -> Work:
    """Work of a backward pass: each gradient, of input and weight, takes as many operations as the forward pass."""
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
    # Either gradient has the size of its tensor, and needs the other tensor.
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


def _transposed_bytes(layout: Layout, call: Call, given: Shape, weight: Shape) -> int | None:
    """Input, weight and output of a transposed convolution; None where its steps were not recorded."""
    places = (layout.stride, layout.padding, layout.dilation, layout.output_padding)
    settings = [None if place is None else call.integers(place) for place in places]
    spread = [None if one is None else _spread(one, len(given) - 2) for one in settings]
    groups = call.values[layout.groups] if layout.groups is not None and layout.groups < len(call.values) else ""
    if None in spread or not groups.isdigit():
        return None
    sides = zip(given[2:], weight[2:], *(one for one in spread if one is not None), strict=True)
    sizes: list[int] = [
        (size - 1) * step - 2 * pad + gap * (k - 1) + more + 1 for size, k, step, pad, gap, more in sides
    ]
    written: int = given[0] * weight[1] * int(groups) * prod(max(size, 0) for size in sizes)
    return call.bytes(layout.input) + call.bytes(layout.weight) + written * ELEMENT_BYTES[call.type(layout.weight)]


def _spread(values: Shape, count: int) -> Shape | None:
    """Expand a single value to all dimensions."""
    return values if len(values) == count else values * count if len(values) == 1 else None


# Attention


def attention(
    causal: int, query: int = 0, *, heads_first: bool = True, backward: bool = False, lengths: int | None = None
) -> Callable[[Call], Work | None]:
    """Formula for fused attention: query, key and value from position `query` on; `causal` is the flag's position.

    Args:
        heads_first: whether shapes are (batch, heads, positions, size), else (batch, positions, heads, size).
        backward: whether the output's gradient precedes the query, and the output follows the value.
        lengths: position of the sequences' ends; a tensor there means that the batch is packed into one row.
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
        # The backward pass recomputes the scores, and computes the gradients of the scores and of all three inputs.
        flops = 2 * pairs * (3 * q[3] + 2 * v[3]) if backward else 2 * pairs * (q[3] + v[3])
        return Work("attention", flops, moved, NUMBER_TYPES.get(element))

    return formula


def _below_diagonal(rows: int, columns: int) -> int:
    """Number of (query, key) pairs that a causal mask leaves: in row i, columns 0 to i."""
    full = min(rows, columns)
    return full * (full + 1) // 2 + max(rows - columns, 0) * columns


# Mixtures of experts

_EXPERTS: Final = re.compile(r"(?i)fused_?(?:moe|experts)|moe_?(?:forward|gemm)|(?:^|[:_])fmoe")


class ExpertSizes(NamedTuple):
    """Sizes of a fused mixture of experts."""

    tokens: int
    width: int
    experts: int
    chosen: int  # experts that each token goes to
    weights: int  # numbers in one expert's two matrices


def expert_sizes(name: str, call: Call) -> ExpertSizes | None:
    """Sizes of a fused mixture of experts, from its first four tensors; None for other operators."""
    if not _EXPERTS.search(name):
        return None
    tokens, first, second, chosen = (call.shape(index) for index in range(4))
    if not (tokens and first and second and chosen):
        return None
    if (len(tokens), len(first), len(second), len(chosen)) != (2, 3, 3, 2) or first[0] != second[0]:
        return None
    if (first[2], second[1], chosen[0]) != (tokens[1], tokens[1], tokens[0]) or not 0 < chosen[1] <= first[0]:
        return None
    return ExpertSizes(tokens[0], tokens[1], first[0], chosen[1], prod(first[1:]) + prod(second[1:]))


def _experts(sizes: ExpertSizes, call: Call) -> Work:
    """Work where all tokens choose the same experts, which reads the least weights."""
    element, flops = call.type(1), 2 * sizes.tokens * sizes.chosen * sizes.weights
    moved = 2 * call.bytes(0) + call.bytes(3) + sizes.chosen * sizes.weights * ELEMENT_BYTES[element]
    return Work("experts", flops, moved, NUMBER_TYPES.get(element))


def work_of(name: str, call: Call, output: Shape | None = None) -> Work | None:
    """Work of an operator call; None for unknown operators.

    Args:
        name: such as "aten::mm".
        output: spatial size of a convolution's output, if known from elsewhere.
    """
    short = name.removeprefix("aten::").removesuffix("_") if name.startswith("aten::") else ""
    if short in CONVOLUTIONS:
        found: Work | None = convolution(CONVOLUTIONS[short], call, output)
    elif short:
        formula = _FORMULAS.get(short)
        found = formula(call) if formula is not None else None
    else:
        sizes = expert_sizes(name, call)
        found = None if sizes is None else _experts(sizes, call)
    if found is None or any(number is not None and number >= LARGEST for number in (found.flops, found.bytes)):
        return None
    return found


# Operators that memory limits


def _moving(kind: str, reads: Sequence[int], writes: Sequence[int] = (0,)) -> Callable[[Call], Work | None]:
    """Formula for operators that read and write tensors of the size of these inputs."""

    def formula(call: Call) -> Work | None:
        if not call.shape(0):
            return None
        moved = sum(map(call.bytes, reads)) + sum(map(call.bytes, writes))
        return Work(kind, 0, moved, NUMBER_TYPES.get(call.type(0)))

    return formula


def _elementwise(to: str | None = None, *, tensors: int) -> Callable[[Call], Work | None]:
    """Formula for operators whose first inputs broadcast to one shape.

    Args:
        to: number type of the result, if not the inputs'.
        tensors: number of inputs that count; later ones are outputs.
    """

    def formula(call: Call) -> Work | None:
        shapes = [shape for index in range(tensors) if (shape := call.shape(index))]
        spread = broadcast(shapes) if shapes else None
        if spread is None:
            return None
        sized = [call.type(index) for index in range(tensors) if call.shape(index)]
        element = to or max(sized, key=lambda one: (one in NUMBER_TYPES, ELEMENT_BYTES[one]))
        moved = sum(call.bytes(index) for index in range(tensors)) + prod(spread) * ELEMENT_BYTES[element]
        return Work("elementwise", 0, moved, NUMBER_TYPES.get(element))

    return formula


def _embedding(call: Call) -> Work | None:
    weight, indices = call.shape(0), call.shape(1)
    if not weight or not indices or len(weight) != 2:
        return None
    rows = prod(indices) * weight[1] * ELEMENT_BYTES[call.type(0)]
    # Repeated rows may be read once; at most the whole table is read.
    return Work("embedding", 0, call.bytes(1) + rows + min(rows, call.bytes(0)), NUMBER_TYPES.get(call.type(0)))


def _softmax(call: Call) -> Work | None:
    """Work of a softmax; the third input says whether a 16-bit input gives a 32-bit result."""
    if not call.shape(0):
        return None
    written = prod(call.shape(0) or ()) * 4 if call.flag(2) else call.bytes(0)
    return Work("softmax", 0, call.bytes(0) + written, NUMBER_TYPES.get(call.type(0)))


_COMPARISONS: Final = (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf",
    "isfinite",
)  # fmt: skip
_OF_ONE: Final = (
    "relu", "gelu", "silu", "mish", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "sigmoid",
    "tanh", "exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "neg", "abs", "erf",
    "sign", "sgn", "floor", "ceil", "round", "nan_to_num", "bitwise_not", "threshold", "rsub",
)  # fmt: skip
_OF_TWO: Final = (
    "add", "sub", "mul", "div", "pow", "maximum", "minimum", "fmod", "remainder", "bitwise_and", "bitwise_or",
    "clamp_min", "clamp_max", "masked_fill", "threshold_backward", "gelu_backward", "silu_backward",
    "sigmoid_backward", "tanh_backward", "leaky_relu_backward", "hardtanh_backward", "elu_backward",
    "hardswish_backward",
)  # fmt: skip
_OF_THREE: Final = ("addcmul", "addcdiv", "lerp", "clamp", "where")
_REDUCTIONS: Final = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "norm", "linalg_vector_norm", "var", "std",
    "var_mean", "logsumexp", "all", "any", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "avg_pool2d", "max_pool2d",
    "max_pool2d_with_indices", "count_nonzero",
)  # fmt: skip
_BATCH_NORMS: Final = ("native", "cudnn", "miopen")

_FORMULAS: Final[Mapping[str, Callable[[Call], Work | None]]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), product(0, 1)),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm"), product(1, 2, 0)),
    "mv": vector_product(0, 1),
    "addmv": vector_product(1, 2),
    "linear": linear,
    "matmul": matmul,
    "scaled_dot_product_attention": attention(5),
    "_scaled_dot_product_flash_attention": attention(4),
    "_scaled_dot_product_flash_attention_for_cpu": attention(4),
    "_scaled_dot_product_efficient_attention": attention(6),
    "_scaled_dot_product_cudnn_attention": attention(6),
    "_flash_attention_forward": attention(8, heads_first=False, lengths=3),
    "_efficient_attention_forward": attention(9, heads_first=False, lengths=4),
    "_scaled_dot_product_flash_attention_backward": attention(11, 1, backward=True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention(7, 1, backward=True),
    "_flash_attention_backward": attention(11, 1, heads_first=False, backward=True, lengths=6),
    "_scaled_dot_product_efficient_attention_backward": attention(11, 1, backward=True),
    "_scaled_dot_product_cudnn_attention_backward": attention(14, 1, backward=True),
    "_efficient_attention_backward": attention(14, 1, heads_first=False, backward=True, lengths=6),
    **dict.fromkeys(("native_layer_norm", "layer_norm"), _moving("normalisation", (0, 2, 3))),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), _moving("normalisation", (0, 2))),
    "native_group_norm": _moving("normalisation", (0, 1, 2)),
    **{f"{library}_batch_norm": _moving("normalisation", (0, 1, 2, 3, 4)) for library in _BATCH_NORMS},
    **{f"{library}_batch_norm_backward": _moving("normalisation", (0, 1)) for library in _BATCH_NORMS},
    "native_layer_norm_backward": _moving("normalisation", (0, 1)),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("softmax", "log_softmax"), _moving("softmax", (0,))),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _moving("softmax", (0, 0, 1), ())),
    "cumsum": _moving("reduction", (0,)),
    "copy": _moving("copy", (1,)),
    **dict.fromkeys(("fill", "zero"), _moving("elementwise", ())),
    "embedding": _embedding,
    **{name: _elementwise(tensors=1) for name in _OF_ONE},
    **{name: _elementwise(tensors=2) for name in _OF_TWO},
    **{name: _elementwise(tensors=3) for name in _OF_THREE},
    **{name: _elementwise("bool", tensors=2) for name in _COMPARISONS},
    # The result is left out, since shapes do not give its size.
    **{name: _moving("reduction", (0,), ()) for name in _REDUCTIONS},
}


WORK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "work_kind": pl.String,  # as in `stepscope.analysis.work.Work`
    "flops": pl.Int64,
    "bytes": pl.Int64,
    "number_type": pl.String,
}

_INPUTS: Final = ("name", "input_shapes", "input_types", "input_values")
_KEY: Final = (*_INPUTS, "parent_shapes", "parent_types")


def work_of_operators(trace: Trace) -> pl.DataFrame:
    """Work of each call: one row per row of `operators`, in order; columns as in WORK_SCHEMA, null if unknown.

    An operator includes the work of nested operators. If a convolution's stride and padding are not recorded, its
    output size comes from the backward pass of convolutions with the same shapes.
    """
    found = distinct_calls(trace)
    unknown = (None,) * len(WORK_SCHEMA)
    rows = [
        unknown if call is None else work_of(name, call, output) or unknown
        for name, call, output in zip(found.names, found.calls, found.outputs, strict=True)
    ]
    return found.spread(pl.DataFrame(rows, dict(WORK_SCHEMA), orient="row"))


@dataclass(frozen=True, slots=True)
class DistinctCalls:
    """Calls of a trace that differ in name or inputs, without those whose shapes were not recorded."""

    names: list[str]  # operators, such as "aten::mm"
    calls: list[Call | None]  # their inputs; None where damaged
    outputs: list[Shape | None]  # spatial size of a convolution's output, if other calls show it
    texts: pl.DataFrame  # names and inputs as in the trace, columns as in `inputs`
    inputs: pl.DataFrame  # the same for each row of `operators`

    def spread(self, known: pl.DataFrame) -> pl.DataFrame:
        """For each row of `operators` the columns of its distinct call; null if these lack it."""
        table = pl.concat([self.texts, known], how="horizontal")
        joined = self.inputs.join(table, on=_KEY, how="left", nulls_equal=True, maintain_order="left")
        return joined.select(known.columns)


def distinct_calls(trace: Trace) -> DistinctCalls:
    """Distinct operator calls of a trace; gradients of convolutions include their sizes."""
    parents = trace.operators.select(parent_shapes="input_shapes", parent_types="input_types").with_row_index("parent")
    inputs = trace.operators.select(*_INPUTS, "parent")
    needs_parent = pl.col("name").is_in([f"aten::{name}" for name in SIZES_FROM_PARENT])
    inputs = inputs.with_columns(parent=pl.when(needs_parent).then("parent"))
    inputs = inputs.join(parents, on="parent", how="left", maintain_order="left").select(_KEY)
    unique = inputs.filter(pl.col("input_shapes").is_not_null()).unique(maintain_order=True)
    names = unique["name"].to_list()
    calls = [_call(row) for row in unique.iter_rows(named=True)]
    sizes = _outputs(names, calls)
    outputs = [None if call is None else sizes.get((call.shape(0), call.shape(1))) for call in calls]
    return DistinctCalls(names, calls, outputs, unique, inputs)


def _call(row: dict[str, str | None]) -> Call | None:
    """Inputs of a call; taken from the parent for operators whose sizes are recorded there."""
    if row["parent_shapes"] is not None:
        return call_of(row["parent_shapes"], row["parent_types"], None)
    return call_of(row["input_shapes"], row["input_types"], row["input_values"])


def _outputs(names: list[str], calls: list[Call | None]) -> dict[tuple[Shape | None, Shape | None], Shape]:
    """Spatial output size by shapes of input and weight, where all their backward passes agree."""
    found: dict[tuple[Shape | None, Shape | None], set[Shape]] = {}
    for name, call in zip(names, calls, strict=True):
        layout = CONVOLUTIONS.get(name.removeprefix("aten::"))
        if call is None or layout is None or layout.gradient is None:
            continue
        gradient = call.shape(layout.gradient)
        if gradient:
            key = call.shape(layout.input), call.shape(layout.weight)
            found.setdefault(key, set()).add(gradient[2:])
    return {key: shapes.pop() for key, shapes in found.items() if len(shapes) == 1}
