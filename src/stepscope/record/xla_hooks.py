"""Seeing where the steps of a program of XLA end, without a change in the program: what `hooks` is for torch.

What marks a step, the best that is seen counts:

1. the end of a jax.profiler.StepTraceAnnotation, or of a torch_xla.debug.profiler.StepTrace
2. the beginning of a call of a function that `jax.jit` or `jax.pmap` made; of several, of the one that marks the
   outermost repetition. Functions that were made while this looks are wrapped, and stay so; a call through the wrapper
   costs a fraction of a microsecond when nobody looks any more.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from stepscope import guard
from stepscope.record.controller import StepController, StepSource
from stepscope.record.hooks import Marker
from stepscope.record.step_times import mark

_MAKERS: Final = ("jit", "pmap")


class XlaHooks:
    """The hooks of one process in JAX or PyTorch/XLA; the steps they see go to its controller.

    Args:
        controller: is told of steps.
        of_torch: in PyTorch/XLA, whose profiler module is imported; otherwise in jax, which is.
    """

    def __init__(self, controller: StepController, *, of_torch: bool = False) -> None:
        self._controller = controller
        self._of_torch = of_torch
        self._removals: dict[StepSource, Callable[[], None]] = {}

    def install(self) -> None:
        """Look out for steps, and for profiles of the program's own."""
        self._controller.keeps_watch = True
        self._controller.others.watch()
        if self._of_torch:
            annotation: Any = sys.modules["torch_xla.debug.profiler"].StepTrace
        else:
            annotation = sys.modules["jax"].profiler.StepTraceAnnotation
            self._removals[StepSource.JITTED] = _jitted_calls(self._seen)
        self._removals[StepSource.ANNOTATION] = _step_annotations(annotation, self._seen)

    def keep(self, source: StepSource) -> None:
        """Keep only the hooks of this source and of better ones.

        Calls are looked out for until it is known whether steps that a DataLoader shows are done in JAX.
        """
        for lower in [each for each in self._removals if each < source]:
            if lower is not StepSource.JITTED or source >= StepSource.OPTIMIZER or self._controller.uses_jax:
                self._removals.pop(lower)()

    def remove(self) -> None:
        """Leave jax as it was."""
        self.keep(StepSource.EXPLICIT)
        self._controller.keeps_watch = False
        self._controller.others.unwatch()

    @guard.entry
    def _seen(self, source: StepSource) -> None:
        mark("first_step")
        self._controller.uses_jax |= not self._of_torch
        if source < self._controller.source:
            self.keep(self._controller.source)
        elif source in self._removals:
            self._controller.step_boundary(source)


def _step_annotations(annotation: Any, seen: Callable[[StepSource], None]) -> Callable[[], None]:
    own, original = "__exit__" in vars(annotation), annotation.__exit__

    left = guard.around(original, after=lambda *_: seen(StepSource.ANNOTATION))
    annotation.__exit__ = left

    def remove() -> None:
        if vars(annotation).get("__exit__") is left:
            if own:
                annotation.__exit__ = original
            else:
                del annotation.__exit__

    return remove


class _Calls:
    """Which calls of jitted functions mark steps: none that another one makes."""

    def __init__(self, seen: Callable[[StepSource], None]) -> None:
        self.seen: Callable[[StepSource], None] | None = seen
        self._marker = Marker()
        self._inside = threading.local()
        self._begun: set[int] = set()

    def call(self, key: int, function: Any, positional: Any, named: Any) -> Any:
        if getattr(self._inside, "yes", False):  # while the outer one is traced
            return function(*positional, **named)
        self._begins(key)
        self._inside.yes = True
        try:
            return function(*positional, **named)
        except BaseException as error:
            guard.hide(error)
            raise
        finally:
            self._inside.yes = False

    @guard.entry
    def _begins(self, key: int) -> None:
        if self._marker.hit(key) and self.seen is not None:
            if key in self._begun:  # a function's first call begins a step, and ends none
                self.seen(StepSource.JITTED)
            self._begun.add(key)


class _Jitted:
    """A function made by jax.jit whose calls are seen; everything else is the function's own."""

    def __init__(self, function: Any, calls: _Calls) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = getattr(function, "__wrapped__", function)
        self._stepscope = (function, calls, _key(function))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._stepscope[0])

    def __call__(self, *positional: Any, **named: Any) -> Any:
        function, calls, key = self._stepscope
        if calls.seen is None:
            return function(*positional, **named)
        return calls.call(key, function, positional, named)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "_stepscope":  # of a copy that is not built yet
            raise AttributeError(name)
        return getattr(self._stepscope[0], name)

    def __reduce__(self) -> Any:
        return _same, (self._stepscope[0],)

    def __repr__(self) -> str:
        return repr(self._stepscope[0])

    def __hash__(self) -> int:
        return hash(self._stepscope[0])

    def __eq__(self, other: object) -> bool:
        return bool(self._stepscope[0] == (other._stepscope[0] if type(other) is _Jitted else other))


def _same(function: Any) -> Any:
    return function


def _key(function: Any) -> int:
    """The same for functions of the same code: a program may make one anew in every step."""
    code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    return id(code if code is not None else function)


def _jitted_calls(seen: Callable[[StepSource], None]) -> Callable[[], None]:
    jax: Any = sys.modules["jax"]
    calls = _Calls(seen)
    originals = {name: getattr(jax, name) for name in _MAKERS if hasattr(jax, name)}
    wrapped = {name: _maker(original, calls) for name, original in originals.items()}
    for name, maker in wrapped.items():
        setattr(jax, name, maker)

    def remove() -> None:
        calls.seen = None
        for name, maker in wrapped.items():
            if getattr(jax, name) is maker:
                setattr(jax, name, originals[name])

    return remove


def _maker(original: Any, calls: _Calls) -> Any:
    """jax.jit, whose functions are seen; also where it is called first with options and then with the function."""

    @functools.wraps(original)
    def make(*positional: Any, **named: Any) -> Any:
        made = original(*positional, **named)
        if positional or "fun" in named:
            return _seen_or_itself(made, calls)
        return lambda function: _seen_or_itself(made(function), calls)

    return make


def _seen_or_itself(function: Any, calls: _Calls) -> Any:
    found = _jitted(function, calls)
    return function if found is None else found


@guard.entry
def _jitted(function: Any, calls: _Calls) -> Any:
    return _Jitted(function, calls)
