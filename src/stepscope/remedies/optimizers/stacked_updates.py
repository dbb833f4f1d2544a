"""The update rules of torch.optim over stacked parameters, with separate hyperparameters for each member.

A stacked parameter is (members, *shape). The formulas are those in the documentation of torch.optim.SGD, Adam and
AdamW, in the order in which torch computes them without fused or foreach.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

Rates = Mapping[str, Tensor]
"""Hyperparameter -> one number for each member, (members,)."""


class StackedUpdate(ABC):
    """One optimizer for all members.

    Attributes:
        state: parameter's name -> its optimizer state, each (members, *shape).
        steps: parameter's name -> number of updates, the same for all members.
    """

    defaults: ClassVar[Mapping[str, float]]

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Tensor]] = {}
        self.steps: dict[str, int] = {}

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], rates: Rates) -> None:
        """Update every parameter that has a gradient.

        Computed in FP32 for narrower parameters: in bfloat16 a beta of 0.999 would be 1.
        """
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            self.steps[name] = self.steps.get(name, 0) + 1
            wide = parameter if parameter.dtype.itemsize >= 4 else parameter.float()
            numbers = {key: _broadcastable(value, wide) for key, value in rates.items()}
            if wide is parameter:
                self._update(name, parameter, parameter.grad, numbers)
                continue
            if name in self.state:
                self.state[name] = {key: value.float() for key, value in self.state[name].items()}
            self._update(name, wide, parameter.grad.float(), numbers)
            parameter.copy_(wide)
            self.state[name] = {key: value.to(parameter.dtype) for key, value in self.state[name].items()}

    def keep(self, kept: Tensor) -> None:
        """Drop all members except these positions (int64)."""
        for state in self.state.values():
            for name, value in state.items():
                state[name] = value.index_select(0, kept)

    @abstractmethod
    def _update(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Mapping[str, Tensor]) -> None: ...


class StackedSGD(StackedUpdate):
    """torch.optim.SGD, with momentum, dampening and weight decay."""

    defaults: ClassVar[Mapping[str, float]] = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}

    def __init__(self, *, nesterov: bool = False) -> None:
        super().__init__()
        self.nesterov = nesterov

    def _update(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Mapping[str, Tensor]) -> None:
        gradient = gradient + numbers["weight_decay"] * parameter
        momentum = numbers["momentum"]
        if name in self.state:
            buffer = self.state[name]["momentum_buffer"]
            buffer.mul_(momentum).add_(gradient * (1 - numbers["dampening"]))
        else:
            buffer = gradient.clone()
            self.state[name] = {"momentum_buffer": buffer}
        moved = gradient + momentum * buffer if self.nesterov else buffer
        # Without momentum torch uses the gradient itself, without dampening.
        parameter.sub_(numbers["lr"] * torch.where(momentum == 0, gradient, moved))


class StackedAdam(StackedUpdate):
    """torch.optim.Adam, and AdamW with decoupled weight decay."""

    defaults: ClassVar[Mapping[str, float]] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0}

    def __init__(self, *, decoupled: bool = False, amsgrad: bool = False) -> None:
        super().__init__()
        self.decoupled, self.amsgrad = decoupled, amsgrad

    def _update(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Mapping[str, Tensor]) -> None:
        decay = numbers["weight_decay"]
        if self.decoupled:
            parameter.mul_(1 - numbers["lr"] * decay)
        else:
            gradient = gradient + decay * parameter
        beta1, beta2 = numbers["beta1"], numbers["beta2"]
        state = self.state.setdefault(name, {})
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if self.amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient * gradient, 1 - beta2)
        if self.amsgrad:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        divisor = second.sqrt().mul_((1 - beta2 ** self.steps[name]).rsqrt()).add_(numbers["eps"])
        parameter.addcdiv_(first * (-numbers["lr"] / (1 - beta1 ** self.steps[name])), divisor)


class StackedAdamW(StackedAdam):
    defaults: ClassVar[Mapping[str, float]] = {**StackedAdam.defaults, "weight_decay": 1e-2}

    def __init__(self, *, amsgrad: bool = False) -> None:
        super().__init__(decoupled=True, amsgrad=amsgrad)


_UPDATES: Final[Mapping[type[torch.optim.Optimizer], type[StackedUpdate]]] = {
    torch.optim.SGD: StackedSGD,
    torch.optim.Adam: StackedAdam,
    torch.optim.AdamW: StackedAdamW,
}
_NOT_PER_MEMBER: Final = {"nesterov": (torch.optim.SGD,), "amsgrad": (torch.optim.Adam, torch.optim.AdamW)}


def stacked_update(
    optimizer: type[torch.optim.Optimizer], hyperparameters: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[StackedUpdate, dict[str, Tensor]]:
    """Return the update rule of an optimizer's class, and each hyperparameter as a tensor (members,).

    Hyperparameters are FP64 if the device supports it.

    Raises:
        ValueError: an unknown optimizer or hyperparameter, or a switch that differs between members.
    """
    if optimizer not in _UPDATES:
        known = ", ".join(one.__name__ for one in _UPDATES)
        name = getattr(optimizer, "__name__", repr(optimizer))
        raise ValueError(f"members can be trained together by {known}, not by {name}")
    kind = _UPDATES[optimizer]
    members = [_split_betas(each) for each in hyperparameters]
    switches = {name for name, of in _NOT_PER_MEMBER.items() if optimizer in of}
    for name in sorted(set().union(*members) - set(kind.defaults) - switches):
        raise ValueError(f"{optimizer.__name__} of stacked models knows {', '.join(kind.defaults)}, not {name}")
    precision = torch.float32 if device.type == "mps" else torch.float64
    chosen = {}
    for name in switches:
        values = {bool(member.get(name, False)) for member in members}
        if len(values) > 1:
            raise ValueError(f"{name} must be the same for all members")
        chosen[name] = values.pop()
    numbers = {
        name: [_number(name, member.get(name, default)) for member in members]
        for name, default in kind.defaults.items()
    }
    rates = {name: torch.tensor(each, dtype=precision, device=device) for name, each in numbers.items()}
    return kind(**chosen), rates


def _number(name: str, value: Any) -> float:
    """A hyperparameter, checked against the range that torch's optimizers accept."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a number for each member, not {value!r}") from error
    limit, allowed = (1, "from 0 to below 1") if name.startswith("beta") else (math.inf, "0 or more")
    if not 0 <= number < limit and name != "dampening":
        raise ValueError(f"{name} must be {allowed}, not {number}")
    return number


def _split_betas(given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters with beta1 and beta2 in place of betas."""
    found = dict(given)
    if "betas" in found:
        try:
            found["beta1"], found["beta2"] = found.pop("betas")
        except (TypeError, ValueError) as error:
            raise ValueError(f"betas must be two numbers, not {given['betas']!r}") from error
    return found


def _broadcastable(value: Tensor, parameter: Tensor) -> Tensor:
    """Reshape (members,) to (members, 1, ...) in the parameter's dtype."""
    return value.to(parameter.dtype).view(-1, *[1] * (parameter.dim() - 1))
