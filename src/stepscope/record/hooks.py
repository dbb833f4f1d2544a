"""Detect the steps of a program without changing it.

Of several step sources, the best one seen counts. In PyTorch:

1. the end of an optimizer's step; with several optimizers, of the one that marks the outermost repetition
2. the beginning of an iteration over a DataLoader
3. the beginning of a forward call of the outermost module; if a function around these calls is called again and
   again, such as for each request, the first of them in each of its calls

Forward calls are not detected by hooks of torch.nn, whose removal would make torch.compile recompile: a thread
samples what is being called and wraps the class of the module that it finds. Nothing stays in torch when the hooks
are removed. In XLA programs:

1. the end of a jax.profiler.StepTraceAnnotation, or of a torch_xla.debug.profiler.StepTrace
2. the beginning of a call of a function made by `jax.jit` or `jax.pmap`; of several, of the one that marks the
   outermost repetition. Functions made while the hooks are installed stay wrapped; afterwards a call through the
   wrapper costs a fraction of a microsecond.
"""

from __future__ import annotations

import _thread
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from stepscope import guard
from stepscope.record.batch_samples import model_calls
from stepscope.record.controller import StepController, StepSource, controller, set_controller
from stepscope.record.counters import mark
from stepscope.record.lines import compiles, compiling, while_nothing_compiles
from stepscope.record.program_objects import attributes, parameters_of
from stepscope.record.repetition import Repetition

_TAKES_OVER_AFTER: Final = 16
"""After this many repetitions of another object without one of the marker, the marker counts as gone."""
_RAREST: Final = 32
"""An object that repeats less often than the marker by more than this factor does not mark steps."""
_LOOK_S: Final = ((2.0, 0.01), (30.0, 0.05), (float("inf"), 0.25))
"""Interval between samples of forward calls, by the seconds since torch was imported."""
_FORWARD_PATIENCE_S: Final = 3.0
_MOST_MISSED: Final = 3
_CATCH_AFTER_S: Final = 1.0
"""Time without a sampled call after which the next call of any module is caught; it doubles each time."""
_CATCH_S: Final = 0.2
_OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Marker:
    """Chooses which of several repeating events marks the steps: the first, or a rarer one around it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._marker: int | None = None

    def hit(self, key: int) -> bool:
        """Whether this repetition of event `key` is the end of a step."""
        self._counts[key] = count = self._counts.get(key, 0) + 1
        if self._marker is None:
            self._marker = key
        if key != self._marker:
            self._since[key] = since = self._since.get(key, 0) + 1
            most = self._counts[self._marker]
            if since < _TAKES_OVER_AFTER and not (2 <= count < most <= count * _RAREST):
                return False
            self._marker = key
        self._since.clear()
        return True


class _Hooks:
    def __init__(self, controller: StepController) -> None:
        self._controller = controller
        self._removals: dict[StepSource, Callable[[], None]] = {}

    def install(self) -> None:
        """Watch for steps and for the program's own profilers; the framework must be imported."""
        self._controller.keeps_watch = True
        self._controller.others.watch()

    def keep(self, source: StepSource) -> None:
        """Keep only the hooks of this source and of better ones."""
        for lower in [each for each in self._removals if each < source and self._is_decided(each, source)]:
            self._removals.pop(lower)()

    def _is_decided(self, lower: StepSource, source: StepSource) -> bool:
        return True

    def remove(self) -> None:
        self.keep(StepSource.EXPLICIT)
        self._controller.keeps_watch = False
        self._controller.others.unwatch()


class StepHooks(_Hooks):
    """Hooks in torch.

    Args:
        watch_input: measure the stages of DataLoaders too, which costs some microseconds a batch.
    """

    def __init__(self, controller: StepController, *, watch_input: bool = True) -> None:
        super().__init__(controller)
        self._watches_input = watch_input
        self._checked = False

    def install(self) -> None:
        self._controller.on_source = self.keep
        super().install()
        if self._watches_input:
            _watch_input(self, True)
        self._removals = {
            StepSource.CALL: _ForwardCalls(self._seen, self._controller).remove,
            StepSource.LOADER: _loader_hook(self._seen),
            StepSource.OPTIMIZER: _optimizer_hook(self._seen),
        }

    def remove(self) -> None:
        super().remove()
        if self._watches_input:
            _watch_input(self, False)

    @guard.entry
    def _seen(self, source: StepSource) -> None:
        if not self._checked:
            self._checked = True
            mark("first_step")
            if _is_loader_worker():
                self.remove()
                return
        if max(source, StepSource.CALL) in self._removals:
            self._controller.step_boundary(source)


