"""Inputs of operator calls, their shapes, and the memory traffic that follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

Shape: TypeAlias = tuple[int, ...]

_LONGEST: Final = 100_000
"""Most characters to parse; longer texts describe lists of thousands of tensors."""


def _parsed(text: str | None) -> list[Any]:
    """Parse a JSON list; empty for anything else."""
    if not text or len(text) > _LONGEST:
        return []
    try:
        return msgspec.json.decode(text, type=list[Any])
    except (msgspec.DecodeError, RecursionError):
        return []


def _shape(value: Any) -> Shape | None:
    is_shape = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return tuple(value) if is_shape else None


@lru_cache(maxsize=65536)
def shapes_of(text: str | None) -> tuple[Shape, ...]:
    """Shape of each input, () for one that is not a tensor or a list of tensors; empty if `text` is invalid."""
    return tuple(_shape(each) or () for each in _parsed(text))


@lru_cache(maxsize=65536)
def first_shape(text: str | None) -> Shape:
    """Shape of the first input; () if it is not a tensor or unknown."""
    return next(iter(shapes_of(text)), ())


_SCALAR_NAMES: Final[Mapping[str, str]] = {
    "Double": "double", "Float": "float", "Half": "c10::Half", "BFloat16": "c10::BFloat16", "Long": "long",
    "Int": "int", "Short": "short", "Char": "signed char", "Byte": "unsigned char", "Bool": "bool",
    **{f"Float8_{kind}": f"c10::Float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
}  # fmt: skip
"""PyTorch's own names of number types, which some profilers write instead of C++ types."""


@lru_cache(maxsize=65536)
def types_of(text: str | None) -> tuple[str, ...]:
    """Type of each input, such as "float" or "c10::Half", "" for one without a type; empty if the text is invalid."""
    return tuple(_SCALAR_NAMES.get(each, each) if isinstance(each, str) else "" for each in _parsed(text))


@lru_cache(maxsize=65536)
def listed_shapes(text: str | None) -> tuple[Shape, ...]:
    """Shapes of the tensors in the first input that is a list of tensors."""
    for each in _parsed(text):
        if isinstance(each, list) and each and all(isinstance(inner, list) for inner in each):
            return tuple(_shape(inner) or () for inner in each)
    return ()


def elements(shape: Shape) -> int:
    """Number of elements of a tensor with this shape; 1 for a scalar."""
    return prod(shape)


ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1, "long": 8, "long int": 8, "int": 4, "short": 2,
    "short int": 2, "unsigned char": 1, "signed char": 1, "char": 1, "bool": 1, "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}  # fmt: skip
"""Bytes per element by the trace's name of the number type."""

NUMBER_TYPES: Final[Mapping[str, str]] = {
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8", "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2fnuz": "fp8", "signed char": "int8",
}  # fmt: skip
"""Name of the number type in a table of peaks."""

LARGEST: Final = 2**62
_AS_LIST: Final = str.maketrans("()", "[]")


class Work(NamedTuple):
    # "matrix", "convolution", "attention", "normalisation", "softmax", "elementwise", "reduction", "embedding" or
    # "copy", or "experts" (a mixture of experts)
    kind: str
    flops: int | None  # floating-point operations; None where shapes do not give them
    bytes: int | None  # least memory traffic; None where shapes or types do not give it
    number_type: str | None  # number type of the arithmetic, such as "bf16"; None outside of NUMBER_TYPES


@dataclass(frozen=True, slots=True)
class Call:
    """Inputs of an operator in order: shape (None if not a tensor), type, and value as text ("" for a tensor)."""

    shapes: tuple[Shape | None, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]

    def shape(self, index: int) -> Shape | None:
        """Shape of an input, None if it is not a tensor."""
        if index >= len(self.shapes) or self.type(index) not in ELEMENT_BYTES:
            return None
        return self.shapes[index]

    def type(self, index: int) -> str:
        """Type of an input, "" if unknown."""
        return self.types[index] if index < len(self.types) else ""

    def bytes(self, index: int) -> int:
        """Size of a tensor input; 0 if it is not a tensor, or a number converted to one."""
        shape = self.shape(index)
        return prod(shape) * ELEMENT_BYTES[self.type(index)] if shape else 0

    def integers(self, index: int) -> Shape | None:
        try:
            text = self.values[index].translate(_AS_LIST) if index < len(self.values) else "null"
            found = json.loads(text)
        except ValueError:
            return None
        is_list = isinstance(found, list) and all(type(one) is int and abs(one) < LARGEST for one in found)
        return tuple(found) if is_list else None

    def flag(self, index: int) -> bool | None:
        text = self.values[index] if index < len(self.values) else ""
        return {"True": True, "False": False}.get(text)

    def mask(self, index: int, *, same_length: bool) -> bool | None:
        """Whether a flag or mask kind is causal; None for kind 2 (lower right) with unequal lengths, or if unknown."""
        text = self.values[index] if index < len(self.values) else ""
        kinds = {"False": False, "True": True, "0": False, "1": True}
        return kinds.get(text, True if text == "2" and same_length else None)

    def flags(self, index: int) -> tuple[bool, ...] | None:
        text = self.values[index] if index < len(self.values) else ""
        words = [word.strip() for word in text.strip("[]").split(",")]
        return tuple(word == "True" for word in words) if all(word in ("True", "False") for word in words) else None


