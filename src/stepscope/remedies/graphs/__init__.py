"""Launch a training or inference step as one graph: CUDA graphs, and their counterparts in compilers and elsewhere."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import torch

from stepscope.remedies.graphs.recording import CudaRecorder, GraphedSteps
from stepscope.remedies.graphs.static_arguments import NotStatic, flat
from stepscope.remedies.settings import check_whole

__all__ = ["CapturedStep", "capture_step", "mark_step"]

_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._dynamo.is_compiling
"""Whether torch.compile traces the code: it takes this as True, and compiles nothing behind it."""


def mark_step() -> None:
    """End the step's graph and launch it on lazy devices (XLA, Gaudi's lazy mode); do nothing elsewhere.

    On XLA this is `torch_xla.sync()` (before torch_xla 2.3 `torch_xla.core.xla_model.mark_step()`), on Gaudi in lazy
    mode `habana_frameworks.torch.core.mark_step()`. No package is imported: a program that uses such a device has done
    so. If torch_xla is loaded but no XLA device is in use (some libraries load it whenever it is installed), nothing
    happens either. Under torch.compile it is a no-op that does not break the graph.

    Call it after the optimizer's step, and where a graph grows too large or a part of the step has changing shapes.
    https://docs.pytorch.org/xla/release/r2.8/learn/xla-overview.html
    https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html
    """
    if _is_compiling():
        return
    if "torch_xla" in sys.modules:
        _mark_xla(sys.modules["torch_xla"])
    if "habana_frameworks.torch.core" in sys.modules and hpu_is_lazy():
        sys.modules["habana_frameworks.torch.core"].mark_step()


def _mark_xla(package: Any) -> None:
    if _xla_has_started(package) is False:  # marking would start the runtime and take the device
        return
    if hasattr(package, "sync"):
        package.sync()
        return
    model = sys.modules.get("torch_xla.core.xla_model")
    if model is not None:
        model.mark_step()


def _xla_has_started(package: Any) -> bool | None:
    """None if this version cannot say."""
    started = getattr(getattr(package, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return None if started is None else bool(started())


def hpu_is_lazy() -> bool:
    """Whether Gaudi's loaded bridge is in lazy mode; False if it is not loaded or cannot say."""
    internal = sys.modules.get("habana_frameworks.torch.utils.internal")
    return internal is not None and bool(internal.is_lazy())


Mode = Literal["auto", "cuda-graph", "compile", "hpu-graph", "xla", "none"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_HPU: Final = "habana_frameworks.torch.hpu"


class CapturedStep:
    """The step returned by `capture_step`: call it like the original.

    Attributes:
        mode: "cuda-graph", "compile", "hpu-graph", "xla" or "none".
        why: the reason for that mode, in a sentence; once a graph has proved impossible, why it is.
        captures: the tensor arguments of each CUDA graph, as text; empty in other modes, which keep count themselves
            (TORCH_LOGS=recompiles shows torch.compile's).
    """

    def __init__(self, step: Callable[..., Any], run: Callable[..., Any], mode: str, why: str) -> None:
        self._run = run
        self._mode = mode
        self._why = why
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    @property
    def mode(self) -> str:
        return "none" if self._graphs is not None and self._graphs.refused is not None else self._mode

    @property
    def why(self) -> str:
        refused = self._graphs.refused if self._graphs is not None else None
        return refused or self._why

    @property
    def captures(self) -> tuple[str, ...]:
        return tuple(self._graphs.captures) if self._graphs is not None else ()

    def reset(self) -> None:
        """Free CUDA graphs and their memory; the next calls warm up again."""
        if self._graphs is not None:
            self._graphs.forget()

    @property
    def _graphs(self) -> GraphedSteps | None:
        return self._run if isinstance(self._run, GraphedSteps) else None

    def __repr__(self) -> str:
        return f"<captured step {getattr(self, '__name__', '')}: {self.mode}, {self.why}>"


def capture_step(
    step_function: Callable[..., Any],
    *,
    mode: Mode = "auto",
    compile_mode: CompileMode = "default",
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] | None = None,
    warm_up: int = 3,
    most_graphs: int = 8,
    copy_results: bool = True,
    vendor_arguments: Mapping[str, Any] | None = None,
) -> CapturedStep:
    """Turn a step into one launch, with the same results.

        def step(batch, target):                        # the whole step, or inference under torch.no_grad()
            optimizer.zero_grad()
            loss = loss_function(model(batch), target)
            loss.backward()
            optimizer.step()
            return loss
        step = capture_step(step)

    On a CUDA device the step is captured as CUDA graphs: after some eager calls, one graph for each shape of the
    arguments, whose tensors are copied into the graph's own at each call. A step that cannot be captured (it waits for
    the device, changes its arguments, leaves a backward pass or an optimizer's step to the caller, runs a learning rate
    schedule) keeps running eagerly, with a warning, and `why` gives the reason. Python code in the function runs only
    until the capture: count, print and log outside.

    Args:
        step_function: a function, or a module for inference.
        mode: "cuda-graph"; "compile" for torch.compile; "hpu-graph" for Gaudi in lazy mode; "xla" for
            torch_xla.compile; "none" for eager; "auto" for what suits the device: on a CPU "none", since nothing is
            launched there, although compiling may still pay.
        compile_mode, dynamic, backend: torch.compile's `mode`, `dynamic` and `backend`; only the backend "inductor" has
            modes.
        warm_up: eager calls with each kind of arguments before the capture.
        most_graphs: the most CUDA graphs to keep; further kinds of arguments run eagerly, with a warning.
        copy_results: whether results are copies; otherwise the next call overwrites those of CUDA graphs, and of
            torch.compile with "reduce-overhead" or "max-autotune".
        vendor_arguments: further arguments of `wrap_in_hpu_graph` (asynchronous, disable_tensor_cache, dry_run,
            max_graphs), of `ModuleCacher`'s call for a module in training, or of `torch_xla.compile` (full_graph, name,
            max_different_graphs).

    Raises:
        TypeError: the step cannot be called.
        ValueError: an unknown mode, or a number below 1.
        RuntimeError: the requested mode needs a device or package that is not present.
    """
    _check(step_function, mode, compile_mode, warm_up, most_graphs)
    chosen, why = _suited(step_function) if mode == "auto" else (mode, "as asked for")
    extra = dict(vendor_arguments or {})
    if chosen == "cuda-graph":
        if not torch.cuda.is_available():
            raise RuntimeError('mode="cuda-graph" needs a CUDA device, and torch sees none: use mode="auto"')
        recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
        graphs = GraphedSteps(step_function, recorder, warm_up, most_graphs, copy_results)
        return CapturedStep(step_function, graphs, chosen, why)
    run = step_function
    if chosen == "compile":
        run = _compiled(step_function, compile_mode, dynamic, backend, copy_results)
    elif chosen == "hpu-graph":
        run = _hpu_graphs(step_function, extra)
    elif chosen == "xla":
        run = _xla(step_function, extra)
    return CapturedStep(step_function, run, chosen, why)


