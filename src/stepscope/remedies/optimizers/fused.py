"""Make optimizers update all parameters in few kernels: torch's fused or foreach implementation, or a vendor's.

A loop over parameters runs several short operators for each; a fused update passes over parameter, gradient and state
once. What torch supports is found by asking torch itself, and by trying it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepscope.remedies.attempts import in_background
from stepscope.remedies.optimizers.vendor import vendor_optimizer

_COUNT: Final = 67
"""Elements in a trial: several full vector registers and a remainder, for any dtype."""
_ROUNDINGS: Final = 8
"""Allowed error of the kernel, in units in the last place of the largest number."""
_RATE, _DECAY, _EPSILON = 0.1, 0.01, 1e-8
_MOMENTUM: Final = 0.9
_BETAS: Final = (0.9, 0.99)
_STEP: Final = 3
_STATES: Final = {"Adam": 2, "AdamW": 2, "Adagrad": 1, "SGD": 1}
"""Optimizer -> number of state tensors that its fused kernel takes."""

FUSED: Final = tuple(_STATES)
"""Optimizers of torch.optim that have fused kernels."""


@cache
def kernel_reason(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Why the fused kernel cannot update parameters of this dtype on this device; None if it can."""
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
    """Parameter, gradient and state for a trial update: distinct numbers, states positive."""
    places = torch.arange(_COUNT, dtype=torch.float32)
    wave = torch.sin(places * (0.7 + 0.3 * index) + index)
    return wave.abs() + 0.5 if index >= 2 else wave


def _kernel(name: str, tensors: list[Tensor]) -> None:
    kernels: Any = torch  # whose stubs know only one version's arguments
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


class GradientWatch:
    """Checks each parameter's first gradient just before the step that uses it, and unfuses its group if necessary.

    A parameter does not show whether its gradients will be sparse, or their memory layout. Nothing is checked any more
    once all first gradients were seen.
    """

    def __init__(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], put_back: Callable[[Optimizer, str], None]
    ) -> None:
        self._waiting = [(group, parameter) for group in groups for parameter in group["params"]]
        self._put_back = put_back
        self._handle = optimizer.register_step_pre_hook(self._before_step) if self._waiting else None

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @in_background
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

    @in_background
    def _look(self, optimizer: Optimizer) -> None:
        waiting = []
        for group, parameter in self._waiting:
            if parameter.grad is None:
                waiting.append((group, parameter))
            elif group.get("fused"):
                reason = _reason(parameter, parameter.grad) or _zero_momentum(optimizer, group, parameter)
                if reason is not None:
                    self._to_loop(optimizer, group, reason)
        self._waiting = (
            waiting  # once empty the hook stays: removing it while hooks run would end the iteration over them
        )

    def _to_loop(self, optimizer: Optimizer, group: dict[str, Any], reason: str) -> None:
        group["fused"] = False
        group["foreach"] = None
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor) and not group.get("capturable"):
                state["step"] = state["step"].cpu()
        _unscale(optimizer)
        self._put_back(optimizer, reason)


def _reason(parameter: torch.Tensor, gradient: torch.Tensor) -> str | None:
    what = f"the gradient of a parameter of shape {tuple(parameter.shape)}"
    if gradient.layout != torch.strided:
        return f"{what} is sparse"
    several = sum(size != 1 for size in parameter.shape) > 1 and parameter.numel() > 1
    return f"{what} has another memory layout" if several and gradient.stride() != parameter.stride() else None


