"""How much data element-wise operators read and write, from the shapes of their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

import msgspec

Shape = tuple[int, ...]

# fmt: off
PLAIN: Final = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "square", "reciprocal", "sqrt", "rsqrt", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "relu", "where", "masked_fill", "gt", "lt", "ge", "le", "eq", "ne", "addcmul",
    "addcdiv", "lerp", "_to_copy", "to", "leaky_relu", "threshold", "sign", "floor", "round", "fill", "copy",
})
"""Names (without namespace and trailing underscore) of element-wise operators as quick as their memory."""
ARITHMETIC: Final = frozenset({
    "exp", "expm1", "log", "log1p", "log2", "tanh", "erf", "erfc", "sigmoid", "sin", "cos", "pow", "silu", "gelu",
    "softplus", "elu", "mish", "logsigmoid", "hardsigmoid", "hardswish", "atan2",
})
"""Element-wise operators that calculate for longer than they wait for memory."""
REDUCTIONS: Final = frozenset({
    "mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "logsumexp",
    "linalg_vector_norm", "norm",
})
"""Operators that a normalisation or a softmax written by hand has among its element-wise ones."""
VIEWS: Final = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute", "t",
    "detach", "alias", "chunk", "split", "type_as", "numpy_T", "flatten", "unflatten", "broadcast_to", "view_as",
})
"""Operators that make another view of the same data, which costs nothing on its way."""
# fmt: on


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one element-wise operator moves.

    Attributes:
        inputs: shapes of its tensors, scalars left out.
        output: shape of its result, if it is that of its broadcast inputs.
        elements: numbers read and written.
    """

    inputs: tuple[Shape, ...]
    output: Shape
    elements: int


def base_name(name: str) -> str:
    """The operator's name without namespace and in-place mark, such as "mul" of "aten::mul_"."""
    return name.rpartition("::")[2].rstrip("_") or name


@lru_cache(maxsize=65536)
def shapes_of(input_shapes: str | None) -> tuple[Shape, ...]:
    """Shapes of the tensors among an operator's inputs; lists of tensors count as their tensors.

    Args:
        input_shapes: JSON, as in the table `operators`.
    """
    if input_shapes is None:
        return ()
    try:
        value = msgspec.json.decode(input_shapes)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(value, list):
        return ()
    return tuple(_tensors(value))


def _tensors(value: list[object]) -> list[Shape]:
    found: list[Shape] = []
    for item in value:
        if isinstance(item, list) and item:
            if all(isinstance(size, int) for size in item):
                found.append(tuple(item))
            else:
                found.extend(
                    tuple(inner)
                    for inner in item
                    if isinstance(inner, list) and inner and all(isinstance(size, int) for size in inner)
                )
    return found


@lru_cache(maxsize=65536)
def traffic(input_shapes: str | None, *, reduces: bool = False) -> Traffic | None:
    """What an element-wise operator of these inputs moves; None where no tensor with a dimension is among them.

    Args:
        reduces: whether its result is too small to count.
    """
    shapes = shapes_of(input_shapes)
    if not shapes:
        return None
    output = _broadcast(shapes)
    return Traffic(shapes, output, sum(map(prod, shapes)) + (0 if reduces else prod(output)))


def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))
