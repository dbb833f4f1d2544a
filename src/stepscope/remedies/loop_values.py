"""What differs from one iteration of a loop to the next, as tensors on the device instead of Python numbers.

A Python number that goes into an operator becomes a constant of the graph: another number is another graph, which lazy
devices and torch.compile compile anew. A number that stands in a tensor is data. Reading the i-th element with a
Python `i` would bring the constant back on lazy devices; there the tensor is rolled instead and the first element is
read, the same operators in every iteration (Intel's guide to Gaudi, "Avoiding Constant Variables in Loops").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["LoopConstants"]

_LAZY = ("xla", "hpu")
"""Devices whose graphs are told apart by the place that is read."""
_ALIGNMENT_BYTES = 16
"""Compiled code copies inputs that begin elsewhere before it uses them."""


class LoopConstants:
    """One value for each iteration of a loop, each a tensor on the device.

        timesteps = LoopConstants([0.9, 0.5, 0.1], device=device)
        for now in timesteps:                           # 3 tensors without dimensions
            sample = denoise(sample, now)
        for now, following in timesteps.windows(2):     # 2 pairs
            sample = denoise(sample, now, following)

    Iterating starts from the first value each time, reads nothing back from the device and copies nothing to it.

    Args:
        values: numbers, or a tensor of shape (iterations, ...) whose rows are the values. It is copied.
        device: where the values are needed; by default a tensor's own, else torch's default device.
        dtype: by default a tensor's own, else what torch.tensor gives the numbers.
        rolled: whether every iteration reads the first element of a rolled tensor, which needs a small operator for
            each, or a view of its own, which needs none; by default rolled on XLA and HPU.

    Raises:
        TypeError: values are neither numbers nor a tensor.
        ValueError: a tensor without dimensions.
    """

    def __init__(
        self,
        values: Sequence[float] | Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rolled: bool | None = None,
    ) -> None:
        try:
            given = values.detach() if isinstance(values, Tensor) else torch.tensor(list(values), dtype=dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"LoopConstants takes numbers or a tensor, one value for each iteration, not {type(values).__name__}"
            ) from error
        if given.dim() == 0:
            raise ValueError("LoopConstants got a tensor without dimensions: its first dimension counts the iterations")
        place = torch.device(device) if device is not None else None
        if place is None and not isinstance(values, Tensor):
            place = torch.empty(0).device
        self._values = given.to(device=place, dtype=dtype, copy=True)
        self._rolled = self._values.device.type in _LAZY if rolled is None else rolled
        self._views = () if self._rolled else _aligned(self._values)

    def __len__(self) -> int:
        return int(self._values.shape[0])

    def __iter__(self) -> Iterator[Tensor]:
        if not self._rolled:
            yield from self._views
            return
        left = self._values
        for _ in range(len(self)):
            now, left = left[0], torch.roll(left, -1, 0)  # before the iteration, so that all have the same graph
            yield now

    def windows(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        """Each value with the `size - 1` that follow it; as often as all of them exist.

        Raises:
            ValueError: the size is not 1 or more.
        """
        if size < 1:
            raise ValueError(f"a window has one value or more, not {size}")
        left = self._values
        for first in range(len(self) - size + 1):
            if self._rolled:
                window, left = tuple(left[place] for place in range(size)), torch.roll(left, -1, 0)
                yield window
            else:
                yield self._views[first : first + size]

    def __repr__(self) -> str:
        shape = tuple(self._values.shape[1:])
        return f"LoopConstants({len(self)} values of shape {shape}, {self._values.dtype}, {self._values.device})"


def _aligned(values: Tensor) -> tuple[Tensor, ...]:
    """The rows, each beginning where compiled code takes it without a copy."""
    length = values.shape[1:].numel()
    step = max(_ALIGNMENT_BYTES // values.element_size(), 1)
    wide = values.new_zeros(values.shape[0], -(-max(length, 1) // step) * step)
    wide[:, :length] = values.reshape(values.shape[0], length)
    return tuple(row[:length].view(values.shape[1:]) for row in wide.unbind())
