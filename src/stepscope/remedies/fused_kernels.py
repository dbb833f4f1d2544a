"""Whether torch's fused optimizer kernels run, and compute what the optimizer's formula says, on a device in a type.

A kernel that exists is not enough: torch 2.13's fused SGD for a CPU leaves most numbers in bf16 and fp16 as they are
(pytorch issue 191763). So each is tried once, on a few numbers, against the formulas of torch.optim's documentation. No
optimizer is made, for programs may count those.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

_COUNT: Final = 67
"""Numbers in a trial: some vector registers full, and a rest, in any type."""
_ROUNDINGS: Final = 8
"""By how many units in the last place of the largest number the kernel may be off."""
_RATE, _DECAY, _EPSILON = 0.1, 0.01, 1e-8
_MOMENTUM: Final = 0.9
_BETAS: Final = (0.9, 0.99)
_STEP: Final = 3
_STATES: Final = {"Adam": 2, "AdamW": 2, "Adagrad": 1, "SGD": 1}
"""Optimizer -> tensors of state that its fused kernel takes beside parameter and gradient."""

FUSED: Final = tuple(_STATES)
"""Optimizers of torch.optim that have fused kernels."""


@cache
def kernel_reason(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Why parameters of this type on this device cannot be updated by the fused kernel; None where they can.

    Args:
        name: one of `FUSED`.
        device: a device's type, such as "cuda".
    """
    kind = f"fused {name} for {dtype} on {device}"
    if name not in _STATES or not dtype.is_floating_point or device not in _devices():
        return f"torch {torch.__version__} has no {kind}"
    exact = [_numbers(index) for index in range(2 + _STATES[name])]
    rounded = [tensor.to(device=device, dtype=dtype) for tensor in exact]
    expected = _formula(name, *(tensor.cpu().double() for tensor in rounded))
    try:
        with torch.no_grad():
            _kernel(name, rounded)
    except (AttributeError, RuntimeError, TypeError):
        return f"torch {torch.__version__} has no {kind}"
    allowed = _ROUNDINGS * torch.finfo(dtype).eps * float(expected.abs().max())
    if float((rounded[0].cpu().double() - expected).abs().max()) > allowed:
        return f"torch {torch.__version__}'s {kind} does not compute what its loop does"
    return None


def _numbers(index: int) -> Tensor:
    """Parameter, gradient and state of the trial: distinct numbers, states positive."""
    places = torch.arange(_COUNT, dtype=torch.float32)
    wave = torch.sin(places * (0.7 + 0.3 * index) + index)
    return wave.abs() + 0.5 if index >= 2 else wave


def _kernel(name: str, tensors: list[Tensor]) -> None:
    kernels: Any = torch  # whose stubs know one version's arguments
    lists: list[Any] = [[tensor] for tensor in tensors]
    step = [torch.tensor(float(_STEP), dtype=torch.float32, device=tensors[0].device)]
    options: dict[str, Any] = {"lr": _RATE, "weight_decay": _DECAY, "maximize": False}
    if name == "SGD":
        kernels._fused_sgd_(*lists, momentum=_MOMENTUM, dampening=0.0, nesterov=False, is_first_step=False, **options)
    elif name == "Adagrad":
        kernels._fused_adagrad_(*lists, step, lr_decay=0.0, eps=_EPSILON, **options)
    else:
        kernel = kernels._fused_adam_ if name == "Adam" else kernels._fused_adamw_
        kernel(*lists, [], step, beta1=_BETAS[0], beta2=_BETAS[1], eps=_EPSILON, amsgrad=False, **options)


def _formula(name: str, parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """The updated parameter, by torch.optim's documentation."""
    if name == "AdamW":
        parameter = parameter * (1 - _RATE * _DECAY)
    else:
        gradient = gradient + _DECAY * parameter
    if name == "SGD":
        return parameter - _RATE * (_MOMENTUM * first + gradient)
    if name == "Adagrad" or second is None:
        return parameter - _RATE * gradient / ((first + gradient**2).sqrt() + _EPSILON)
    mean = (_BETAS[0] * first + (1 - _BETAS[0]) * gradient) / (1 - _BETAS[0] ** _STEP)
    square = (_BETAS[1] * second + (1 - _BETAS[1]) * gradient**2) / (1 - _BETAS[1] ** _STEP)
    return parameter - _RATE * mean / (square.sqrt() + _EPSILON)


def _devices() -> list[str]:
    try:
        from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
    except ImportError:  # older than torch 2.1
        return ["cuda"]
    devices: list[str] = _get_fused_kernels_supported_devices()
    return devices