class AllHooks:
    """The hooks of a process in every framework imported so far."""

    def __init__(self, controller: StepController) -> None:
        self._controller = controller
        self._hooks: list[StepHooks | XlaHooks] = []
        self._kept = StepSource.NONE

    def install_in(self, module: str) -> None:
        """Install hooks in torch, jax or torch_xla.debug.profiler, which has just been imported."""
        hooks: StepHooks | XlaHooks
        if module == "torch":
            hooks = StepHooks(self._controller)
        else:
            hooks = XlaHooks(self._controller, of_torch=module != "jax")
        hooks.install()
        self._hooks.append(hooks)
        self._controller.on_source = self.keep
        hooks.keep(self._kept)

    def keep(self, source: StepSource) -> None:
        self._kept = source
        for hooks in self._hooks:
            hooks.keep(source)

    def remove(self) -> None:
        self._kept = StepSource.EXPLICIT
        for hooks in self._hooks:
            hooks.remove()


def watch_steps() -> StepController:
    """Return this process's controller, creating it with its hooks if needed; torch or jax must be imported."""
    return controller() or begin_watch()[0]


def begin_watch() -> tuple[StepController, Callable[[], None]]:
    """Create this process's controller with its hooks, and a function that removes both again."""
    new = StepController()
    hooks = AllHooks(new)
    for module in ("torch", "jax", "torch_xla.debug.profiler"):
        if module in sys.modules:
            hooks.install_in(module)
    set_controller(new)
    held = [guard.on_failure("", take_off) for take_off in (hooks.remove, new.abandon)]

    def end() -> None:
        hooks.remove()
        set_controller(None)
        for each in held:
            guard.off(each)

    return new, end


def _watch_input(user: object, watch: bool) -> None:
    """Start or stop measuring new DataLoader iterators; step detection does not depend on it."""
    with guard.attempt():
        from stepscope.record.input_stages import input_watch

        (input_watch().install if watch else input_watch().uninstall)(user)


def _is_loader_worker() -> bool:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def _optimizer_hook(seen: Callable[[StepSource], None]) -> Callable[[], None]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: _OptimizerSteps | None = _OptimizerSteps(seen)
    is_compiling = compiling()

    def stepped(optimizer: object, positional: object, named: object) -> None:
        try:
            if steps is not None and not is_compiling():
                steps.ended(optimizer)
        except RecursionError:  # the program's stack is full
            return

    handle = register_optimizer_step_post_hook(stepped)

    def remove() -> None:
        nonlocal steps
        steps = None
        hooks = getattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", ())
        # Otherwise it stays, and does nothing: a compiled optimizer would be recompiled, and torch, which may be
        # calling the hooks now, would fail at the next one.
        if not compiles() and len(hooks) == 1:
            guard.unhook(handle)

    return remove


class _OptimizerSteps:
    def __init__(self, seen: Callable[[StepSource], None]) -> None:
        self._seen = seen
        self._marker = Marker()

    @guard.entry
    def ended(self, optimizer: object) -> None:
        if self._marker.hit(_key_of(optimizer)):
            self._seen(StepSource.OPTIMIZER)


def _key_of(optimizer: object) -> int:
    """The same number for optimizers of the same parameters, since a program may make one in each step."""
    return id(next(iter(parameters_of(optimizer)), optimizer))


class _LoaderSteps:
    def __init__(self, seen: Callable[[StepSource], None]) -> None:
        self._seen = seen
        self._marker = Marker()
        self._started = False

    @guard.entry
    def begins(self, iterator: object) -> None:
        if self._marker.hit(id(attributes(iterator).get("_dataset"))):
            if self._started:  # the first one only begins a step
                self._seen(StepSource.LOADER)
            self._started = True


