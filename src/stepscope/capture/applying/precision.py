"""Numbers of lower precision: autocast around the model's calls, and TF32 in matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stepscope.capture.applying.flags import Flag
from stepscope.capture.applying.loss_scaling import LossScaling
from stepscope.capture.applying.module_calls import Around, OutermostCalls
from stepscope.capture.applying.patching import Applying, users_place

_NO_MODULE: Final = "no module with parameters was called"
FLAGS: Final = (
    Flag(
        "bf16",
        "computes the calls of the model under autocast to bfloat16; what they return is float32 again",
        _NO_MODULE,
        "Parameters, gradients and the loss stay float32. Not where the program uses autocast itself, or where the "
        "parameters are of lower precision already. Losses differ by rounding.",
        against=("fp16",),
    ),
    Flag(
        "fp16",
        "computes the calls of the model under autocast to float16; what they return is float32 again",
        _NO_MODULE,
        "As bf16. Where the program made no GradScaler, backward passes are scaled as one would: a step whose "
        "gradients overflow is left out, and finding out waits for the device in every step. Hooks on activations see "
        "scaled gradients.",
        against=("bf16",),
    ),
    Flag(
        "tf32",
        "lets matrix products and convolutions of float32 round their inputs to TF32",
        "the program ended before anything was computed",
        "Only NVIDIA GPUs from Ampere on.",
    ),
)
_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16"}


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have the model computed as the flags say."""
    for flag, name in _DTYPES.items():
        if flag in chosen:
            OutermostCalls.of(applying).on_new(flag, _Autocast(applying, flag, name).on_new)
    if "tf32" in chosen:
        _allow_tf32(applying)


class _Autocast:
    """Autocast around the calls of one process's models.

    Only the calls themselves stand under it, and return float32: a loss computed from them is as precise as autocast
    would have it, wherever the program computes it, and nothing stays switched on afterwards.
    """

    def __init__(self, applying: Applying, flag: str, dtype: str) -> None:
        import torch

        self._applying = applying
        self._flag = flag
        self._dtype: Any = getattr(torch, dtype)
        self._name = dtype
        self._told: set[str] = set()
        self._has_scaler = False
        self._scaling = LossScaling(applying) if flag == "fp16" else None
        if self._scaling is not None:
            self._watch_scalers()
            applying.at_end(self._say_left_out)

    def on_new(self, module: Any) -> Around | None:
        """Stand around a module's calls, if it computes in float32."""
        import torch

        name = type(module).__name__
        kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if torch.float32 not in kinds:
            shown = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "whole numbers"
            self._applying.could_not(self._flag, f"the parameters of {name} are {shown} already")
            return None
        return self._around

    def _around(self, call: Callable[..., Any], module: Any, *positional: Any, **named: Any) -> Any:
        context = None
        with self._applying.guarded(self._flag):
            context = self._context(module)
        if context is None:
            return call(*positional, **named)
        with context:
            result = call(*positional, **named)
        with self._applying.guarded(self._flag):
            return in_float32(result, self._dtype)
        return result

    def _context(self, module: Any) -> Any:
        """Autocast for a call of the module; None where it is to run as it is."""
        import torch

        device = next(module.parameters()).device.type
        name = type(module).__name__
        if _autocast_dtype(device) == self._dtype:
            self._applying.could_not(self._flag, f"the program calls {name} under autocast to {self._name} itself")
            return None
        context = torch.autocast(device, dtype=self._dtype)
        if name not in self._told:
            self._told.add(name)
            place = users_place()
            called = f"{name} called at {place}" if place else name
            self._applying.did(self._flag, f"{called} computes under autocast to {self._name}")
        if self._scaling is not None and not self._has_scaler and torch.is_grad_enabled():
            self._scaling.start()
        return context

    def _say_left_out(self) -> None:
        if self._scaling is not None and self._scaling.left_out:
            left_out, steps = self._scaling.left_out, self._scaling.steps
            self._applying.did(self._flag, f"{left_out} of {steps} steps were left out: their gradients overflowed")

    def _watch_scalers(self) -> None:
        import torch

        def made(original: Any, scaler: Any, *positional: Any, **named: Any) -> None:
            original(scaler, *positional, **named)
            self._has_scaler = self._has_scaler or bool(scaler.is_enabled())

        scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # from torch 2.3 on
        self._applying.wrap(scaler, "__init__", made)


def in_float32(value: Any, dtype: Any) -> Any:
    """The same, tensors of that dtype in it as float32; lists, tuples and dicts keep their types."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(in_float32(each, dtype) for each in value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(in_float32(each, dtype) for each in value)
    if isinstance(value, dict):
        for key, each in list(value.items()):
            changed = in_float32(each, dtype)
            if changed is not each:
                value[key] = changed
    return value


def _autocast_dtype(device: str) -> Any:
    """What the program's own autocast computes in on a kind of device; None where it is off."""
    import torch

    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except (AttributeError, TypeError):  # before torch 2.4
        if device == "cpu":
            return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def uses_cuda() -> bool:
    """Whether the process computes on a GPU through CUDA or ROCm."""
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _allow_tf32(applying: Applying) -> None:
    """Allow it now, and again at the first call of a module, whatever the program set in between."""
    import torch

    from stepscope.remedies import allow_tf32

    def allow_again(module: Any) -> None:
        allow_tf32()

    def judge() -> None:
        if not uses_cuda() or torch.version.hip:
            applying.could_not("tf32", "the program uses no NVIDIA GPU")
        elif torch.cuda.get_device_capability() < (8, 0):
            applying.could_not("tf32", f"{torch.cuda.get_device_name()} has no TF32")
        else:
            applying.did("tf32", "float32 matrix products and convolutions may use TF32")

    applying.on_remove(allow_tf32().restore)
    OutermostCalls.of(applying).on_new("tf32", allow_again)
    applying.at_end(judge)
