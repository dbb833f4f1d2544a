"""What the tests of attention share: inputs, the formula written out, and who watches what is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

FP32, BF16 = 2e-5, 4e-2
"""The largest difference of an output or a gradient, both of values around 1, from the formula in float64."""


def written_out(
    query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False, scale: float | None = None
) -> tuple[Any, Any]:
    """The scores' probabilities and the values they are multiplied with."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1), value


def inputs(shape: Sequence[int] = (3, 4, 48, 16), key_heads: int = 4, keys: int = 48, size: int = 16) -> list[Any]:
    batch, heads, length, head_size = shape
    return [
        torch.randn(batch, heads, length, head_size),
        torch.randn(batch, key_heads, keys, head_size),
        torch.randn(batch, key_heads, keys, size),
    ]


def seen(*shape: int) -> Any:
    """A boolean mask in which every query sees the first key at least."""
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    return mask


def valid_part(lengths: Sequence[int], whole: int, padding: str) -> list[slice]:
    return [slice(whole - n, whole) if padding == "left" else slice(0, n) for n in lengths]


class Watched(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run, with the shapes of what they return in memory of its own (no views)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        given = {each.untyped_storage().data_ptr() for each in tensors_of((arguments, named))}
        new = [each for each in tensors_of(result) if each.untyped_storage().data_ptr() not in given]
        self.calls.append((str(function), [tuple(each.shape) for each in new]))
        return result

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that an operator made."""
        return max(math.prod(shape) for _, shapes in self.calls for shape in shapes)


def tensors_of(values: Any) -> list[Any]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