def _check(step: object, mode: str, compile_mode: str, warm_up: int, most_graphs: int) -> None:
    if not callable(step):
        raise TypeError(f"capture_step takes a function or a module, not {type(step).__name__}")
    for name, value, known in (("mode", mode, get_args(Mode)), ("compile_mode", compile_mode, get_args(CompileMode))):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it takes {', '.join(known)}")
    check_whole("warm_up", warm_up)
    check_whole("most_graphs", most_graphs)


def _suited(step: object) -> tuple[str, str]:
    """The mode that suits the devices of this process, and why."""
    if _HPU in sys.modules and sys.modules[_HPU].is_available():
        if hpu_is_lazy():
            if not isinstance(step, torch.nn.Module):
                return "none", "on Gaudi in lazy mode graphs hold a module: give capture_step the model, not the step"
            return "hpu-graph", "Gaudi is in use in lazy mode"
        return "compile", "Gaudi is in use without lazy mode, where torch.compile makes graphs"
    if _xla_has_started(sys.modules.get("torch_xla")):
        return "xla", "an XLA device is in use"
    if torch.cuda.is_available():
        return "cuda-graph", "a CUDA device is present"
    return "none", 'nothing is launched on a processor; mode="compile" fuses operators: measure whether it pays'


def _compiled(
    step: Callable[..., Any],
    compile_mode: str,
    dynamic: bool | None,
    backend: str | Callable[..., Any] | None,
    copy_results: bool,
) -> Callable[..., Any]:
    """The step under torch.compile; results of Inductor's own CUDA graphs are copied before the next call."""
    if backend is None and _HPU in sys.modules:
        backend = "hpu_backend"
    if backend not in (None, "inductor"):
        return torch.compile(step, backend=backend or "inductor", dynamic=dynamic)
    compiled = torch.compile(step, mode=compile_mode, dynamic=dynamic)
    begin = getattr(torch.compiler, "cudagraph_mark_step_begin", None)
    if compile_mode not in ("reduce-overhead", "max-autotune") or begin is None or not torch.cuda.is_available():
        return compiled

    def run(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = compiled(*args, **kwargs)
        if not copy_results:
            return result
        try:
            results = flat(result, "the result")
        except NotStatic:
            return result
        return results.rebuilt([each.clone() for each in results.tensors])

    return run


def _hpu_graphs(step: Callable[..., Any], extra: dict[str, Any]) -> Callable[..., Any]:
    """A module with its forward pass in HPU graphs.

    A module in training uses `ModuleCacher`, whose graphs include the backward pass.
    https://docs.habana.ai/en/latest/PyTorch/Model_Optimization_PyTorch/HPU_Graphs_Training.html
    """
    if _HPU not in sys.modules:
        raise RuntimeError(f'mode="hpu-graph" needs Gaudi\'s package: import {_HPU} first')
    if not hpu_is_lazy():
        raise RuntimeError('HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1); without it use mode="compile"')
    if not isinstance(step, torch.nn.Module):
        raise TypeError(
            "HPU graphs capture the passes of a module: give capture_step the model, and call it in the step, with "
            "mark_step() behind the optimizer's"
        )
    hpu = sys.modules[_HPU]
    if not step.training:
        return hpu.wrap_in_hpu_graph(step, **extra)  # type: ignore[no-any-return]
    cacher = hpu.ModuleCacher(max_graphs=extra.pop("max_graphs", 10))
    cacher(model=step, **{"inplace": True, **extra})
    return step


def _xla(step: Callable[..., Any], extra: dict[str, Any]) -> Callable[..., Any]:
    package = sys.modules.get("torch_xla")
    if package is None:
        raise RuntimeError('mode="xla" needs PyTorch/XLA: import torch_xla first')
    if not hasattr(package, "compile"):
        raise RuntimeError("this torch_xla has no compile() (it came with 2.5): end the step with mark_step() instead")
    return package.compile(step, **extra)  # type: ignore[no-any-return]
