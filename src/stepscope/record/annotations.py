"""`stepscope.step` and `stepscope.annotate`: named ranges in the trace of any running profiler.

An annotation costs a fraction of a microsecond while no profiler runs. It imports nothing: a profiler receives it
only if the program has imported its package.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from stepscope import guard

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Context = AbstractContextManager[Any]

STEP_NAME: Final = "stepscope.step#{} {}"
"""Name of a step's annotation; parsed by `trace.naming.step_number`."""

_UNDER_NSIGHT: Final = any(name in os.environ for name in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"))
_WITH_SCOPES: Final = any(os.environ.get(name, "0") != "0" for name in ("XLA_IR_DEBUG", "XLA_HLO_DEBUG"))
"""PyTorch/XLA adds annotations to the names of its operations. Synchronising inside one is then not allowed, so this
is opt-in.
"""
_BY_DAEMON: Final = "KINETO_USE_DAEMON" in os.environ
"""Kineto's daemon starts profiles behind torch's back."""


_IN_RUN: Final = "STEPSCOPE_RUN" in os.environ
"""Whether `stepscope run` or `stepscope bench` started the program."""
_modules: Final = sys.modules


class _Opened(threading.local):
    """The open annotations of a thread, the innermost last, each with the contexts opened for it."""

    def __init__(self) -> None:
        self.stack: list[tuple[annotate, list[_Context]]] = []


_opened = _Opened()


class annotate:
    """Name a block or a function in the trace of any running profiler:

        with stepscope.annotate("forward"):
            output = model(batch)

        @stepscope.annotate("evaluate")
        def evaluate(): ...

    It may be nested in itself and used on several threads.

    Args:
        name: the name in the trace.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> annotate:
        if _may_be_seen():
            _open(self, self.name, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _opened.stack:
            _close(self)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        from inspect import iscoroutinefunction

        if iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*arguments: _P.args, **named: _P.kwargs) -> Any:
                with self:
                    return await function(*arguments, **named)

            return awaited  # type: ignore[return-value]

        @wraps(function)
        def annotated(*arguments: _P.args, **named: _P.kwargs) -> _R:
            with self:
                return function(*arguments, **named)

        return annotated


class step(annotate):
    """Mark a step in the trace of any running profiler, and let on-demand captures begin and end after it:

        for number, batch in enumerate(loader):
            with stepscope.step(number=number):
                train(batch)

    Args:
        name: kind of step, such as "train" or "evaluate".
        number: the step's number; None counts the steps of each name from 0.
    """

    __slots__ = ("number",)

    def __init__(self, name: str = "train", number: int | None = None) -> None:
        super().__init__(name)
        self.number = number

    def __enter__(self) -> step:
        number = next(_numbers.setdefault(self.name, itertools.count())) if self.number is None else self.number
        if _may_be_seen():
            _open(self, self.name, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _opened.stack:
            _close(self)
        tell_controller()


_numbers: dict[str, Iterator[int]] = {}


@guard.entry
def tell_controller() -> None:
    """Report the end of a step, so that on-demand captures begin and end between steps."""
    module = sys.modules.get("stepscope.record.controller")
    if module is None and _IN_RUN:
        import_module("stepscope.record.bootstrap").steps_are_marked()
        module = sys.modules.get("stepscope.record.controller")
    found = module.controller() if module is not None else None
    if found is not None:
        found.step_boundary()


def _may_be_seen() -> bool:
    """Whether a profiler may be running; the answer False takes a fraction of a microsecond."""
    torch_profiler = _modules.get("torch.autograd.profiler")
    if getattr(torch_profiler, "_is_profiler_enabled", False):
        return True
    return _UNDER_NSIGHT or _BY_DAEMON or "jax" in _modules or "torch_xla" in _modules


@guard.entry
def _open(annotation: annotate, name: str, number: int | None) -> None:
    _opened.stack.append((annotation, _contexts(name, number)))


def _contexts(name: str, number: int | None) -> list[_Context]:
    """Open a context for each profiler that may be running; one that fails is skipped."""
    contexts: list[_Context] = []
    for make in (_of_torch, _of_xla, _of_jax, _of_nvtx):
        with guard.attempt():
            context = make(name, number)
            if context is not None:
                context.__enter__()
                contexts.append(context)
    return contexts


@guard.entry
def _close(annotation: annotate) -> None:
    stack = _opened.stack
    for index in range(len(stack) - 1, -1, -1):
        if stack[index][0] is annotation:
            _, contexts = stack.pop(index)
            for context in reversed(contexts):
                with guard.attempt():
                    context.__exit__(None, None, None)
            return


def _full_name(name: str, number: int | None) -> str:
    return name if number is None else STEP_NAME.format(number, name)


def _of_torch(name: str, number: int | None) -> _Context | None:
    module: Any = sys.modules.get("torch.autograd.profiler")
    if module is None or not (module._is_profiler_enabled or _BY_DAEMON):
        return None
    context: _Context = module.record_function(_full_name(name, number))
    return context


def _of_xla(name: str, number: int | None) -> _Context | None:
    if "torch_xla" not in sys.modules:
        return None
    if number is None and _WITH_SCOPES:
        context: _Context = import_module("torch_xla.debug.profiler").Trace(name)
        return context
    event: Callable[..., _Context] = import_module("stepscope.record.xla").torch_xla_event
    return event(name) if number is None else event(name, _r=1, step_num=number)


def _of_jax(name: str, number: int | None) -> _Context | None:
    module: Any = sys.modules.get("jax")
    if module is None:
        return None
    if number is None:
        context: _Context = module.profiler.TraceAnnotation(name)
    else:
        context = module.profiler.StepTraceAnnotation(name, step_num=number)
    return context


def _of_nvtx(name: str, number: int | None) -> _Context | None:
    if not _UNDER_NSIGHT:
        return None
    nvtx: Any = sys.modules.get("nvtx")
    if nvtx is not None:
        context: _Context = nvtx.annotate(_full_name(name, number))
        return context
    torch: Any = sys.modules.get("torch")
    return None if torch is None else _torch_range(torch.cuda.nvtx, _full_name(name, number))


@contextlib.contextmanager
def _torch_range(nvtx: Any, name: str) -> Iterator[None]:
    nvtx.range_push(name)
    yield
    nvtx.range_pop()


PREFIX: Final = "stepscope.logging#"
LOADER_START: Final = "DataLoader.__iter__"

_METHODS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("logging", "Logger", "handle", PREFIX + "logging"),
    *(("tqdm.std", "tqdm", each, PREFIX + "tqdm") for each in ("refresh", "set_postfix", "set_description")),
    ("rich.console", "Console", "print", PREFIX + "rich"),
    ("rich.live", "Live", "refresh", PREFIX + "rich"),
    ("rich.progress", "Progress", "update", PREFIX + "rich"),
    *(
        ("torch.utils.tensorboard.writer", "SummaryWriter", each, PREFIX + "tensorboard")
        for each in ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "flush")
    ),
    ("wandb.sdk.wandb_run", "Run", "log", PREFIX + "wandb"),
    ("mlflow.tracking.client", "MlflowClient", "log_metric", PREFIX + "mlflow"),
    ("mlflow.tracking.client", "MlflowClient", "log_batch", PREFIX + "mlflow"),
    ("torchmetrics.metric", "Metric", "forward", PREFIX + "torchmetrics"),
    ("torch.utils.data.dataloader", "DataLoader", "__iter__", LOADER_START),
)
"""Module, class, method, and name in the trace; only imported modules are patched."""


class NamedCalls:
    """Names calls of some functions in the trace, from `start` to `stop`; neither raises.

    Functions that cannot be wrapped are left alone.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        with guard.attempt():
            self._name_calls(recorded_mark())

    def stop(self) -> None:
        with guard.attempt():
            self._undo.close()

    def _name_calls(self, mark: Callable[[str], Any]) -> None:
        raise NotImplementedError


class LoggingCalls(NamedCalls):
    """Names calls that print, log or draw, and the beginnings of iterations over DataLoaders."""

    def _name_calls(self, mark: Callable[[str], Any]) -> None:
        for module, kind, method, name in _METHODS:
            self._name(getattr(sys.modules.get(module), kind, None), method, name, mark)
        self._name(os, "fsync", PREFIX + "file", mark)
        if not _has_compiled():  # wrapping print would make torch.compile recompile code that calls it
            self._name(builtins, "print", PREFIX + "print", mark)

    def _name(self, owner: Any, attribute: str, name: str, mark: Callable[[str], Any]) -> None:
        original = vars(owner).get(attribute) if owner is not None else None
        if callable(original):
            self._undo.callback(guard.put(owner, attribute, marked(original, mark, name)))


def marked(original: Any, mark: Callable[[str], Any], name: str, after: Callable[..., None] | None = None) -> Any:
    """Wrap a function so that each call is a named range; `after`, a guard entry, receives the call's arguments."""

    def ended(context: Any, result: Any, *positional: Any, **named: Any) -> None:
        _mark_ends(context)
        if after is not None:
            after(*positional, **named)

    return guard.around(original, functools.partial(_mark_begins, mark, name), ended, also_after_errors=True)


@guard.entry
def _mark_begins(mark: Callable[[str], Any], name: str, /, *_: Any, **__: Any) -> Any:
    context = mark(name)
    context.__enter__()
    return context


@guard.entry
def _mark_ends(context: Any) -> None:
    if context is not None:
        context.__exit__(None, None, None)


def recorded_mark() -> Callable[[str], Any]:
    """Return the function that opens a named range; torch's fast implementation if there is one."""
    import torch

    fast: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    made: Callable[[str], Any] = fast or torch.autograd.profiler.record_function
    return made


def _has_compiled() -> bool:
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    return bool(utilities is not None and utilities.counters.get("frames"))


CHECKPOINT_PREFIX: Final = "stepscope.checkpoint#"

_FUNCTIONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("torch", "save", "torch.save"),
    ("torch.serialization", "save", "torch.save"),
    ("torch", "load", "torch.load"),
    ("torch.serialization", "load", "torch.load"),
    # called by its save_file, however that was imported
    ("safetensors.torch", "serialize_file", "safetensors.save_file"),
    ("torch.distributed.checkpoint", "save", "torch.distributed.checkpoint.save"),
    ("torch.distributed.checkpoint", "load", "torch.distributed.checkpoint.load"),
    ("torch.distributed.checkpoint", "async_save", "torch.distributed.checkpoint.async_save"),
)
"""Module, function, and name in the trace; only imported modules are patched."""


class CheckpointCalls(NamedCalls):
    """Names calls that save and load checkpoints.

    Attributes:
        saved_bytes: total size of the saved files whose names were given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved_bytes = 0

    def _name_calls(self, mark: Callable[[str], Any]) -> None:
        for module, function, name in _FUNCTIONS:
            owner = sys.modules.get(module)
            original = getattr(owner, function, None)
            if callable(original):
                after = self._saved if name.endswith("save") else None
                named = marked(original, mark, CHECKPOINT_PREFIX + name, after)
                self._undo.callback(guard.put(owner, function, named))

    @guard.entry
    def _saved(self, *positional: Any, **_: Any) -> None:
        if len(positional) > 1:
            with contextlib.suppress(OSError, TypeError, ValueError):
                self.saved_bytes += os.stat(positional[1]).st_size
