"""Remedies for how the model is computed: torch.compile, channels last, cuDNN convolutions, lower precision."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from stepscope import guard
from stepscope.record.apply.flags import Flag, Value
from stepscope.record.apply.patching import Applying, Around, OutermostCalls, in_a_line, users_place

_MODES: Final = ("default", "reduce-overhead", "max-autotune")
COMPILE_FLAGS: Final = (
    Flag(
        "compile",
        "compiles the model when it is first called in training (torch.compile in place: state_dict stays as it is)",
        "no module was called with gradients",
        "If compiling fails, the model runs uncompiled. Not if the program compiles it itself. "
        "reduce-overhead and max-autotune record CUDA graphs, whose outputs the next call overwrites.",
        Value("|".join(_MODES), choices=_MODES, default="default"),
    ),
    Flag(
        "channels-last",
        "keeps the weights and inputs of 2-d convolutions with their channels last",
        "no module with 2-d convolutions was called",
        "Only models with 2-d convolutions. Results differ by rounding.",
    ),
    Flag(
        "cudnn-benchmark",
        "lets cuDNN try its convolution algorithms on each new shape and keep the fastest",
        "the program ended before anything was computed",
        "Only on CUDA, and useful only if shapes repeat.",
    ),
)


def install_compilation(applying: Applying, chosen: Mapping[str, str]) -> None:
    if "channels-last" in chosen:
        _install_channels_last(applying)
    if "compile" in chosen:
        OutermostCalls.of(applying).on_new("compile", _Compiling(applying, chosen["compile"]).on_new)
    if "cudnn-benchmark" in chosen:
        _install_cudnn_benchmark(applying)


class _Compiling:
    def __init__(self, applying: Applying, mode: str) -> None:
        self._applying = applying
        self._mode = mode

    def on_new(self, module: Any) -> Around | None:
        """Compile a module that is trained; its calls fall back to eager execution if that fails."""
        import torch

        name = type(module).__name__
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in module.parameters()):
            return None
        if not hasattr(module, "compile"):
            self._applying.could_not("compile", f"{name} cannot be compiled in place by torch {torch.__version__}")
        elif any(type(each).__name__ == "OptimizedModule" or is_compiled(each) for each in module.modules()):
            self._applying.could_not("compile", f"the program compiles {name} itself")
        else:
            place = users_place()
            with self._applying.guarded("compile"):
                module.compile(**({} if self._mode == "default" else {"mode": self._mode}))
                called = f"{name} called at {place}" if place else name
                self._applying.did("compile", f"{called} is compiled (mode {self._mode})")
                return self._around
        return None

    def _around(self, call: Callable[..., Any], module: Any, *positional: Any, **named: Any) -> Any:
        if not is_compiled(module):
            return call(*positional, **named)
        result, error = guard.tried(call, *positional, **named)
        if error is None:
            return result
        if not _is_the_compilers(error):
            raise error
        module._compiled_call_impl = None
        self._applying.could_not("compile", f"{type(module).__name__} runs uncompiled: {in_a_line(error)}")
        return call(*positional, **named)


def is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_the_compilers(error: Exception) -> bool:
    return any(
        kind.__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))
        for kind in type(error).__mro__
    )


def _install_channels_last(applying: Applying) -> None:
    import torch

    def convert(module: Any) -> bool:
        kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
        count = sum(isinstance(each, kinds) for each in module.modules())
        if count:
            module.to(memory_format=torch.channels_last)
            applying.did(
                "channels-last",
                f"{type(module).__name__} keeps the channels of its {count} convolution{'s' if count > 1 else ''} last",
            )
        return bool(count)

    def on_new(module: Any) -> Around | None:
        with applying.guarded("channels-last"):
            # converted before the buckets of DistributedDataParallel were made
            if _is_distributed(module) or convert(module):
                return around
        return None

    def around(call: Callable[..., Any], module: Any, *positional: Any, **named: Any) -> Any:
        changed = {name: channels_last(each) for name, each in named.items()}
        return call(*map(channels_last, positional), **changed)

    def made(original: Any, self: Any, module: Any, *positional: Any, **named: Any) -> None:
        with applying.guarded("channels-last"):
            convert(module)
        original(self, module, *positional, **named)

    OutermostCalls.of(applying).on_new("channels-last", on_new)
    applying.wrap(torch.nn.parallel.DistributedDataParallel, "__init__", made)


def channels_last(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _is_distributed(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def _install_cudnn_benchmark(applying: Applying) -> None:
    import torch

    def allow(module: Any = None, benchmark: bool = True) -> None:
        torch.backends.cudnn.benchmark = benchmark

    def judge() -> None:
        if uses_cuda():
            applying.did("cudnn-benchmark", "cuDNN tries its convolution algorithms on each new shape")
        else:
            applying.could_not("cudnn-benchmark", "the program uses no CUDA device")

    before = torch.backends.cudnn.benchmark
    applying.on_remove(lambda: allow(None, before))
    allow()
    OutermostCalls.of(applying).on_new("cudnn-benchmark", allow)
    applying.at_end(judge)


_FIRST_SCALE: Final = 2.0**16
_GOOD_STEPS: Final = 2000
"""Steps without an overflow after which the scale is doubled."""
_PASSES_SEARCHED: Final = 2
"""Backward passes that are searched for parameters without an optimizer."""


class LossScaling:
    """Scales the losses of one process's backward passes, from `start` on.

    Attributes:
        scale: of the next backward pass.
        left_out, steps: optimizer steps that were skipped, and the total.
    """

    def __init__(self, applying: Applying) -> None:
        import torch

        self.scale = _FIRST_SCALE
        self.left_out = self.steps = 0
        self._applying = applying
        self._is_on = False
        self._is_scaled = False
        self._passes = 0
        self._good = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._kinds: set[type] = set()
        self._hooked: dict[int, weakref.ref[Any]] = {}
        applying.wrap(torch.optim.Optimizer, "__init__", self._made)

    def start(self) -> None:
        import torch

        if not self._is_on:
            self._is_on = True
            self._applying.wrap(torch.autograd, "backward", self._backward)

    def _made(self, original: Any, optimizer: Any, *positional: Any, **named: Any) -> None:
        original(optimizer, *positional, **named)
        self._optimizers[optimizer] = 0
        # install now: a learning-rate schedule keeps a reference to the step method it finds
        self._guard(type(optimizer))

    def _backward(self, original: Any, tensors: Any, grad_tensors: Any = None, *positional: Any, **named: Any) -> None:
        import torch

        later = bool(positional[1:2] and positional[1]) or bool(named.get("create_graph"))
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors or (None,) * len(roots)
        is_whole = len(roots) == len(given)
        is_plain = is_whole and not (
            positional[2:] or named.get("inputs") is not None or named.get("grad_variables") is not None
        )
        if self._is_scaled or later or not is_plain or any(map(_is_missing, roots, given)):
            # nested in another pass, or not into the .grad of every leaf
            original(tensors, grad_tensors, *positional, **named)
            return
        self._passes += 1
        self._hook(
            each for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]
        )
        if self._passes <= _PASSES_SEARCHED:
            self._hook(leaves(roots))
        scaled = [
            torch.full_like(root, self.scale) if gradient is None else gradient * self.scale
            for root, gradient in zip(roots, given, strict=True)
        ]
        self._is_scaled = True
        try:
            original(roots, scaled, *positional, **named)
        finally:
            self._is_scaled = False

    def _hook(self, parameters: Iterable[Any]) -> None:
        """Divide each parameter's gradient by the scale before it is accumulated."""
        for parameter in parameters:
            known = self._hooked.get(id(parameter))
            if parameter.requires_grad and parameter.is_leaf and (known is None or known() is not parameter):
                self._hooked[id(parameter)] = weakref.ref(parameter)
                self._applying.on_remove(functools.partial(self._unhook, parameter.register_hook(self._divided)))

    def _unhook(self, handle: Any) -> None:
        if not self._is_scaled:  # otherwise a pass is running, whose gradients must still be divided
            handle.remove()

    def _divided(self, gradient: Any) -> Any:
        return gradient * (1.0 / self.scale) if self._is_scaled else gradient

    def _guard(self, kind: Any) -> None:
        """Skip steps of this optimizer class when gradients overflowed."""
        if kind in self._kinds or any(
            each in self._kinds for each in kind.__mro__ if getattr(each, "step", None) is kind.step
        ):
            return
        self._kinds.add(kind)

        def guarded(step: Any, optimizer: Any, *positional: Any, **named: Any) -> Any:
            if (
                self._optimizers.get(optimizer, 0) == self._passes
            ):  # no scaled pass since the last step, or a step nested in another class's step
                return step(optimizer, *positional, **named)
            self._optimizers[optimizer] = self._passes
            self.steps += 1
            if not _are_finite(optimizer):
                self.left_out += 1
                self.scale, self._good = self.scale / 2, 0
                return None
            self._good += 1
            if self._good % _GOOD_STEPS == 0:
                self.scale *= 2
            return step(optimizer, *positional, **named)

        self._applying.wrap(kind, "step", guarded)


