"""Clipping gradients by their norm in one pass over lists of tensors, without the host waiting for the norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Final

import torch
from torch import Tensor

_EPSILON: Final = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides."""


@torch.no_grad()
def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`; returns it as it was.

    The same as `torch.nn.utils.clip_grad_norm_`, bit by bit in FP32: norms by lists of tensors, and a factor of at most
    1 that is multiplied on the device. Norms of bf16 and fp16 gradients are kept in FP32: the whole is exact to 1e-6,
    where torch's has the gradients' precision. Gradients on a CPU that need no clipping are not touched. A norm that is
    not finite gives gradients that are not finite, as in torch; there is no `error_if_nonfinite`, for to raise it the
    host would have to wait: look at the returned norm where you wait anyway. On HPU Gaudi's FusedClipNorm is used.

    Args:
        parameters: whose `grad` is scaled; those without one are left out. On one or many devices, of any types.
        max_norm: at most this, 0 or more; math.inf only measures.
        norm_type: the p of the p-norm, above 0; math.inf for the largest absolute value.

    Returns:
        The norm before, a tensor without dimensions on the first gradient's device, in FP32 or wider; 0.0 without
        gradients.

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
        norm = _on_hpu(listed, max_norm)
        if norm is not None:
            return norm
    groups = _by_device_and_type(gradients)
    total = _total_norm(groups, float(norm_type), gradients[0].device)
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    if total.device.type == "cpu" and float(factor) == 1.0:
        return total  # multiplying would change nothing, and on a CPU knowing that needs no waiting
    for (device, dtype), group in groups.items():
        narrow = (
            dtype if dtype.itemsize < 4 else None
        )  # lists are multiplied at once only by a number of their own type
        torch._foreach_mul_(group, factor.to(device=device, dtype=narrow, non_blocking=True))
    return total


def _check(parameters: object, max_norm: float, norm_type: float) -> None:
    if isinstance(parameters, (torch.nn.Module, torch.optim.Optimizer)) or not isinstance(parameters, Iterable):
        hint = (
            "; give it model.parameters()" if isinstance(parameters, (torch.nn.Module, torch.optim.Optimizer)) else ""
        )
        raise TypeError(f"clip_grad_norm takes parameters, not {type(parameters).__name__}{hint}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm has to be 0 or more, not {max_norm}")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ValueError(f"norm_type has to be above 0 (2.0, or math.inf for the largest value), not {norm_type}")


def _is_wrapped(gradient: Tensor) -> bool:
    """Whether the gradient is of a subclass, such as DTensor, whose norm is more than that of what is here."""
    return type(gradient) not in (Tensor, torch.nn.Parameter)


def _numbers_of(parameter: Tensor) -> Tensor:
    """The gradient, or of a sparse one the values that it holds, each place once."""
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
    norms: list[Tensor] = []
    for (_, dtype), gradients in groups.items():
        norms += (norm.to(device, non_blocking=True) for norm in _norms(gradients, norm_type, dtype))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _norms(gradients: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Each gradient's norm, in FP32 where the gradients are narrower."""
    wide = torch.float32 if dtype.itemsize < 4 else None
    if norm_type == math.inf and any(not gradient.numel() for gradient in gradients):
        gradients = [gradient for gradient in gradients if gradient.numel()] or [gradients[0].new_zeros(1)]
    if wide is None:
        return list(torch._foreach_norm(gradients, norm_type))
    try:
        return list(torch._foreach_norm(gradients, norm_type, dtype=wide))
    except TypeError:  # torch before 2.4 gives norms in the gradients' type
        return [torch.linalg.vector_norm(gradient, norm_type, dtype=wide) for gradient in gradients]


def _on_hpu(parameters: list[Tensor], max_norm: float) -> Tensor | None:
    """By Gaudi's kernel, as its page "Fused Optimizers and Custom Ops" documents it; None without its package."""
    try:
        kind = import_module("habana_frameworks.torch.hpex.normalization").FusedClipNorm
    except (ImportError, AttributeError):
        return None
    norm: Tensor = kind(parameters, max_norm).clip_norm(parameters)
    return norm
