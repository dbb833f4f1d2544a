"""Fused optimizers of vendors, for parameters on their devices: Gaudi's (habana_frameworks) and PyTorch/XLA's.

Written from their documentation: "Fused Optimizers and Custom Ops for Intel Gaudi", and torch_xla.amp.syncfree.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

import torch
from torch.optim import Optimizer

_HPU_MODULE: Final = "habana_frameworks.torch.hpex.optimizers"
_XLA_MODULE: Final = "torch_xla.amp.syncfree"
_HPU: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "AdamW": ("FusedAdamW", ("lr", "betas", "eps", "weight_decay")),
    "Adam": ("FusedAdamW", ("lr", "betas", "eps", "weight_decay")),
    "SGD": ("FusedSGD", ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "Adagrad": ("FusedAdagrad", ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
}
"""Optimizer of torch -> the vendor's, and the options that its documented constructor takes."""
_XLA: Final = ("Adam", "AdamW", "SGD")


def vendor_optimizer(optimizer: Optimizer, family: str) -> tuple[Optimizer | None, str | None]:
    """The vendor's optimizer with the same groups and state, or None and why not (None where no vendor is asked).

    Args:
        family: name of the optimizer's class in torch.optim; empty where it has a step of its own.
    """
    devices = _devices(optimizer)
    if devices == {"hpu"}:
        return _on_hpu(optimizer, family)
    if devices == {"xla"} and family in _XLA:
        kind = _kind(_XLA_MODULE, family)
        if kind is None:
            return None, f"{_XLA_MODULE} has no {family} here"
        if isinstance(optimizer, kind):
            return optimizer, None
        return _sharing(optimizer, kind, ("lr",), {})
    return None, None


def _devices(optimizer: Optimizer) -> set[str]:
    return {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}


def _on_hpu(optimizer: Optimizer, family: str) -> tuple[Optimizer | None, str | None]:
    if type(optimizer).__module__.startswith("habana_frameworks."):
        return optimizer, None
    if family not in _HPU:
        return None, f"Gaudi has no fused {family or type(optimizer).__name__}"
    name, options = _HPU[family]
    kind = _kind(_HPU_MODULE, name)
    if kind is None:
        return None, f"{_HPU_MODULE} has no {name} here"
    groups = optimizer.param_groups
    reason = next(filter(None, (_hpu_reason(optimizer, family, group) for group in groups)), None)
    if reason is not None:
        return None, reason
    steps = {index: _steps(optimizer, group) for index, group in enumerate(groups)}
    counts = (
        {index: counted.pop() for index, counted in steps.items() if counted} if family in ("Adam", "AdamW") else {}
    )
    return _sharing(optimizer, kind, options, counts)


def _hpu_reason(optimizer: Optimizer, family: str, group: dict[str, Any]) -> str | None:
    """What Gaudi's optimizers cannot take over from torch's; a clause for the user."""
    if not group["params"]:
        return "a group without parameters, which Gaudi's fused optimizers do not take"
    if group.get("amsgrad") or group.get("maximize"):
        return f"Gaudi's fused {family} has neither amsgrad nor maximize"
    if family == "Adam" and group["weight_decay"]:
        return "Gaudi's fused Adam decays weights as AdamW does, so weight_decay has to be 0"
    steps = _steps(optimizer, group)
    if family in ("Adam", "AdamW") and len(steps) > 1:
        return "the parameters of a group have made different numbers of steps, and Gaudi's FusedAdamW counts once"
    if family == "SGD" and any("momentum_buffer" in optimizer.state.get(one, {}) for one in group["params"]):
        return "Gaudi's FusedSGD begins with a momentum of its own; fuse before the first step"
    if family == "Adagrad" and steps - {0}:
        return "Gaudi's FusedAdagrad begins with sums of its own; fuse before the first step"
    return None


def _steps(optimizer: Optimizer, group: dict[str, Any]) -> set[int]:
    states = (optimizer.state.get(parameter, {}) for parameter in group["params"])
    return {int(state["step"]) for state in states if "step" in state}


def _kind(module: str, name: str) -> type[Optimizer] | None:
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _sharing(
    optimizer: Optimizer, kind: type[Optimizer], options: Iterable[str], counts: dict[int, int]
) -> tuple[Optimizer | None, str | None]:
    """A new optimizer that has the old one's groups, the same dictionaries, and its state.

    What changes a group's learning rate on the old one, as a scheduler does, changes it on the new one.

    Args:
        counts: group -> steps that were made, for optimizers that count them in the group.
    """
    chosen = {name: optimizer.defaults[name] for name in options if name in optimizer.defaults}
    try:
        made = kind(list(optimizer.param_groups), **chosen)
    except (TypeError, ValueError) as error:
        return None, f"{kind.__module__}.{kind.__name__} does not take these options: {error}"
    made.param_groups = optimizer.param_groups
    if counts:
        for index, group in enumerate(made.param_groups):
            group["step"] = counts.get(index, 0)
    for parameter, state in optimizer.state.items():
        if counts and isinstance(state.get("step"), torch.Tensor):
            state["step"] = int(state["step"])
        made.state[parameter] = state
    optimizer.state = made.state
    optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers say that no step was made
    return made, None
