"""The guard between the user's process and stepscope: an error in stepscope never changes the program.

    @entry          marks a stepscope function that the user's process calls: a hook, thread, callback or public method
    around          wraps a function of the program or a library with ours before and after it
    put             replaces an attribute of a library with ours, and returns how to restore it
    attempt         runs a part of our work that may fail alone, such as one fact of many
    on_failure      registers how to remove a patch if any entry fails

An error in an entry removes everything that stepscope installed and is reported in one line, which names a fault
report. Exceptions of the user's own program propagate, without our frames in the traceback. Imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar, overload

from stepscope.errors import StepscopeError
from stepscope.threads import Lock

_P = ParamSpec("_P")
_R = TypeVar("_R")

ENTRIES: Final[dict[str, Callable[..., Any]]] = {}
"""Every entry of the imported modules, by module and qualified name."""

INLINE: Final[set[str]] = set()
"""Entries that are called too often for `entry`: see `inline`. The most frequent ones catch their own errors."""

probe: Callable[[str], None] | None = None
"""Called with an entry's name before it runs; tests use it to make entries fail."""

_OURS: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LONGEST_REASON: Final = 300

_failed_in: str | None = None
"""The entry that failed, after which no entry does anything."""
_held: Final[dict[object, _Held]] = {}
_inside: Final[set[int]] = set()
"""Threads inside an entry, which may still install something after another entry has failed."""
_lock: Final = Lock()


class _Held:
    __slots__ = ("process", "take_off", "thread", "what")

    def __init__(self, what: str, take_off: Callable[[], object], thread: int | None) -> None:
        self.what = what
        self.take_off = take_off
        self.thread = thread
        self.process = os.getpid()


