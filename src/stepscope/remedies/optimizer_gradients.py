"""What fused updates do not take, seen in gradients when they first come: sparse ones, late ones, another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class GradientWatch:
    """Looks at each parameter's first gradient just before the step that uses it, and puts its group back if need be.

    A parameter does not tell whether its gradients are sparse or how they lie in memory. After all first gradients were
    seen nothing is looked at any more.
    """

    def __init__(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], put_back: Callable[[Optimizer, str], None]
    ) -> None:
        """
        Args:
            groups: the optimizer's fused groups.
            put_back: called with the optimizer and a clause that says why a group is not fused any more.
        """
        self._waiting = [(group, parameter) for group in groups for parameter in group["params"]]
        self._put_back = put_back
        self._handle = optimizer.register_step_pre_hook(self._before_step) if self._waiting else None

    def stop(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._waiting:
            return None
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._look(optimizer)
            return None

        def closure_then_look() -> Any:
            value = closure()
            self._look(optimizer)
            return value

        return arguments[:1], {**named, "closure": closure_then_look}

    def _look(self, optimizer: Optimizer) -> None:
        waiting = []
        for group, parameter in self._waiting:
            if parameter.grad is None:
                waiting.append((group, parameter))
            elif group.get("fused"):
                reason = _reason(parameter, parameter.grad)
                reason = reason or _late(optimizer, group, parameter)
                if reason is not None:
                    self._to_loop(optimizer, group, reason)
        self._waiting = waiting  # once empty the hook stays: taken away among others that run, it would end them

    def _to_loop(self, optimizer: Optimizer, group: dict[str, Any], reason: str) -> None:
        """Let the group's update be the loop again."""
        group["fused"] = False
        group["foreach"] = None
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor) and not group.get("capturable"):
                state["step"] = state["step"].cpu()
        _unscale(optimizer)
        self._put_back(optimizer, reason)


def _reason(parameter: torch.Tensor, gradient: torch.Tensor) -> str | None:
    if gradient.layout != torch.strided:
        return f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse"
    if gradient.stride() != parameter.stride() and parameter.numel() > 1:
        different = [size for size in parameter.shape if size != 1]
        if len(different) > 1:
            return f"the gradient of a parameter of shape {tuple(parameter.shape)} lies in memory unlike it"
    return None


def _late(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """Give a parameter without momentum, among others with, a momentum of zero; torch's fused SGD expects one.

    The first update of the loop takes the gradient for the momentum; with zeros the fused one comes to the same, but
    for dampening.
    """
    if not group.get("momentum") or optimizer.state.get(parameter, {}).get("momentum_buffer") is not None:
        return None
    others = (optimizer.state.get(other, {}).get("momentum_buffer") for other in group["params"])
    if all(buffer is None for buffer in others):
        return None
    if group.get("dampening"):
        return "a parameter got its first gradient after others, and momentum is dampened"
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return None


def _unscale(optimizer: Optimizer) -> None:
    """In a step that a gradient scaler takes, do by hand what the fused update would have done with its scale."""
    scale, infinite = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and infinite is None:
        return
    skipped = infinite is not None and bool(infinite.item())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if skipped:
                parameter.grad = None
            elif parameter.grad is not None and scale is not None:
                parameter.grad = parameter.grad / scale.to(parameter.grad.device)
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
