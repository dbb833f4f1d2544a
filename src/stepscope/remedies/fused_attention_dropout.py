"""Dropout whose mask can be drawn twice: in the forward pass, and again in the backward pass."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BITS: Final = 16
_VALUES: Final = 2**_BITS
"""Values of the random numbers: four are cut from 64 random bits, because drawing is what costs most on a CPU."""


class Dropout:
    """Draws what to drop, part by part, the same parts in the same order for the same seed.

    Args:
        chance: of each value to be dropped, 0 to 1; drawn in steps of 2**-16, so to within 0.000008.
        seed: see `new_seed`.
        device: where the parts are wanted.
    """

    def __init__(self, chance: float, seed: int, device: torch.device) -> None:
        self._chance = chance
        self._threshold = min(round(chance * _VALUES), _VALUES - 1) - _VALUES // 2
        self._generator = torch.Generator(device).manual_seed(seed) if chance else None

    @staticmethod
    def new_seed() -> int:
        """A seed from the CPU's default generator: `torch.manual_seed` governs it, no device is waited for."""
        return int(torch.randint(2**62, (), device="cpu"))

    def next(self, shape: torch.Size) -> Tensor:
        """The next part: 1 where a value is kept, 0 where it is dropped, as int16.

        Integers, because comparing and masking booleans is several times slower on a CPU than arithmetic.
        """
        assert self._generator is not None
        count = shape.numel()
        if self._chance >= 1:
            return torch.zeros(shape, dtype=torch.int16, device=self._generator.device)
        bits = torch.empty(-(-count * _BITS // 64), dtype=torch.int64, device=self._generator.device)
        bits.random_(-(2**63), None, generator=self._generator)
        return bits.view(torch.int16)[:count].view(shape).ge_(self._threshold)

    def factors(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """What the values are multiplied by: 0 where dropped, else 1 over the chance to stay."""
        factors = kept.to(dtype)
        return factors if self._chance >= 1 else factors.mul_(1 / (1 - self._chance))
