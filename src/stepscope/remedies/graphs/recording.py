"""Capture a step as CUDA graphs, one for each kind of arguments, and replay them from then on.

The order that torch's notes on CUDA graphs ask for: the first call runs eagerly and shows what it runs; some more run
on a side stream (each is a real step), with the batch in static tensors; the next one is captured, which computes
nothing, and replayed; further ones copy their batch in and replay. Graphs share one memory pool, which is allowed
because they run one after the other, and because a graph's results, which are held here, are not taken from the pool
by another graph.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from stepscope.remedies.graphs.static_arguments import Flat, GraphedOptimizers, NotStatic, StaticArguments, flat
from stepscope.remedies.settings import autocast_type


@dataclass
class Watched:
    """The modules and optimizers that one call ran.

    Attributes:
        gradients: by `id` of the parameter, (identity, version) of its gradient when its module first ran.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    gradients: dict[int, tuple[int, int] | None] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, each once."""
        found = {id(each): each for module in self.modules for each in module.parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.update((id(each), each) for each in group["params"])
        return list(found.values())


def watched(call: Callable[[], Any]) -> tuple[Any, Watched]:
    """Run the call; return its result, and the modules and optimizers that it ran. One thread at a time."""
    seen = Watched()
    inner: set[int] = set()

    def module_runs(module: torch.nn.Module, _: Any) -> None:
        if id(module) not in inner:
            seen.modules.append(module)
            inner.update(id(each) for each in module.modules())
            seen.gradients.update(_gradients(list(module.parameters())))

    def optimizer_stepped(optimizer: Optimizer, _: Any, __: Any) -> None:
        if not any(optimizer is each for each in seen.optimizers):
            seen.optimizers.append(optimizer)

    with register_module_forward_pre_hook(module_runs), register_optimizer_step_post_hook(optimizer_stepped):
        return call(), seen


def why_not_whole(seen: Watched, outputs: tuple[Tensor, ...]) -> str | None:
    """Why the call was only part of a step, whose rest a graph would lose; None for a whole step or inference."""
    if seen.optimizers:
        return None
    if any(each.requires_grad for each in outputs):
        return (
            "its result waits for a backward pass outside of it: do the backward pass and the optimizer's step inside, "
            "or call it under torch.no_grad()"
        )
    after = _gradients(seen.parameters)
    if any(found is not None and found != seen.gradients.get(key) for key, found in after.items()):
        return "it leaves gradients to an optimizer outside of it: take the optimizer's step inside"
    return None


def _gradients(parameters: list[Tensor] | list[torch.nn.Parameter]) -> dict[int, tuple[int, int] | None]:
    """(identity, version) of each parameter's gradient; None without one."""
    return {id(each): None if each.grad is None else (id(each.grad), each.grad._version) for each in parameters}


DISTRIBUTED_WARM_UP: Final = 11
"""Calls that DistributedDataParallel needs before its reducer does the same in each."""
_ASYNC_ERRORS: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_SYNC: Final = "called a synchronizing CUDA operation"

Call = Callable[[], Any]


class Recorder(Protocol):
    """Captures and replays graphs: `CudaRecorder`, or in tests one that needs no device."""

    @property
    def device(self) -> torch.device: ...
    def run_aside(self, call: Call) -> Any: ...
    def waits_of(self, call: Call) -> tuple[Any, list[str]]: ...
    def record(self, call: Call) -> tuple[Any, Callable[[], None]]: ...


class CudaRecorder:
    """Captures CUDA graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def run_aside(self, call: Call) -> Any:
        """Run the call on the stream used for the capture."""
        with torch.cuda.device(self.device):
            around = torch.cuda.current_stream()
            self._stream.wait_stream(around)
            with torch.cuda.stream(self._stream):
                result = call()
            around.wait_stream(self._stream)
        return result

    def waits_of(self, call: Call) -> tuple[Any, list[str]]:
        """Run the call on that stream, and list where it waited for the device, by torch's warnings."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self.run_aside(call)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for each in caught:
            if _SYNC not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        places = [f"{each.filename}:{each.lineno}" for each in caught if _SYNC in str(each.message)]
        return result, list(dict.fromkeys(places))

    def record(self, call: Call) -> tuple[Any, Callable[[], None]]:
        """Capture the call without running it; return its result and the replay function.

        Every replay overwrites the result. Other threads, such as one that pins memory, may keep working.
        """
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index]
        numbers = generator.clone_state() if hasattr(generator, "clone_state") else None
        with ExitStack() as finally_, ExitStack() as if_it_fails:
            if gc.isenabled():
                finally_.callback(gc.enable)
            gc.collect()
            gc.disable()  # memory freed while a stream is captured may invalidate the capture
            if numbers is not None:  # a failed capture leaves it waiting for the end of the capture
                if_it_fails.callback(generator.graphsafe_set_state, numbers)
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream()),  # a failed capture leaves its own stream current
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = call()
            if_it_fails.pop_all()
        return result, graph.replay


