"""Fused optimizers of vendors, for parameters on their devices: Gaudi's (habana_frameworks) and PyTorch/XLA's.

Written from their documentation: "Fused Optimizers and Custom Ops for Intel Gaudi", and torch_xla.amp.syncfree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
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
    """Return (the vendor's optimizer with the same groups and state, None), or (None, the reason against it).

    Both are None if the device has no vendor optimizer.

    Args:
        family: name of the optimizer's class in torch.optim; empty if it has its own step.
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
        return "Gaudi's fused Adam decays weights as AdamW does, so weight_decay must be 0"
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
    """Make a new optimizer that shares the old one's group dictionaries and state.

    A scheduler that changes a group's learning rate on the old one also changes it on the new one.

    Args:
        counts: group -> steps made so far, for optimizers that count them in the group.
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


_EPSILON: Final = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds this to the norm before it divides."""


@torch.no_grad()
def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; return the norm before scaling.

    The same as `torch.nn.utils.clip_grad_norm_`, bit by bit in FP32: norms by lists of tensors, and a factor of at most
    1 that is multiplied on the device. Norms of bf16 and fp16 gradients are kept in FP32: accurate to 1e-6, where
    torch's have the gradients' precision. Gradients on a CPU that need no clipping are not touched. A non-finite norm
    gives non-finite gradients, as in torch; there is no `error_if_nonfinite`, because the host would have to wait:
    check the returned norm where you wait anyway. On HPU Gaudi's FusedClipNorm is used.

    Args:
        parameters: whose `grad` is scaled; those without one are skipped. On one or many devices, of any dtypes.
        max_norm: 0 or more; math.inf only measures.
        norm_type: the p of the p-norm, above 0; math.inf for the largest absolute value.

    Returns:
        The norm before, a scalar tensor on the first gradient's device, in FP32 or wider; 0.0 without gradients.

    Raises:
        TypeError: for a module or an optimizer instead of parameters.
        ValueError: for a negative max_norm, or a norm_type that is not above 0.
    """
    norm_type = math.inf if norm_type == "inf" else norm_type  # type: ignore[comparison-overlap]  # as torch takes it
    _check(parameters, max_norm, norm_type)
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(parameter.grad is not None and _is_wrapped(parameter.grad) for parameter in listed):
        return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type)
    gradients = [_numbers_of(parameter) for parameter in listed if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    if norm_type == 2 and all(gradient.device.type == "hpu" for gradient in gradients):
        norm = _norm_on_hpu(listed, max_norm)
        if norm is not None:
            return norm
    groups = _by_device_and_type(gradients)
    total = _total_norm(groups, float(norm_type), gradients[0].device)
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    if total.device.type == "cpu" and float(factor) == 1.0:
        return total  # multiplying would change nothing, and a CPU can know that without waiting
    for (device, dtype), group in groups.items():
        narrow = dtype if dtype.itemsize < 4 else None  # lists are multiplied at once only by a number of their dtype
        torch._foreach_mul_(group, factor.to(device=device, dtype=narrow, non_blocking=True))
    return total


def _check(parameters: object, max_norm: float, norm_type: float) -> None:
    is_owner = isinstance(parameters, (torch.nn.Module, torch.optim.Optimizer))
    if is_owner or not isinstance(parameters, Iterable):
        hint = "; give it model.parameters()" if is_owner else ""
        raise TypeError(f"clip_grad_norm takes parameters, not {type(parameters).__name__}{hint}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, not {max_norm}")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 (2.0, or math.inf for the largest value), not {norm_type}")


def _is_wrapped(gradient: Tensor) -> bool:
    """Whether the gradient is of a subclass, such as DTensor, whose norm covers more than the local values."""
    return type(gradient) not in (Tensor, torch.nn.Parameter)


def _numbers_of(parameter: Tensor) -> Tensor:
    """The gradient, or the coalesced values of a sparse one."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout == torch.strided:
        return gradient
    if not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def _by_device_and_type(gradients: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups


def _total_norm(
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]], norm_type: float, device: torch.device
) -> Tensor:
    norms = [norm for (_, dtype), gradients in groups.items() for norm in _norms(gradients, norm_type, dtype)]
    together = torch.stack([norm.to(device, non_blocking=True) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    return total


def _norms(gradients: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Each gradient's norm, in FP32 if the gradients are narrower."""
    wide = torch.float32 if dtype.itemsize < 4 else None
    if norm_type == math.inf and any(not gradient.numel() for gradient in gradients):
        gradients = [gradient for gradient in gradients if gradient.numel()] or [gradients[0].new_zeros(1)]
    if wide is None:
        return list(torch._foreach_norm(gradients, norm_type))
    try:
        return list(torch._foreach_norm(gradients, norm_type, dtype=wide))
    except TypeError:  # torch before 2.4 returns norms in the gradients' dtype
        return [torch.linalg.vector_norm(gradient, norm_type, dtype=wide) for gradient in gradients]


def _norm_on_hpu(parameters: list[Tensor], max_norm: float) -> Tensor | None:
    """Use Gaudi's kernel, as its page "Fused Optimizers and Custom Ops" documents it; None without its package."""
    try:
        kind = import_module("habana_frameworks.torch.hpex.normalization").FusedClipNorm
    except (ImportError, AttributeError):
        return None
    norm: Tensor = kind(parameters, max_norm).clip_norm(parameters)
    return norm