@overload
def entry(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def entry(
    *,
    otherwise: Any = None,
    raises: type[BaseException] | tuple[type[BaseException], ...] = (),
    in_background: bool = False,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def entry(
    function: Callable[..., Any] | None = None,
    /,
    *,
    otherwise: Any = None,
    raises: type[BaseException] | tuple[type[BaseException], ...] = (),
    in_background: bool = False,
) -> Any:
    """Mark a function of a module or class as an entry.

    Args:
        otherwise: the return value on failure, and after any entry has failed.
        raises: errors about the caller's own mistakes, which propagate.
        in_background: the function is what one of our threads runs.
    """
    if function is None:
        return lambda given: _entry(given, otherwise, raises, in_background)
    return _entry(function, otherwise, raises, in_background)


def _entry(
    function: Callable[_P, _R],
    otherwise: Any,
    raises: type[BaseException] | tuple[type[BaseException], ...],
    in_background: bool,
) -> Callable[_P, _R]:
    name = f"{function.__module__.removeprefix('stepscope.')}.{function.__qualname__}"
    if "<locals>" in name:
        raise ValueError(f"an entry is a function of a module or class, so that it can be listed, not {name}")

    @wraps(function)
    def guarded(*positional: _P.args, **named: _P.kwargs) -> _R:
        inside, is_inner, passes = _inside, True, False
        try:
            here = get_ident()
            was_inside = in_background or here in inside
            if _failed_in is not None:
                if _held and not was_inside:
                    _take_off()
                return otherwise  # type: ignore[no-any-return]
            if not was_inside:
                inside.add(here)
                is_inner = False
            if probe is not None:
                probe(name)
            return function(*positional, **named)
        except RecursionError as error:
            try:
                passes = _passes(error, name, raises)
            except RecursionError:  # the program's stack is full: even this finds no room
                passes = False
            if passes:
                raise
        except BaseException as error:
            if _passes(error, name, raises):
                raise
        finally:
            if not is_inner:
                inside -= {here}  # no call, for which a full stack has no room
                if _failed_in is not None and _held:
                    _take_off()
        return otherwise  # type: ignore[no-any-return]

    ENTRIES[name] = guarded
    return guarded


def _passes(error: BaseException, name: str, raises: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Whether an error in an entry is the program's own; any other one ends stepscope's part."""
    if isinstance(error, raises) or is_users(error):
        hide(error)
        return True
    failed(error, name)
    return False


def around(
    original: Any,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    *,
    also_after_errors: bool = False,
    unless: Callable[[], bool] = lambda: False,
) -> Any:
    """Make a replacement for `original`, which is called outside the guard and whose errors propagate.

    Args:
        before: an entry that receives the arguments of the call.
        after: an entry that receives the return value of `before`, the result, and the arguments.
        also_after_errors: whether `after` is called, with None for the result, when `original` raised.
        unless: while it returns True only `original` runs, for example while torch.compile is tracing.
    """

    @wraps(original)
    def called(*positional: Any, **named: Any) -> Any:
        if unless():
            return original(*positional, **named)
        seen = before(*positional, **named) if before is not None else None
        try:
            result = original(*positional, **named)
        except BaseException as error:
            hide(error)
            if after is not None and also_after_errors:
                after(seen, None, *positional, **named)
            raise
        if after is not None:
            after(seen, result, *positional, **named)
        return result

    return called


class _Call:
    """One call of a wrapped function and its result."""

    __slots__ = ("__wrapped__", "error", "result", "was_made")

    def __init__(self, original: Any) -> None:
        self.__wrapped__ = original  # for inspect.signature
        self.was_made = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *positional: Any, **named: Any) -> Any:
        self.was_made, self.error = True, None
        try:
            self.result = self.__wrapped__(*positional, **named)
        except BaseException as error:
            self.error = error
            raise
        return self.result


def replaced(original: Any, ours: Callable[..., Any], name: str, *, unless: Callable[[], bool] = lambda: False) -> Any:
    """Make a replacement for `original` that calls ours(original, *positional, **named).

    If ours fails, the result of `original` is returned; if it was not yet called, it is called as the program did.

    Args:
        name: the entry's name.
        unless: while it returns True only `original` runs.
    """

    @wraps(original)
    def called(*positional: Any, **named: Any) -> Any:
        if _failed_in is not None or unless():
            return original(*positional, **named)
        call = _Call(original)
        try:
            if probe is not None:
                probe(name)
            return ours(call, *positional, **named)
        except BaseException as error:
            if call.error is error or is_users(error):
                hide(error)
                raise
            failed(error, name)
        if call.error is not None:
            raise call.error
        return call.result if call.was_made else original(*positional, **named)

    return called


def put(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    """Set an attribute of a module or class; return a function that restores it, unless it has been replaced since."""
    was_there, original = name in vars(owner), vars(owner).get(name)  # the descriptor of a method, not the bound method
    setattr(owner, name, ours)

    def give_back() -> None:
        if vars(owner).get(name) is not ours:  # another wrapper around ours still needs it
            return
        if was_there:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return give_back


class attempt:
    """A block that may fail alone: its error is kept in `error`, and execution continues after the block.

    Attributes:
        error: the exception without its traceback, which would keep the program's objects alive.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or is_users(error):
            return False
        self.error = error.with_traceback(None)
        return True


def inline(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark a function as an entry that is called too often for `entry`'s bookkeeping; it is listed in INLINE."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def guarded(*positional: _P.args, **named: _P.kwargs) -> _R:
            try:
                if probe is not None:
                    probe(name)
                return function(*positional, **named)
            except BaseException as error:
                return caught(error, name)  # type: ignore[no-any-return]

        return guarded

    INLINE.add(name)
    return decorate


def caught(error: BaseException, name: str) -> Any:
    """Handle an exception that an inline entry caught."""
    if is_users(error):
        hide(error)
        raise error
    failed(error, name)


def attempted(reading: Callable[[], _R]) -> _R | None:
    """Return what a function returns; None if it fails."""
    with attempt():
        return reading()
    return None


def tried(function: Callable[..., Any], *positional: Any, **named: Any) -> tuple[Any, Exception | None]:
    """Call foreign code; return its result, or its exception with the traceback so that it can be raised again."""
    try:
        return function(*positional, **named), None
    except Exception as error:
        return None, error


def on_failure(what: str, take_off: Callable[[], object], *, thread: int | None = None) -> object:
    """Register a removal for when an entry fails; return the key for `off`.

    Args:
        what: what is lost then, for the message, such as "the recording under way"; "" for nothing.
        take_off: restores the program; called once, in this process only.
        thread: the only thread that may call it (`threading.get_ident()`); it then waits for an entry on that thread.
    """
    key = object()
    with _lock:
        _held[key] = _Held(what, take_off, thread)
    return key


def unhook(handle: Any) -> None:
    """Remove a hook of torch's; after an error leave it inert, since torch may be iterating over its hooks."""
    if _failed_in is None:
        handle.remove()


def off(key: object) -> None:
    """Drop a registered removal that has been done in the ordinary way."""
    with _lock:
        _held.pop(key, None)


def has_failed() -> bool:
    return _failed_in is not None


def failed(error: BaseException, where: str) -> None:
    """Remove everything that stepscope installed in this process, and report the error in one line."""
    global _failed_in
    with _lock:
        if _failed_in is not None:
            return
        _failed_in = where
        lost = list(dict.fromkeys(held.what for held in _held.values() if held.what and held.process == os.getpid()))
    interrupts: list[BaseException] = []
    actions: tuple[Callable[[], None], ...] = (lambda: _report(error, where, lost), _take_off)
    for action in actions:
        try:
            action()
        except BaseException as second:
            if is_users(second):
                interrupts.append(second)
    if interrupts:
        raise interrupts[0]


def current_frames() -> dict[int, FrameType]:
    """Return each thread's frame, as `sys._current_frames` does, which up to Python 3.11 may deadlock.

    It holds the lock of the list of threads while it makes objects. If that starts the garbage collector, and a
    callback or finalizer lets another thread run, which then begins or ends a thread, both wait forever.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_on:
            gc.enable()


def _take_off() -> None:
    """Remove everything once no thread is inside an entry; a removal bound to a live thread waits for that thread."""
    here, process = get_ident(), os.getpid()
    with _lock:
        if _inside.intersection(running := current_frames()):
            return
        own = {key: held for key, held in _held.items() if held.process == process}
        bound = [held for held in own.values() if held.thread not in (None, here)]
        if any(held.thread in running for held in bound):
            return
        for key in own:
            del _held[key]
    for held in reversed(list(own.values())):
        with attempt():
            held.take_off()


def _report(error: BaseException, where: str, lost: list[str]) -> None:
    what = f" and loses {', '.join(lost)}" if lost else ""
    why, details = sentence(error), ""
    if not isinstance(error, StepscopeError):
        from stepscope.fault_report import write_report

        kept = write_report(error, command=sys.argv, doing=where)
        why = f"{type(error).__name__}: {why}"
        details = f"; details: {kept}" if kept is not None else "; no report of it could be written"
    tell(f"stepscope leaves this process{what}: {why}; the program continues without it{details}")


def tell(sentence: str) -> None:
    """Print a sentence on standard error, if the process has it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"stepscope: {sentence}\n" if not sentence.startswith("stepscope") else f"{sentence}\n")
        sys.stderr.flush()


def sentence(error: BaseException | None) -> str:
    """Return an error's first line, at most 300 characters of it, or its class name if it has no message."""
    with attempt():  # the error may be of a class of the program's
        lines = "".join(each if each.isprintable() else "\n" for each in str(error)).strip().splitlines()
        return (lines or [type(error).__name__])[0][:_LONGEST_REASON]
    return type(error).__name__


def is_users(error: BaseException) -> bool:
    """Whether an exception passing through our code is the program's own: an interrupt, an exit, or a signal handler's.

    An exception that the program sets from another thread is recognised because its class is the program's and it is
    raised directly in our code.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)) or hasattr(error, "_stepscope_passes"):
        return True
    frames = [each.tb_frame for each in _chain(error.__traceback__)]
    handlers = _signal_handlers()
    if any(frame.f_code in handlers for frame in frames):
        return True
    innermost = frames[-1].f_code.co_filename if frames else _OURS
    return type(error).__module__ == "__main__" and innermost.startswith(_OURS)


def passing(function: Callable[_P, _R], *positional: _P.args, **named: _P.kwargs) -> _R:
    """Call a function of the program from our code; its exceptions are the program's own."""
    try:
        return function(*positional, **named)
    except BaseException as error:
        error._stepscope_passes = True  # type: ignore[attr-defined]
        raise


def hide(error: BaseException) -> None:
    """Remove our frames from the top of a propagating traceback; a bare `raise` after it adds none (Python 3.11).

    In Python 3.10 the frame that raises again is visible.
    """
    passed = error.__traceback__
    while passed is not None and passed.tb_frame.f_code.co_filename.startswith(_OURS):
        passed = passed.tb_next
    error.__traceback__ = passed


class _Hidden:
    """A block that removes our frames from the traceback of passing errors."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            hide(error)


hidden: Final = _Hidden()


def _chain(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _signal_handlers() -> set[CodeType]:
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is None and callable(handler) and not isinstance(handler, signal.Handlers):
            code = getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004
        if code is not None:
            found.add(code)
    return found


def _in_child() -> None:
    _inside.intersection_update({get_ident()})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
