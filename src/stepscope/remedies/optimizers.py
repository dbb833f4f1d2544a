"""Optimizers that update all parameters in few kernels: torch's fused implementation, lists of tensors, or a vendor's.

A loop over parameters runs several short operators for each; a fused update passes over parameter, gradient and state
once. What torch supports is asked of torch itself, and tried.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim import Optimizer

from stepscope.remedies.fused_kernels import FUSED, kernel_reason
from stepscope.remedies.optimizer_gradients import GradientWatch
from stepscope.remedies.vendor_optimizers import vendor_optimizer

_SMALL_ON_A_CPU: Final = 1024
"""Numbers in a parameter, on average, up to which lists of tensors beat the loop on a CPU.

Measured with torch 2.13 on one core and 400 parameters: RMSprop 1.8 times as fast with 64 or 1,024 numbers each, half
as fast with 16,384."""


_WORDS: Final = {
    "fused": "updates with torch's fused kernels",
    "foreach": "updates lists of tensors, not fused",
    "mixed": "is fused in part",
    "unchanged": "is left as it was, not fused",
}


@dataclass(frozen=True, slots=True)
class Fusion:
    """What `fuse_optimizer` made of an optimizer; it stands in the optimizer's attribute `fusion`.

    Attributes:
        implementation: "fused", "foreach" (lists of tensors), "unchanged", "mixed" (group by group), or the vendor's
            class, such as "habana_frameworks.torch.hpex.optimizers.FusedAdamW".
        reasons: why it is not fused, a clause each; empty where all of it is.
    """

    implementation: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _WORDS.get(self.implementation, f"updates with {self.implementation}") + (
            ": " + "; ".join(self.reasons) if self.reasons else ""
        )


def fuse_optimizer(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer of torch.optim, new or in mid-training, update all its parameters in few kernels.

    The same object is returned, changed in place, so that schedulers, gradient scalers and checkpoints that know it go
    on working; on HPU and XLA it is the vendor's, which shares groups and state with the old one. After
    `load_state_dict` it is fused again. What is not fused is said by a warning and stands in `optimizer.fusion`; the
    optimizer then goes on as before, or with lists of tensors. Parameters, gradients and state are not touched.

    The trajectory is the unfused one but for rounding: within 5e-5 of the largest parameter after 50 steps in FP32. In
    bf16 and fp16 a fused update rounds once where the loop rounds after each operator, and is closer to FP32's.

    Args:
        optimizer: an optimizer of torch.optim. SGD, Adam, AdamW and Adagrad have fused implementations.

    Raises:
        TypeError: for something that is no torch.optim.Optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"fuse_optimizer takes an optimizer of torch.optim, not {type(optimizer).__name__}; "
            "give it what torch.optim.AdamW(...) returned, or the optimizer inside the wrapper"
        )
    family = _family(optimizer)
    replaced, vendor_reason = vendor_optimizer(optimizer, family.__name__ if family else "")
    if replaced is not None:
        kind = type(replaced)
        return _described(replaced, Fusion(f"{kind.__module__}.{kind.__qualname__}"))
    reasons = [vendor_reason] if vendor_reason else []
    outcomes = [_group(optimizer, family, group, reasons) for group in optimizer.param_groups]
    if outcomes and all(outcome == "fused" for outcome in outcomes):
        reasons.clear()
        optimizer.defaults["fused"] = True
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    _follow(optimizer, outcomes)
    return _described(optimizer, Fusion(_summary(outcomes), tuple(dict.fromkeys(reasons))))


def _summary(outcomes: list[str]) -> str:
    distinct = set(outcomes)
    return "unchanged" if not distinct else distinct.pop() if len(distinct) == 1 else "mixed"


def _described(optimizer: Optimizer, fusion: Fusion) -> Optimizer:
    before = getattr(optimizer, "fusion", None)
    optimizer.fusion = fusion  # type: ignore[attr-defined]
    if fusion.reasons and fusion != before:
        warnings.warn(f"{type(optimizer).__name__} {fusion}", UserWarning, stacklevel=3)
    return optimizer


def _follow(optimizer: Optimizer, outcomes: list[str]) -> None:
    """Look at gradients as they come, and fuse again what a loaded checkpoint sets back."""
    fused = [group for group, outcome in zip(optimizer.param_groups, outcomes, strict=True) if outcome == "fused"]
    watch = getattr(optimizer, "_gradient_watch", None)
    if watch is not None:
        watch.stop()
    optimizer._gradient_watch = GradientWatch(optimizer, fused, _unfused)  # type: ignore[attr-defined]
    if fused and watch is None:
        optimizer.register_load_state_dict_post_hook(_fuse_again)


def _fuse_again(optimizer: Optimizer) -> None:
    fuse_optimizer(optimizer)


def _unfused(optimizer: Optimizer, reason: str) -> None:
    """Say that a group went back to the loop because of a gradient that no fused update takes."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    optimizer.defaults["fused"] = False
    outcome = "mixed" if any(group.get("fused") for group in optimizer.param_groups) else "unchanged"
    before: Fusion = optimizer.fusion  # type: ignore[attr-defined]
    _described(optimizer, Fusion(outcome, (*before.reasons, reason)))