def _loader_hook(seen: Callable[[StepSource], None]) -> Callable[[], None]:
    from torch.utils.data import dataloader

    iterator: Any = dataloader._BaseDataLoaderIter
    following = guard.around(iterator.__next__, before=_LoaderSteps(seen).begins)
    return guard.put(iterator, "__next__", following)


class _ForwardCalls:
    """Finds the outermost module that is called repeatedly, and then detects each of its calls.

    A module that is not called any more is replaced by the next of its class that is called outside all others: a
    program may make one for each request.
    """

    def __init__(self, seen: Callable[[StepSource], None], controller: StepController) -> None:
        self._seen = seen
        self._controller = controller
        self._removed = False
        self._calls = 0
        self._missed = 0  # calls of others of its class since its own last call
        self._found: Callable[[], Any] = lambda: None
        self._restore: Callable[[], None] = lambda: None
        self._codes = frozenset(_codes_of_module_calls())
        self._catches, self._caught = False, None
        self._repetition = Repetition()
        self._next_catch_s = _CATCH_AFTER_S
        _thread.start_new_thread(self._look, ())  # hidden from the program's list of threads

    def remove(self) -> None:
        self._removed = True
        with while_nothing_compiles():
            self._restore()
        self._restore = lambda: None

    @guard.entry(in_background=True)
    def _look(self) -> None:
        started = time.monotonic()
        while not self._removed and not _is_loader_worker():
            since_s = time.monotonic() - started
            time.sleep(next(pause for until, pause in _LOOK_S if since_s < until))
            module = _module_being_called()
            if module is None:  # not `or`: a module may have a length, or raise when asked for it
                module = self._next_call(since_s)
            if module is not None and not self._removed:
                self._follow(module)
                del module
                if self._repeats():
                    return

    def _next_call(self, since_s: float) -> Any:
        """Return the next module that is called, after samples have found none for a while; None without one.

        A program that compiles would trace what replaces every module's call; one that may compile soon is left alone.
        """
        if since_s < self._next_catch_s or "torch._dynamo" in sys.modules:
            return None
        self._next_catch_s = since_s * 2
        base: Any = sys.modules["torch.nn.modules.module"].Module
        self._catches = True
        original = base.__call__
        ours = guard.around(original, before=self._called, unless=compiling())
        restore = guard.put(base, "__call__", ours)
        until = time.monotonic() + _CATCH_S
        while self._caught is None and not self._removed and time.monotonic() < until:
            time.sleep(_LOOK_S[0][1])
        with while_nothing_compiles():
            restore()
            _restore_copies(ours, original)
        caught, self._caught, self._catches = self._caught, None, False
        return caught

    def _follow(self, module: Any) -> None:
        kind: Any = type(module)
        self._found = weakref.ref(module)
        called = guard.around(kind.__call__, before=self._called, unless=compiling())
        self._restore = guard.put(kind, "__call__", called)
        if self._removed:
            self._restore()

    @guard.entry
    def _called(self, module: Any, *positional: Any, **named: Any) -> None:
        around = _frames_around(self._codes)
        if not around:
            return
        if self._catches:
            self._caught = module
            return
        is_new = self._repetition.begins(around)
        self._controller.expects_calls = self._repetition.has_candidates
        self._missed = 0 if module is self._found() else self._missed + 1
        if self._missed > _MOST_MISSED or self._found() is None:
            self._found, self._missed = weakref.ref(module), 0
        if is_new or not self._missed:
            self._calls += 1
            self._seen(StepSource.CALL if is_new else StepSource.FORWARD)
            model_calls().called(around, positional, named)

    def _repeats(self) -> bool:
        """Whether the module is called again; if not, restore its class."""
        until = time.monotonic() + _FORWARD_PATIENCE_S
        while time.monotonic() < until and not self._removed:
            if self._calls >= 2:
                return True
            time.sleep(_LOOK_S[0][1])
        self._calls = 0
        with while_nothing_compiles():
            self._restore()
        return self._removed


def _restore_copies(ours: Any, original: Any) -> None:
    """Restore what modules that were imported meanwhile took for torch's own, as torch._dynamo does."""
    for module in list(sys.modules.values()):
        names = attributes(module)
        for name in [name for name, value in list(names.items()) if value is ours]:
            names[name] = original


