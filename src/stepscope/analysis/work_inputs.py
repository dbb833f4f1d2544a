"""The inputs of an operator's call, as a trace keeps them, and what its work is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]

ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1, "long": 8, "long int": 8, "int": 4, "short": 2,
    "short int": 2, "unsigned char": 1, "signed char": 1, "char": 1, "bool": 1, "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}  # fmt: skip
"""Bytes of one element by the name that a trace gives the type."""

NUMBER_TYPES: Final[Mapping[str, str]] = {
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8", "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2fnuz": "fp8", "signed char": "int8",
}  # fmt: skip
"""Name of the type in a table of peaks."""

LARGEST: Final = 2**62


class Work(NamedTuple):
    """What one call needs.

    Attributes:
        kind: "matrix", "convolution", "attention", "normalisation", "softmax", "elementwise", "reduction", "embedding"
            or "copy".
        flops: floating-point operations; None where shapes do not tell.
        bytes: least memory traffic; None where shapes or types do not tell.
        number_type: of the arithmetic, such as "bf16"; None where it is none of `NUMBER_TYPES`.
    """

    kind: str
    flops: int | None
    bytes: int | None
    number_type: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's inputs, in order: shape (None for what is no tensor), type, and value as text ("" for a tensor)."""

    shapes: tuple[Shape | None, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]

    def shape(self, index: int) -> Shape | None:
        """Of the input at this place, None where there is no tensor."""
        if index >= len(self.shapes) or self.type(index) not in ELEMENT_BYTES:
            return None
        return self.shapes[index]

    def type(self, index: int) -> str:
        """Of the input at this place, "" where none is known."""
        return self.types[index] if index < len(self.types) else ""

    def bytes(self, index: int) -> int:
        """Of the tensor at this place, 0 where there is none. A number that was made a tensor takes none either."""
        shape = self.shape(index)
        return prod(shape) * ELEMENT_BYTES[self.type(index)] if shape else 0

    def integers(self, index: int) -> Shape | None:
        """The list of integers at this place."""
        try:
            found = json.loads(self.values[index]) if index < len(self.values) else None
        except ValueError:
            return None
        is_list = isinstance(found, list) and all(type(one) is int and abs(one) < LARGEST for one in found)
        return tuple(found) if is_list else None  # type: ignore[arg-type]

    def flag(self, index: int) -> bool | None:
        """The truth value at this place."""
        text = self.values[index] if index < len(self.values) else ""
        return {"True": True, "False": False}.get(text)

    def mask(self, index: int, *, same_length: bool) -> bool | None:
        """Whether the truth value or kind of mask at this place is causal; kind 2 is so from the other corner."""
        text = self.values[index] if index < len(self.values) else ""
        kinds = {"False": False, "True": True, "0": False, "1": True}
        return kinds.get(text, True if text == "2" and same_length else None)

    def flags(self, index: int) -> tuple[bool, ...] | None:
        """The list of truth values at this place."""
        text = self.values[index] if index < len(self.values) else ""
        words = [word.strip() for word in text.strip("[]").split(",")]
        return tuple(word == "True" for word in words) if all(word in ("True", "False") for word in words) else None


def call_of(shapes: str | None, types: str | None, values: str | None) -> Call | None:
    """The inputs from the JSON columns of `operators`; None where shapes or types are missing or damaged."""
    try:
        dimensions, names = json.loads(shapes or "null"), json.loads(types or "null")
        texts = json.loads(values or "[]")
    except (ValueError, RecursionError):
        return None
    if not all(isinstance(part, list) for part in (dimensions, names, texts)):
        return None
    if not all(isinstance(word, str) for word in (*names, *texts)):
        return None
    return Call(tuple(_shape(one) for one in dimensions), tuple(names), tuple(texts))


def _shape(value: Any) -> Shape | None:
    is_shape = isinstance(value, list) and all(type(size) is int and 0 <= size < LARGEST for size in value)
    return tuple(value) if is_shape else None


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The shape that these shapes together spread to; None where they do not fit."""
    result: list[int] = []
    for place in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {shape[-place] for shape in shapes if len(shape) >= place} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(reversed(result))
