"""What an optimizer's step runs, and how gradients are cleared."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

from stepscope.capture.applying.flags import Flag
from stepscope.capture.applying.patching import Applying, in_a_line, made_here, users_place

FLAGS: Final = (
    Flag(
        "fuse-optimizer",
        "has each optimizer update all parameters in one kernel, or in few",
        "no optimizer stepped",
        "Optimizers that torch can fuse: Adam, AdamW, SGD and others. The update is the same up to rounding.",
    ),
    Flag(
        "zero-grad",
        "has zero_grad drop the gradients instead of filling them with zeros",
        "no zero_grad was called",
        "Only where the program asks for set_to_none=False. It must not read gradients before backward.",
    ),
)


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have the optimizers of the program be as the flags say."""
    if "fuse-optimizer" in chosen:
        with applying.guarded("fuse-optimizer"):
            _Fusing(applying).install()
    if "zero-grad" in chosen:
        with applying.guarded("zero-grad"):
            _drop_gradients(applying)


class _Fusing:
    """Fuses each optimizer when it steps for the first time: its parameters are on their device by then."""

    def __init__(self, applying: Applying) -> None:
        self._applying = applying
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Look out for optimizers that are made, and for their steps."""
        from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

        self._applying.wrap(Optimizer, "__init__", self._made)
        self._applying.on_remove(register_optimizer_step_pre_hook(self._steps).remove)

    def _made(self, original: Any, optimizer: Any, *positional: Any, **named: Any) -> None:
        original(optimizer, *positional, **named)
        self._names[optimizer] = made_here(type(optimizer).__name__)

    def _steps(self, optimizer: Any, positional: Any, named: Any) -> None:
        fused = self._done.get(optimizer)
        groups = optimizer.param_groups
        if fused is None or (fused and not groups[0].get("fused", True)):  # or a checkpoint was loaded since
            name = self._names.get(optimizer) or type(optimizer).__name__
            try:
                self._done[optimizer] = self._fuse(optimizer, name)
            except Exception as error:
                self._done[optimizer] = False
                self._applying.could_not("fuse-optimizer", f"{name}: {in_a_line(error)}")

    def _fuse(self, optimizer: Any, name: str) -> bool:
        groups = optimizer.param_groups
        if any("fused" not in group for group in groups):
            self._applying.could_not("fuse-optimizer", f"{name}: torch has no fused implementation of it")
            return False
        if all(group["fused"] for group in groups):
            self._applying.did("fuse-optimizer", f"{name} runs fused as it was made")
            return True
        for group in groups:
            group["fused"], group["foreach"] = True, False
        self._applying.did("fuse-optimizer", f"{name} now runs fused")
        return True


def _drop_gradients(applying: Applying) -> None:
    """Have zero_grad of optimizers and modules set gradients to None, whatever it is asked for."""
    import torch

    def cleared(original: Any, owner: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            applying.could_not("zero-grad", "gradients are set to None already")
        else:
            applying.did("zero-grad", f"zero_grad at {users_place() or 'an unknown place'} now sets gradients to None")
        original(owner, set_to_none=True)

    for owner in (torch.optim.Optimizer, torch.nn.Module):
        applying.wrap(owner, "zero_grad", cleared)