def _frames_around(calls: frozenset[Any]) -> list[FrameType]:
    """Return the frames around this call of a module, the outermost first; none inside another module's call."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in calls:
            return []
        if not frame.f_code.co_filename.startswith(_OWN_FOLDER):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _module_being_called() -> Any:
    """Return the outermost torch.nn.Module that any thread is calling, or None."""
    calls = _codes_of_module_calls()
    own = _thread.get_ident()
    for thread, frame in guard.current_frames().items():
        outermost: FrameType | None = None
        each: FrameType | None = frame if thread != own else None
        while each is not None:
            if each.f_code in calls:
                outermost = each
            each = each.f_back
        if outermost is not None:
            return outermost.f_locals.get("self")
    return None


def _codes_of_module_calls() -> tuple[Any, ...]:
    module: Any = sys.modules["torch.nn.modules.module"].Module
    functions = (getattr(module, name, None) for name in ("_wrapped_call_impl", "_call_impl"))
    return tuple(function.__code__ for function in functions if function is not None)


_MAKERS: Final = ("jit", "pmap")


class XlaHooks(_Hooks):
    """Hooks in JAX, or with `of_torch` in PyTorch/XLA."""

    def __init__(self, controller: StepController, *, of_torch: bool = False) -> None:
        super().__init__(controller)
        self._of_torch = of_torch

    def install(self) -> None:
        super().install()
        if self._of_torch:
            annotation: Any = sys.modules["torch_xla.debug.profiler"].StepTrace
        else:
            annotation = sys.modules["jax"].profiler.StepTraceAnnotation
            self._removals[StepSource.JITTED] = _jitted_calls(self._seen)
        left = guard.around(annotation.__exit__, after=lambda *_: self._seen(StepSource.ANNOTATION))
        self._removals[StepSource.ANNOTATION] = guard.put(annotation, "__exit__", left)

    def _is_decided(self, lower: StepSource, source: StepSource) -> bool:
        """Whether it is known that steps marked by a DataLoader run in JAX; until then, calls are watched too."""
        return lower is not StepSource.JITTED or source >= StepSource.OPTIMIZER or self._controller.uses_jax

    @guard.entry
    def _seen(self, source: StepSource) -> None:
        mark("first_step")
        self._controller.uses_jax |= not self._of_torch
        if source < self._controller.source:
            self.keep(self._controller.source)
        elif source in self._removals:
            self._controller.step_boundary(source)


class _Calls:
    """Chooses which calls of jitted functions mark steps; nested calls do not."""

    def __init__(self, seen: Callable[[StepSource], None]) -> None:
        self.seen: Callable[[StepSource], None] | None = seen
        self._marker = Marker()
        self._inside = threading.local()
        self._started: set[int] = set()

    def call(self, key: int, function: Any, positional: Any, named: Any) -> Any:
        if getattr(self._inside, "yes", False):  # during tracing of the outer function
            return function(*positional, **named)
        self._begins(key)
        self._inside.yes = True
        try:
            with guard.hidden:
                return function(*positional, **named)
        finally:
            self._inside.yes = False

    @guard.entry
    def _begins(self, key: int) -> None:
        if self._marker.hit(key) and self.seen is not None:
            if key in self._started:  # the first call of a function only begins a step
                self.seen(StepSource.JITTED)
            self._started.add(key)


class _Jitted:
    """A function made by jax.jit whose calls are detected; all other attributes are the function's own."""

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
        if name == "_stepscope":  # on a copy under construction
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
    """Return the same key for functions with the same code: a program may create one in every step."""
    code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    return id(code if code is not None else function)


def _jitted_calls(seen: Callable[[StepSource], None]) -> Callable[[], None]:
    jax: Any = sys.modules["jax"]
    calls = _Calls(seen)
    makers = {name: _maker(getattr(jax, name), calls) for name in _MAKERS if hasattr(jax, name)}
    give_back = [guard.put(jax, name, maker) for name, maker in makers.items()]

    def remove() -> None:
        calls.seen = None
        for each in give_back:
            each()

    return remove


def _maker(original: Any, calls: _Calls) -> Any:
    """Wrap jax.jit so that its functions are detected, including the form that takes only options first."""

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
