"""How much arithmetic and memory traffic an operator's call needs at least, from the shapes of its inputs.

FLOPs are those of matrix products, convolutions and attention, a multiply and an add each counting as one, as
`torch.utils.flop_counter` counts them; of a causal attention only what the mask leaves. Of other operators they are 0.
Bytes are every input read once and every output written once: the least that must move where nothing is reused between
operators. What shapes do not tell is None and is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

from stepscope.analysis.work_inputs import ELEMENT_BYTES, LARGEST, NUMBER_TYPES, Call, Shape, Work, broadcast
from stepscope.analysis.work_products import (
    CONVOLUTIONS,
    attention,
    convolution,
    linear,
    matmul,
    product,
    vector_product,
)


def work_of(name: str, call: Call, output: Shape | None = None) -> Work | None:
    """What a call of the operator needs; None where nothing is known of such operators.

    Args:
        name: such as "aten::mm".
        output: spatial size of a convolution's output, where it is known from elsewhere.
    """
    short = name.removeprefix("aten::").removesuffix("_") if name.startswith("aten::") else ""
    if short in CONVOLUTIONS:
        found: Work | None = convolution(CONVOLUTIONS[short], call, output)
    else:
        formula = _FORMULAS.get(short)
        found = formula(call) if formula is not None else None
    if found is None or any(number is not None and number >= LARGEST for number in (found.flops, found.bytes)):
        return None
    return found


# Operators that memory limits


def _moving(kind: str, reads: Sequence[int], writes: Sequence[int] = (0,)) -> Callable[[Call], Work | None]:
    """Formula for operators that read and write tensors as large as their inputs at these places."""

    def formula(call: Call) -> Work | None:
        if not call.shape(0):
            return None
        moved = sum(map(call.bytes, reads)) + sum(map(call.bytes, writes))
        return Work(kind, 0, moved, NUMBER_TYPES.get(call.type(0)))

    return formula


def _elementwise(to: str | None = None, *, tensors: int) -> Callable[[Call], Work | None]:
    """Formula for operators whose first inputs spread to one shape.

    Args:
        to: the result's type where it is not the inputs'.
        tensors: how many inputs count; what stands after them is where the result goes.
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
    # Rows that come again may be read once; of the whole table no more than all of it.
    return Work("embedding", 0, call.bytes(1) + rows + min(rows, call.bytes(0)), NUMBER_TYPES.get(call.type(0)))


def _softmax(call: Call) -> Work | None:
    """The third input says whether the result of 16-bit numbers has 32."""
    if not call.shape(0):
        return None
    written = prod(call.shape(0) or ()) * 4 if call.flag(2) else call.bytes(0)
    return Work("softmax", 0, call.bytes(0) + written, NUMBER_TYPES.get(call.type(0)))


def _softmax_backward(call: Call) -> Work | None:
    return (
        Work("softmax", 0, 2 * call.bytes(0) + call.bytes(1), NUMBER_TYPES.get(call.type(0))) if call.shape(0) else None
    )


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

_FORMULAS: Final[Mapping[str, Callable[[Call], Work | None]]] = {
    "mm": product(0, 1),
    "bmm": product(0, 1),
    "_int_mm": product(0, 1),
    "_scaled_mm": product(0, 1),
    "addmm": product(1, 2, 0),
    "_addmm_activation": product(1, 2, 0),
    "baddbmm": product(1, 2, 0),
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
    "native_layer_norm": _moving("normalisation", (0, 2, 3)),
    "layer_norm": _moving("normalisation", (0, 2, 3)),
    "rms_norm": _moving("normalisation", (0, 2)),
    "_fused_rms_norm": _moving("normalisation", (0, 2)),
    "native_group_norm": _moving("normalisation", (0, 1, 2)),
    "native_batch_norm": _moving("normalisation", (0, 1, 2, 3, 4)),
    "cudnn_batch_norm": _moving("normalisation", (0, 1, 2, 3, 4)),
    "miopen_batch_norm": _moving("normalisation", (0, 1, 2, 3, 4)),
    "native_layer_norm_backward": _moving("normalisation", (0, 1)),
    "native_batch_norm_backward": _moving("normalisation", (0, 1)),
    "cudnn_batch_norm_backward": _moving("normalisation", (0, 1)),
    "miopen_batch_norm_backward": _moving("normalisation", (0, 1)),
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "softmax": _moving("softmax", (0,)),
    "log_softmax": _moving("softmax", (0,)),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "cumsum": _moving("reduction", (0,)),
    "copy": _moving("copy", (1,)),
    "fill": _moving("elementwise", ()),
    "zero": _moving("elementwise", ()),
    "embedding": _embedding,
    **{name: _elementwise(tensors=1) for name in _OF_ONE},
    **{name: _elementwise(tensors=2) for name in _OF_TWO},
    **{name: _elementwise(tensors=3) for name in _OF_THREE},
    **{name: _elementwise("bool", tensors=2) for name in _COMPARISONS},
    # The result, whose size shapes do not tell, is left out.
    **{name: _moving("reduction", (0,), ()) for name in _REDUCTIONS},
}
