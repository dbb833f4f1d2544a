"""`stepscope.step` and `stepscope.annotate`: names in the trace of whichever profiler runs.

An annotation costs a fraction of a microsecond while no profiler runs. Nothing is imported for it: a profiler is told
only where the program has imported its package.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from stepscope.capture import guard

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Context = AbstractContextManager[Any]

STEP_NAME: Final = "stepscope.step#{} {}"
"""What a step's annotation is called; `readers.names.step_number` knows it."""

_UNDER_NSIGHT: Final = any(name in os.environ for name in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"))
_WITH_SCOPES: Final = any(os.environ.get(name, "0") != "0" for name in ("XLA_IR_DEBUG", "XLA_HLO_DEBUG"))
"""PyTorch/XLA puts annotations into the names of its operations. A program may not synchronise inside one then, so only
where that was asked for."""
_BY_DAEMON: Final = "KINETO_USE_DAEMON" in os.environ
"""Kineto's daemon starts profiles behind torch's back."""


_IN_RUN: Final = "STEPSCOPE_RUN" in os.environ
"""Whether `stepscope run` or `stepscope bench` started the program."""
_modules: Final = sys.modules


class _Opened(threading.local):
    """The annotations that are open on a thread, the innermost last, each with what was opened for it."""

    def __init__(self) -> None:
        self.stack: list[tuple[annotate, list[_Context]]] = []


_opened = _Opened()


class annotate:
    """Name what happens in a block or in a function, in the trace of whichever profiler runs:

        with stepscope.annotate("forward"):
            output = model(batch)

        @stepscope.annotate("evaluate")
        def evaluate(): ...

    May be entered again while it is open, and on several threads.

    Args:
        name: what the profiler shows.
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
        """Decorate a function, also one that is awaited."""
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
    """Mark a step, in the trace of whichever profiler runs, and let captures on demand begin and end after it:

        for number, batch in enumerate(loader):
            with stepscope.step(number=number):
                train(batch)

    Args:
        name: what kind of step, such as "train" or "evaluate".
        number: the step's number; None counts the steps of each name from 0.
    """

    __slots__ = ("number",)

    def __init__(self, name: str = "train", number: int | None = None) -> None:
        super().__init__(name)
        self.number = number

    def __enter__(self) -> step:
        number = _next_number(self.name) if self.number is None else self.number
        if _may_be_seen():
            _open(self, self.name, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _opened.stack:
            _close(self)
        tell_controller()


_numbers: dict[str, int] = {}
_numbers_lock = threading.Lock()


def _next_number(name: str) -> int:
    with _numbers_lock:
        number = _numbers.get(name, 0)
        _numbers[name] = number + 1
        return number


@guard.entry
def tell_controller() -> None:
    """Say that a step has ended, so that captures on demand begin and end between steps."""
    module = sys.modules.get("stepscope.capture.controller")
    if module is None and _IN_RUN:
        import_module("stepscope.capture.bootstrap").steps_are_marked()
        module = sys.modules.get("stepscope.capture.controller")
    found = module.controller() if module is not None else None
    if found is not None:
        found.step_boundary()


def _may_be_seen() -> bool:
    """Whether a profiler may be looking; False in a fraction of a microsecond."""
    torch_profiler = _modules.get("torch.autograd.profiler")
    if getattr(torch_profiler, "_is_profiler_enabled", False):
        return True
    return _UNDER_NSIGHT or _BY_DAEMON or "jax" in _modules or "torch_xla" in _modules


@guard.entry
def _open(annotation: annotate, name: str, number: int | None) -> None:
    _opened.stack.append((annotation, _contexts(name, number)))


def _contexts(name: str, number: int | None) -> list[_Context]:
    """An open context for each profiler that may be looking; one that fails is left out."""
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
    else:
        event = import_module("stepscope.capture.xla_profilers").torch_xla_event
        context = event(name) if number is None else event(name, _r=1, step_num=number)
    return context


def _of_jax(name: str, number: int | None) -> _Context | None:
    module: Any = sys.modules.get("jax")
    if module is None:
        return None
    profiler = module.profiler
    context: _Context = (
        profiler.TraceAnnotation(name) if number is None else profiler.StepTraceAnnotation(name, step_num=number)
    )
    return context


def _of_nvtx(name: str, number: int | None) -> _Context | None:
    if not _UNDER_NSIGHT:
        return None
    nvtx: Any = sys.modules.get("nvtx")
    if nvtx is not None:
        context: _Context = nvtx.annotate(_full_name(name, number))
        return context
    torch: Any = sys.modules.get("torch")
    return None if torch is None else _TorchRange(torch.cuda.nvtx, _full_name(name, number))


class _TorchRange:
    """A range of NVTX by PyTorch's binding."""

    __slots__ = ("_name", "_nvtx")

    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx = nvtx
        self._name = name

    def __enter__(self) -> None:
        self._nvtx.range_push(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._nvtx.range_pop()