def call_of(shapes: str | None, types: str | None, values: str | None) -> Call | None:
    """Parse the JSON columns of `operators`; None where shapes or types are missing or damaged."""
    try:
        dimensions, names = json.loads(shapes or "null"), json.loads(types or "null")
        texts = json.loads(values or "[]")
    except (ValueError, RecursionError):
        return None
    if not all(isinstance(part, list) for part in (dimensions, names, texts)):
        return None
    if not all(isinstance(word, str) for word in (*names, *texts)):
        return None
    canonical = tuple(_SCALAR_NAMES.get(name, name) for name in names)
    return Call(tuple(_inputs_shape(one) for one in dimensions), canonical, tuple(texts))


def _inputs_shape(value: Any) -> Shape | None:
    is_shape = isinstance(value, list) and all(type(size) is int and 0 <= size < LARGEST for size in value)
    return tuple(value) if is_shape else None


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """Broadcast shape of these shapes; None where they are incompatible."""
    result: list[int] = []
    for place in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {shape[-place] for shape in shapes if len(shape) >= place} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(reversed(result))


# fmt: off
PLAIN: Final = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "square", "reciprocal", "sqrt", "rsqrt", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "relu", "where", "masked_fill", "gt", "lt", "ge", "le", "eq", "ne", "addcmul",
    "addcdiv", "lerp", "_to_copy", "to", "leaky_relu", "threshold", "sign", "floor", "round", "fill", "copy",
})
"""Names (without namespace and trailing underscore) of element-wise operators limited by memory."""
ARITHMETIC: Final = frozenset({
    "exp", "expm1", "log", "log1p", "log2", "tanh", "erf", "erfc", "sigmoid", "sin", "cos", "pow", "silu", "gelu",
    "softplus", "elu", "mish", "logsigmoid", "hardsigmoid", "hardswish", "atan2",
})
"""Element-wise operators limited by arithmetic."""
REDUCTIONS: Final = frozenset({
    "mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "logsumexp",
    "linalg_vector_norm", "norm",
})
"""Operators that occur in a hand-written normalisation or softmax besides element-wise ones."""
VIEWS: Final = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute", "t",
    "detach", "alias", "chunk", "split", "type_as", "numpy_T", "flatten", "unflatten", "broadcast_to", "view_as",
})
"""Operators that create another view of the same data at no cost."""
# fmt: on


@dataclass(frozen=True, slots=True)
class Traffic:
    """Memory traffic of one element-wise operator."""

    inputs: tuple[Shape, ...]  # shapes of its tensors, without scalars
    output: Shape  # broadcast shape of its inputs
    elements: int  # numbers read and written


@lru_cache(maxsize=65536)
def base_name(name: str) -> str:
    """Operator name without namespace and in-place mark, such as "mul" for "aten::mul_"."""
    return name.rpartition("::")[2].rstrip("_") or name


@lru_cache(maxsize=65536)
def tensor_shapes_of(input_shapes: str | None) -> tuple[Shape, ...]:
    """Shapes of an operator's input tensors, including those in lists, without scalars."""
    found: list[Shape] = []
    for item in _parsed(input_shapes):
        tensors = [item] if _is_shape(item) else item if isinstance(item, list) else []
        found += [tuple(each) for each in tensors if _is_shape(each)]
    return tuple(found)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(size, int) for size in value)


@lru_cache(maxsize=65536)
def traffic(input_shapes: str | None, *, reduces: bool = False) -> Traffic | None:
    """Traffic of an element-wise operator with these inputs; None if no input is a tensor with a dimension.

    Args:
        reduces: whether its result is too small to count.
    """
    shapes = tensor_shapes_of(input_shapes)
    if not shapes:
        return None
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    output = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    return Traffic(shapes, output, sum(map(prod, shapes)) + (0 if reduces else prod(output)))