def leaves(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors into whose `.grad` a backward pass from the roots writes."""
    waiting = [root.grad_fn for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


def _is_missing(root: Any, gradient: Any) -> bool:
    """Whether torch itself should report that a gradient argument is missing."""
    return gradient is None and root.numel() != 1


def _are_finite(optimizer: Any) -> bool:
    """Whether all gradients that an optimizer is about to use are finite; synchronises with the device."""
    import torch

    found = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in found]
    largest = [torch.linalg.vector_norm(each.detach(), math.inf) for each in dense if each.numel()]
    return not largest or bool(torch.stack([each.to(largest[0].device) for each in largest]).isfinite().all())


_NO_MODULE: Final = "no module with parameters was called"
PRECISION_FLAGS: Final = (
    Flag(
        "bf16",
        "runs the model under autocast to bfloat16; its results are float32 again",
        _NO_MODULE,
        "Parameters, gradients and the loss stay float32. Not if the program uses autocast itself, or if the "
        "parameters already have a lower precision. Losses differ by rounding.",
        against=("fp16",),
    ),
    Flag(
        "fp16",
        "runs the model under autocast to float16; its results are float32 again",
        _NO_MODULE,
        "As bf16. If the program has no GradScaler, backward passes are scaled as one would: a step whose gradients "
        "overflow is skipped, and the check waits for the device in every step. Hooks on activations see scaled "
        "gradients.",
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


def install_precision(applying: Applying, chosen: Mapping[str, str]) -> None:
    for flag, name in _DTYPES.items():
        if flag in chosen:
            OutermostCalls.of(applying).on_new(flag, _Autocast(applying, flag, name).on_new)
    if "tf32" in chosen:
        _allow_tf32(applying)


class _Autocast:
    """Autocast around the model calls of one process.

    Only the calls run under autocast, and they return float32: a loss computed from them is as precise as under
    autocast, wherever the program computes it, and autocast is off again afterwards.
    """

    def __init__(self, applying: Applying, flag: str, dtype: str) -> None:
        import torch

        self._applying = applying
        self._flag = flag
        self._dtype: Any = getattr(torch, dtype)
        self._name = dtype
        self._announced: set[str] = set()
        self._has_scaler = False
        self._scaling = LossScaling(applying) if flag == "fp16" else None
        if self._scaling is not None:
            self._watch_scalers()
            applying.at_end(self._say_left_out)

    def on_new(self, module: Any) -> Around | None:
        """Wrap a module's calls if it computes in float32."""
        import torch

        name = type(module).__name__
        kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if torch.float32 not in kinds:
            shown = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "whole numbers"
            self._applying.could_not(self._flag, f"the parameters of {name} are already {shown}")
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
        """Return the autocast context for a call of the module; None if the call should run unchanged."""
        import torch

        device = next(module.parameters()).device.type
        name = type(module).__name__
        if _autocast_dtype(device) == self._dtype:
            self._applying.could_not(self._flag, f"the program calls {name} under autocast to {self._name} itself")
            return None
        context = torch.autocast(device, dtype=self._dtype)
        if name not in self._announced:
            self._announced.add(name)
            place = users_place()
            called = f"{name} called at {place}" if place else name
            self._applying.did(self._flag, f"{called} computes under autocast to {self._name}")
        if self._scaling is not None and not self._has_scaler and torch.is_grad_enabled():
            self._scaling.start()
        return context

    def _say_left_out(self) -> None:
        if self._scaling is not None and self._scaling.left_out:
            left_out, steps = self._scaling.left_out, self._scaling.steps
            self._applying.did(self._flag, f"{left_out} of {steps} steps were skipped: their gradients overflowed")

    def _watch_scalers(self) -> None:
        import torch

        def made(original: Any, scaler: Any, *positional: Any, **named: Any) -> None:
            original(scaler, *positional, **named)
            self._has_scaler = self._has_scaler or bool(scaler.is_enabled())

        scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
        self._applying.wrap(scaler, "__init__", made)


def in_float32(value: Any, dtype: Any) -> Any:
    """Convert tensors of that dtype in a value to float32; lists, tuples and dicts keep their types."""
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
    """Return the dtype of the program's own autocast on a device type; None if autocast is off."""
    import torch

    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except (AttributeError, TypeError):
        if device == "cpu":
            return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def uses_cuda() -> bool:
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _allow_tf32(applying: Applying) -> None:
    """Allow TF32 now and again at a module's first call, since the program may change the setting in between."""
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