def _zero_momentum(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """Give a parameter without momentum, in a group where others have one, zero momentum; torch's fused SGD expects it.

    The loop's first update takes the gradient as the momentum; starting from zeros is the same, except for dampening.
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
    """In a step taken by a gradient scaler, do what the fused update would have done with its scale."""
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


_SMALL_ON_A_CPU: Final = 1024
"""Numbers in a parameter, on average, up to which lists of tensors beat the loop on a CPU.

Measured with torch 2.13 on one core and 400 parameters: RMSprop 1.8 times as fast with 64 or 1,024 numbers each, half
as fast with 16,384."""


_WORDS: Final = {
    "fused": "updates with torch's fused kernels",
    "foreach": "updates lists of tensors, not fused",
    "mixed": "is partly fused",
    "unchanged": "is left as it was, not fused",
}


@dataclass(frozen=True, slots=True)
class Fusion:
    """What `fuse_optimizer` did to an optimizer; kept in the optimizer's attribute `fusion`.

    Attributes:
        implementation: "fused", "foreach" (lists of tensors), "unchanged", "mixed" (group by group), or the vendor's
            class, such as "habana_frameworks.torch.hpex.optimizers.FusedAdamW".
        reasons: why it is not fused, a clause each; empty if all of it is.
    """

    implementation: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = _WORDS.get(self.implementation, f"updates with {self.implementation}")
        return f"{what}: {'; '.join(self.reasons)}" if self.reasons else what


def fuse_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer of torch.optim, new or in mid-training, update all its parameters in few kernels.

    The same object is returned, changed in place, so that schedulers, gradient scalers and checkpoints that refer to it
    keep working; on HPU and XLA it is the vendor's, which shares groups and state with the old one. After
    `load_state_dict` it is fused again. A warning and `optimizer.fusion` say what is not fused; the optimizer then
    continues as before, or with lists of tensors. Parameters, gradients and state are not touched.

    The trajectory is the unfused one except for rounding: within 5e-5 of the largest parameter after 50 steps in FP32.
    In bf16 and fp16 a fused update rounds once where the loop rounds after each operator, and is closer to FP32's.

    Args:
        optimizer: an optimizer of torch.optim. SGD, Adam, AdamW and Adagrad have fused implementations.

    Raises:
        TypeError: for an object that is not a torch.optim.Optimizer.
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
    distinct = set(outcomes) or {"unchanged"}
    return distinct.pop() if len(distinct) == 1 else "mixed"


def _described(optimizer: Optimizer, fusion: Fusion) -> Optimizer:
    before = getattr(optimizer, "fusion", None)
    optimizer.fusion = fusion  # type: ignore[attr-defined]
    if fusion.reasons and fusion != before:
        warnings.warn(f"{type(optimizer).__name__} {fusion}", UserWarning, stacklevel=3)
    return optimizer


def _follow(optimizer: Optimizer, outcomes: list[str]) -> None:
    """Watch for first gradients, and fuse again after a checkpoint is loaded."""
    fused = [group for group, outcome in zip(optimizer.param_groups, outcomes, strict=True) if outcome == "fused"]
    watch = getattr(optimizer, "_gradient_watch", None)
    if watch is not None:
        watch.stop()
    optimizer._gradient_watch = GradientWatch(optimizer, fused, _unfused)  # type: ignore[attr-defined]
    if fused and watch is None:
        optimizer.register_load_state_dict_post_hook(_fuse_again)


@in_background
def _fuse_again(optimizer: Optimizer) -> None:
    fuse_optimizer(optimizer)


def _unfused(optimizer: Optimizer, reason: str) -> None:
    """Report that a group went back to the loop because of a gradient that no fused update takes."""
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
    if _takes_lists(family, group):
        group["foreach"] = True
        return "foreach"
    return "unchanged"


def _device_step(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Fused updates count steps in FP32 on the parameter's device; older checkpoints hold plain numbers."""
    if "step" not in state:
        return
    step = torch.as_tensor(state["step"])
    state["step"] = step.detach().to(device=parameter.device, dtype=torch.float32, copy=True)


def _family(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch.optim whose step the optimizer uses; None if it has its own."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind is not Optimizer:
            return kind if _step_of(type(optimizer)) is _step_of(kind) else None
    return None


def _step_of(kind: type[Optimizer]) -> Any:
    """The original function, without the wrappers of hooks and profilers."""
    return inspect.unwrap(getattr(kind, "step"))  # noqa: B009 - mypy does not know it on a class


def _why_not_fused(optimizer: Optimizer, family: type[Optimizer] | None, group: dict[str, Any]) -> str | None:
    """A clause for the user; None if the group can be fused."""
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
        shape = tuple(parameter.shape)
        return f"a parameter of shape {shape} is a view with gaps, over which fused updates would write"
    return None


def _state_reason(state: dict[str, Any], parameter: torch.Tensor) -> str | None:
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or name == "step":
            continue
        if (value.dtype, value.device) != (parameter.dtype, parameter.device):
            own = f"its parameter {parameter.dtype} on {parameter.device}"
            return f"state {name!r} is {value.dtype} on {value.device}, {own}"
        if value.shape != parameter.shape or value.stride() != parameter.stride():
            return f"state {name!r} has another memory layout than its parameter of shape {tuple(parameter.shape)}"
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory range, each place once, in any order of dimensions."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dimensions if size != 1):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _takes_lists(family: type[Optimizer] | None, group: dict[str, Any]) -> bool:
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