@dataclass
class _Recorded:
    """One graph.

    Attributes:
        before, after: the parameters' gradients at the beginning and the end of the capture.
    """

    arguments: StaticArguments
    results: Flat
    launch: Callable[[], None]
    before: list[Tensor | None]
    after: list[Tensor | None]


@dataclass
class _Warming:
    arguments: StaticArguments
    calls: int = 0


@dataclass
class GraphedSteps:
    """A function whose calls become replays of graphs.

    Args:
        recorder: makes the graphs.
        warm_up: calls with each kind of arguments before its capture, besides the very first, which shows what runs.
        most_graphs: the most graphs to make; further kinds of arguments run eagerly.
        copy_results: whether results are copies; otherwise the next call overwrites them.

    Attributes:
        refused: why nothing more is captured; None while capturing is possible.
        captures: the arguments of each graph, as text.
    """

    function: Callable[..., Any]
    recorder: Recorder
    warm_up: int = 3
    most_graphs: int = 8
    copy_results: bool = True
    refused: str | None = None
    captures: list[str] = field(default_factory=list)
    optimizers: GraphedOptimizers = field(default_factory=GraphedOptimizers)
    _graphs: dict[Hashable, _Recorded] = field(default_factory=dict)
    _warming: dict[Hashable, _Warming] = field(default_factory=dict)
    _modules: list[torch.nn.Module] = field(default_factory=list)
    _parameters: list[Tensor] = field(default_factory=list)
    _slots: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)
    _seen: bool = False
    _has_warned: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, by a replay if there is a graph for these arguments."""
        if self.refused is not None:
            return self.function(*args, **kwargs)
        try:
            given = flat((args, kwargs))
            if not self._seen:
                return self._first(given, lambda: self.function(*args, **kwargs))
            self._forget_if_moved()
            key = self._key(given)
            recorded = self._graphs.get(key)
            if recorded is not None:
                return self._launched(recorded, given)
            if len(self._graphs) >= self.most_graphs:
                self._tell_of_limit(given)
                return self.function(*args, **kwargs)
            warming = self._warming.get(key)
            if warming is None:
                warming = self._warming[key] = _Warming(StaticArguments(given, self.recorder.device))
        except NotStatic as why:
            return self._refuse(str(why), lambda: self.function(*args, **kwargs))
        warming.arguments.fill(given.tensors)
        if warming.calls < self.warm_up:
            return self._warmed(warming, given)
        del self._warming[key]
        return self._recorded(key, warming.arguments, given, lambda: self.function(*args, **kwargs))

    def forget(self) -> None:
        """Free all graphs and their memory; the next calls warm up again."""
        self._graphs.clear()
        self._warming.clear()
        self.captures.clear()

    def _key(self, given: Flat) -> Hashable:
        """Equal for two calls that can use the same graph."""
        return (
            given.signature,
            self.optimizers.key,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast_type(self.recorder.device.type),
            tuple(each.training for each in self._modules),
            any(each.grad is not None for each in self._parameters),
        )

    def _forget_if_moved(self) -> None:
        """Graphs hold addresses: they are useless once parameters or optimizer states have moved."""
        replaced = self.optimizers.refresh()
        if replaced or self._places_now() != self._places:
            self._collect()
            self.forget()

    def _collect(self) -> None:
        """Collect what graphs access besides their arguments: parameters, and places in modules that hold tensors."""
        inner = [each for module in self._modules for each in module.modules()]
        held: list[Any] = [table for each in inner for table in (each._parameters, each._buffers)]
        self._slots = [(table, name) for table in held for name in table]
        self._parameters = Watched(self._modules, list(self.optimizers)).parameters
        self._places = self._places_now()

    def _places_now(self) -> list[int]:
        tensors = [table.get(name) for table, name in self._slots]
        return [0 if each is None else each.data_ptr() for each in (*tensors, *self._parameters)]

    def _first(self, given: Flat, plain: Call) -> Any:
        """Run the first call eagerly, to see what it runs and on which devices."""
        self._seen = True
        result, seen = watched(plain)
        self._learn(seen)
        types = {each.device.type for each in (*given.tensors, *self._parameters)}
        if types and self.recorder.device.type not in types:
            return self._refuse(
                f"nothing that it gets or runs is on a {self.recorder.device.type} device", lambda: result
            )
        return self._checked(seen, result, [])

    def _checked(self, seen: Watched, result: Any, waits: list[str]) -> Any:
        """Return the result of a watched call, and note whether it can be captured later."""
        try:
            results = flat(result, "the result")
        except NotStatic as why:
            return self._refuse(str(why), lambda: result)
        why_not = self._why_not(seen, results, waits)
        return self._refuse(why_not, lambda: result) if why_not is not None else self._results_for_caller(results)

    def _warmed(self, warming: _Warming, given: Flat) -> Any:
        """Run a real call on the stream used for the capture."""
        warming.calls += 1
        versions, settings = [each._version for each in warming.arguments.buffers], self.optimizers.settings
        waits: list[str] = []

        def call() -> Any:
            return _uncached(lambda: warming.arguments.call(self.function))

        if warming.calls == self.warm_up:
            (result, seen), waits = self.recorder.waits_of(lambda: watched(call))
        else:
            result, seen = self.recorder.run_aside(lambda: watched(call))
        if self.optimizers.settings != settings:
            return self._refuse(
                "it changes its optimizer's settings, as a schedule of learning rates does: do that outside of it",
                lambda: result,
            )
        self._learn(seen)
        for buffer, version, tensor in zip(warming.arguments.buffers, versions, given.tensors, strict=True):
            if buffer._version != version:
                tensor.copy_(buffer)
                return self._refuse("it changes a tensor among its arguments in place", lambda: result)
        return self._checked(seen, result, waits)

    def _learn(self, seen: Watched) -> None:
        """Prepare newly seen modules and optimizers for graphs; graphs captured without them are dropped."""
        known = {id(each) for each in (*self._modules, *self.optimizers)}
        modules = [each for each in seen.modules if id(each) not in known]
        optimizers = [each for each in seen.optimizers if id(each) not in known]
        if not (modules or optimizers):
            return
        self._modules += modules
        self.optimizers.add(optimizers)
        self._collect()
        self.forget()
        if any(isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in self._modules):
            self.warm_up = max(self.warm_up, DISTRIBUTED_WARM_UP)

    def _why_not(self, seen: Watched, results: Flat, waits: list[str]) -> str | None:
        """Why the call that was just watched cannot be captured."""
        if waits:
            more = f" and {len(waits) - 1} more places" if len(waits) > 1 else ""
            return f"it waits for the device at {waits[0]}{more}: read values outside of it"
        why_not = why_not_whole(seen, results.tensors)
        if why_not is not None:
            return why_not
        wrong = {each.device.type for each in self._parameters} - {self.recorder.device.type}
        if wrong:
            return f"parameters of what it runs are on {wrong.pop()}, not on {self.recorder.device}"
        distributed = any(isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in self._modules)
        if distributed and not any(os.environ.get(name) == "0" for name in _ASYNC_ERRORS):
            return (
                "DistributedDataParallel can be recorded only with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 in the "
                "environment, set before init_process_group"
            )
        return None

    def _recorded(self, key: Hashable, arguments: StaticArguments, given: Flat, plain: Call) -> Any:
        """Capture the graph and replay it for this call."""
        before = [each.grad for each in self._parameters]
        try:
            result, launch = self.recorder.record(lambda: _uncached(lambda: arguments.call(self.function)))
            results = flat(result, "the result")
        except Exception as error:  # whatever the driver or torch raises, the step runs eagerly
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            said = str(error.__context__ or error) or type(error).__name__
            return self._refuse(f"recording failed: {said.splitlines()[0]}", plain)
        after = [each.grad for each in self._parameters]
        recorded = self._graphs[key] = _Recorded(arguments, results, launch, before, after)
        self.captures.append(in_words(given))
        return self._launched(recorded, None)

    def _launched(self, recorded: _Recorded, given: Flat | None) -> Any:
        """Copy the batch in, replay, and leave gradients where the graph writes them."""
        if given is not None:
            recorded.arguments.fill(given.tensors)
        for parameter, before, after in zip(self._parameters, recorded.before, recorded.after, strict=True):
            if before is not None and before is after and parameter.grad is not before:  # the graph adds to it in place
                if parameter.grad is None:
                    before.zero_()
                else:
                    before.copy_(parameter.grad)
        recorded.launch()
        for parameter, after in zip(self._parameters, recorded.after, strict=True):
            if parameter.grad is not after:
                parameter.grad = after
        return self._results_for_caller(recorded.results)

    def _results_for_caller(self, results: Flat) -> Any:
        """The results for the caller, independent of the graph that made them."""
        if not self.copy_results:
            return results.rebuilt([each.detach() for each in results.tensors])
        return results.rebuilt([each.detach().clone() for each in results.tensors])

    def _refuse(self, why: str, result: Call) -> Any:
        self.refused = why
        self.forget()
        warnings.warn(f"capture_step runs the step as it is: {why}", RuntimeWarning, stacklevel=4)
        return result()

    def _tell_of_limit(self, given: Flat) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"capture_step has recorded {self.most_graphs} graphs; other arguments run as they are, such as "
                f"{in_words(given)}: pad to fewer shapes or raise most_graphs",
                RuntimeWarning,
                stacklevel=4,
            )


def in_words(given: Flat) -> str:
    """The tensors of a call, such as "float32 [8, 128], int64 [8]"."""
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in given.tensors) or "none"


def _uncached(call: Call) -> Any:
    """Run without autocast's cache: a graph would keep its outdated copies of weights forever."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        return call()
    finally:
        torch.set_autocast_cache_enabled(cached)
