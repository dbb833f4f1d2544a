"""The value that each backward pass begins with: the loss that a program trains on, whatever it prints of it.

A copy of the value stays where it is, on the device too, and is read only when the steps are over, so nothing waits
for it. A loss that torch.amp's GradScaler made larger is noted as it was before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, Final

from stepscope.capture import guard
from stepscope.capture.quiet_seeds import FixedSeeds

MOST_LOSSES: Final = 4096
_BEFORE_SCALING: Final = "_stepscope_before_scaling"


class BackwardLosses:
    """Notes losses from `start` on; torch is imported already."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        """Note the value of every backward pass."""
        torch: Any = sys.modules["torch"]
        self._replace(torch.autograd, "backward", guard.around(torch.autograd.backward, before=self._note))
        scaler: Any = getattr(getattr(torch, "amp", None), "GradScaler", None)
        if scaler is not None and "scale" in vars(scaler):
            self._replace(scaler, "scale", guard.around(scaler.scale, after=_scaled))

    def stop(self) -> list[float]:
        """Leave torch as it was; returns the losses, for which it waits for the device."""
        while self._restore:
            self._restore.pop()()
        found: list[float] = []
        with guard.attempt():  # the device failed: what was read before is kept
            found.extend(float(tensor) for tensor in self._tensors)
        self._tensors.clear()
        return found

    @guard.entry
    def _note(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Keep a copy of the first value: a program may change the tensor itself, or use its memory again."""
        if len(self._tensors) >= MOST_LOSSES:
            return
        torch: Any = sys.modules["torch"]
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        loss = getattr(first, _BEFORE_SCALING, first)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or _is_captured(torch, loss):
            return
        self._tensors.append(loss.detach().clone())

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, function)

        def restore() -> None:
            if getattr(owner, name) is function:
                setattr(owner, name, original)

        self._restore.append(restore)


@guard.entry
def _scaled(_: None, result: Any, scaler: Any, outputs: Any) -> None:
    tensor: Any = sys.modules["torch"].Tensor
    if isinstance(result, tensor) and isinstance(outputs, tensor):
        setattr(result, _BEFORE_SCALING, outputs)


def _is_captured(torch: Any, tensor: Any) -> bool:
    """Whether a CUDA graph is captured just now, which the copy would enter."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def fix_seeds(seed: int) -> FixedSeeds:
    """Have the program draw the same random numbers in every run of this seed; call it when torch was imported.

    What it seeds itself has `seed` added, so that another seed gives other numbers there too: 0 leaves its own seeds.
    """
    seeds = FixedSeeds(seed)
    if not seed:
        return seeds
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    for owner, name in ((torch, "manual_seed"), (random, "seed"), (getattr(numpy, "random", None), "seed")):
        if owner is not None:
            setattr(owner, name, _moved(getattr(owner, name), seed))
    return seeds


def _moved(function: Callable[..., Any], by: int) -> Callable[..., Any]:
    def seed(*positional: Any, **named: Any) -> Any:
        if positional and isinstance(positional[0], int):
            positional = (positional[0] + by, *positional[1:])
        named = {name: value + by if isinstance(value, int) else value for name, value in named.items()}
        return function(*positional, **named)

    return seed
