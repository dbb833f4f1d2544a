"""What a function runs: its modules, its optimizers and whether it leaves gradients behind, seen by watching a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


@dataclass
class Watched:
    """What one call ran.

    Attributes:
        modules: the outermost ones.
        optimizers: those that took a step.
        gradients: identity and version of the modules' gradients when these began, by `id` of the parameter.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    gradients: dict[int, tuple[int, int] | None] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        """Of all of them, each once."""
        found = {id(each): each for module in self.modules for each in module.parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.update((id(each), each) for each in group["params"])
        return list(found.values())


@contextmanager
def watching() -> Iterator[Watched]:
    """Note the modules and optimizers that run; one thread at a time."""
    seen = Watched()
    inner: set[int] = set()

    def module_runs(module: torch.nn.Module, _: Any) -> None:
        if id(module) not in inner:
            seen.modules.append(module)
            inner.update(id(each) for each in module.modules())
            seen.gradients.update(_gradients(list(module.parameters())))

    def optimizer_stepped(optimizer: Optimizer, _: Any, __: Any) -> None:
        if not any(optimizer is each for each in seen.optimizers):
            seen.optimizers.append(optimizer)

    handles = [
        register_module_forward_pre_hook(module_runs),
        register_optimizer_step_post_hook(optimizer_stepped),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def why_not_whole(seen: Watched, outputs: tuple[Tensor, ...]) -> str | None:
    """Why what ran is a part of a step, whose rest a graph would cut off; None for a whole step or inference."""
    if seen.optimizers:
        return None
    if any(each.requires_grad for each in outputs):
        return (
            "its result waits for a backward pass outside of it: do the backward pass and the optimizer's step inside, "
            "or call it under torch.no_grad()"
        )
    after = _gradients(seen.parameters)
    if any(found is not None and found != seen.gradients.get(key) for key, found in after.items()):
        return "it leaves gradients to an optimizer outside of it: take the optimizer's step inside"
    return None


def _gradients(parameters: list[Tensor] | list[torch.nn.Parameter]) -> dict[int, tuple[int, int] | None]:
    """Identity and version of each parameter's gradient; None without one."""
    return {id(each): None if each.grad is None else (id(each.grad), each.grad._version) for each in parameters}


def watched(call: Callable[[], Any]) -> tuple[Any, Watched]:
    """The call's result and what it ran."""
    with watching() as seen:
        result = call()
    return result, seen
