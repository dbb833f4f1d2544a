"""Input shapes and number types of operators, as the profiler wrote them."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final, TypeAlias

Shape: TypeAlias = tuple[int, ...]

_LONGEST: Final = 100_000
"""Characters; what is longer describes lists of thousands of tensors and is not read."""


@lru_cache(maxsize=65536)
def shapes_of(text: str | None) -> tuple[Shape, ...]:
    """The shape of each input, () for one that is no tensor or a list of them; none where `text` is no such JSON."""
    parsed = _parsed(text)
    return tuple(_shape(each) for each in parsed) if isinstance(parsed, list) else ()


@lru_cache(maxsize=65536)
def types_of(text: str | None) -> tuple[str, ...]:
    """The type of each input, such as "float" or "c10::Half", "" where it has none; none where this is no such JSON."""
    parsed = _parsed(text)
    return tuple(each if isinstance(each, str) else "" for each in parsed) if isinstance(parsed, list) else ()


@lru_cache(maxsize=65536)
def listed_shapes(text: str | None) -> tuple[Shape, ...]:
    """The shapes of the tensors in the first input that is a list of tensors."""
    parsed = _parsed(text)
    for each in parsed if isinstance(parsed, list) else []:
        if isinstance(each, list) and each and all(isinstance(inner, list) for inner in each):
            return tuple(_shape(inner) for inner in each)
    return ()


def elements(shape: Shape) -> int:
    """How many numbers a tensor of this shape holds; 1 for a scalar."""
    product = 1
    for size in shape:
        product *= size
    return product


def _parsed(text: str | None) -> Any:
    if not text or len(text) > _LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shape(value: Any) -> Shape:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        return ()
    return tuple(value)