def _group(optimizer: Optimizer, family: type[Optimizer] | None, group: dict[str, Any], reasons: list[str]) -> str:
    """Choose a group's implementation and set it, with its state."""
    reason = _why_not_fused(optimizer, family, group)
    if reason is None:
        for parameter in group["params"]:
            _device_step(optimizer.state.get(parameter, {}), parameter)
        group["fused"] = True
        group["foreach"] = None
        return "fused"
    reasons.append(reason)
    if _takes_lists(optimizer, family, group):
        group["foreach"] = True
        return "foreach"
    return "unchanged"


def _device_step(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Fused updates count steps in FP32 on the parameter's device; older checkpoints hold plain numbers."""
    if "step" not in state:
        return
    step = state["step"]
    if isinstance(step, torch.Tensor):
        state["step"] = step.detach().to(device=parameter.device, dtype=torch.float32, copy=True)
    else:
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)


def _family(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch.optim whose step the optimizer takes; None where it has its own."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind is not Optimizer:
            return kind if _step_of(type(optimizer)) is _step_of(kind) else None
    return None


def _step_of(kind: type[Optimizer]) -> Any:
    """The function as it was written, without what hooks and profilers put around it."""
    return inspect.unwrap(getattr(kind, "step"))  # noqa: B009 - mypy does not know it on a class


def _why_not_fused(optimizer: Optimizer, family: type[Optimizer] | None, group: dict[str, Any]) -> str | None:
    """A clause for the user; None where the group can be fused."""
    if family is None:
        return f"{type(optimizer).__name__} has a step of its own, which torch.optim's implementations cannot replace"
    if "fused" not in group or family.__name__ not in FUSED:
        return f"torch {torch.__version__} has no fused {family.__name__}"
    if group.get("differentiable"):
        return "differentiable=True asks for an update that can be differentiated"
    for parameter in group["params"]:
        reason = _parameter_reason(parameter) or _state_reason(optimizer.state.get(parameter, {}), parameter)
        reason = reason or kernel_reason(family.__name__, parameter.device.type, parameter.dtype)
        if reason is not None:
            return reason
    return None


def _parameter_reason(parameter: torch.Tensor) -> str | None:
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return f"parameters are of type {type(parameter).__name__}; pass fused=True where the optimizer is made"
    if not _is_dense(parameter):
        return (
            f"a parameter of shape {tuple(parameter.shape)} is a view with gaps, over which fused updates would write"
        )
    return None


def _state_reason(state: dict[str, Any], parameter: torch.Tensor) -> str | None:
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or name == "step":
            continue
        if (value.dtype, value.device) != (parameter.dtype, parameter.device):
            return (
                f"state {name!r} is {value.dtype} on {value.device}, its parameter {parameter.dtype} on "
                f"{parameter.device}"
            )
        if value.shape != parameter.shape or value.stride() != parameter.stride():
            return f"state {name!r} is laid out in memory unlike its parameter of shape {tuple(parameter.shape)}"
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its stretch of memory, each place once, whatever the order of its dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _takes_lists(optimizer: Optimizer, family: type[Optimizer] | None, group: dict[str, Any]) -> bool:
    """Whether lists of tensors are supported for the group, and faster than the loop."""
    parameters = group["params"]
    if family is None or "foreach" not in group or group.get("differentiable") or not parameters:
        return False
    if any(isinstance(group.get(name), torch.Tensor) for name in ("lr", "betas")) and not group.get("capturable"):
        return False
    if any(type(parameter) not in (torch.Tensor, torch.nn.Parameter) for parameter in parameters):
        return False
    devices = {parameter.device.type for parameter in parameters}
    if devices == {"cpu"}:
        mean = sum(parameter.numel() for parameter in parameters) / len(parameters)
        dense = not any(parameter.is_complex() for parameter in parameters)
        return dense and mean <= _SMALL_ON_A_CPU and family.__name__ not in ("Adafactor", "SGD")
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    return devices <= set(_get_foreach_kernels_supported_devices())
