"""How the model's calls are run: compiled, with images channels last, with the fastest convolutions of cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stepscope.record.apply.flags import Flag, Value
from stepscope.record.apply.patching import Applying, Around, OutermostCalls, in_a_line, users_place
from stepscope.record.apply.precision import uses_cuda

_MODES: Final = ("default", "reduce-overhead", "max-autotune")
FLAGS: Final = (
    Flag(
        "compile",
        "compiles the model when it is first called in training (torch.compile in place: state_dict stays as it is)",
        "no module was called with gradients",
        "Where compiling fails, the model goes on uncompiled. Not where the program compiles it itself. "
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
        "has cuDNN try its convolutions on each new shape and keep the fastest",
        "the program ended before anything was computed",
        "Only on CUDA, and of use only where shapes repeat.",
    ),
)


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have the model run as the flags say."""
    if "channels-last" in chosen:
        _install_channels_last(applying)
    if "compile" in chosen:
        OutermostCalls.of(applying).on_new("compile", _Compiling(applying, chosen["compile"]).on_new)
    if "cudnn-benchmark" in chosen:
        _install_cudnn_benchmark(applying)


class _Compiling:
    """Compiles models in place at their first call."""

    def __init__(self, applying: Applying, mode: str) -> None:
        self._applying = applying
        self._mode = mode

    def on_new(self, module: Any) -> Around | None:
        """Compile a module that is trained; around its calls stands what goes on without where that fails."""
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
        try:
            return call(*positional, **named)
        except Exception as error:  # of the model's or the compiler's
            if not _is_the_compilers(error):
                raise
            module._compiled_call_impl = None
            self._applying.could_not("compile", f"{type(module).__name__} goes on uncompiled: {in_a_line(error)}")
            return call(*positional, **named)


def is_compiled(module: Any) -> bool:
    """Whether a module was compiled in place."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_the_compilers(error: Exception) -> bool:
    """Whether an exception comes from compiling, and not from what the model computes."""
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
            if _is_distributed(module) or convert(module):  # that was converted before its buckets were made
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
    """A tensor of four dimensions with its channels last; anything else as it is."""
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
            applying.did("cudnn-benchmark", "cuDNN tries its convolutions on each new shape")
        else:
            applying.could_not("cudnn-benchmark", "the program uses no CUDA device")

    before = torch.backends.cudnn.benchmark
    applying.on_remove(lambda: allow(None, before))
    allow()
    OutermostCalls.of(applying).on_new("cudnn-benchmark", allow)
    applying.at_end(judge)
