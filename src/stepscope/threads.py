"""Stepscope's threads and locks, values that several threads share, and signal handlers for the length of a block."""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar, overload


class Thread:
    """A thread that ends with the process and is not among `threading.enumerate()`, all of which a program may join.

    Args:
        run: a guard entry; it may not ask for `threading.current_thread()`.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._over = _thread.allocate_lock()

    def start(self) -> None:
        self._over.acquire()
        _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._over.release()

    def join(self, timeout_s: float) -> None:
        if self._over.acquire(timeout=timeout_s):
            self._over.release()

    def is_alive(self) -> bool:
        return self._over.locked()


class Lock:
    """A reentrant lock that a forked child finds free if a thread held it that the child does not have.

    Reentrant, since a signal handler or a finalizer of the program may call us while its thread holds it.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def acquire(self, *, timeout_s: float = -1) -> bool:
        """Whether the lock is held now; a negative time waits forever."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """In a forked child, let go of a lock that another thread held."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()


_locks: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()
_Value = TypeVar("_Value")


class cached_property(functools.cached_property[_Value]):
    """A cached property that several threads compute once; that of `functools` does so only until Python 3.11."""

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> cached_property[_Value]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> _Value: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        values, name = instance.__dict__, str(self.attrname)
        with values.setdefault(f"lock of {name}", threading.RLock()):
            try:
                if name not in values:
                    values[name] = self.func(instance)
                return values[name]
            finally:
                values.pop(f"lock of {name}", None)


def _in_child() -> None:
    for each in list(_locks):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


ENDING: Final = ("SIGTERM", "SIGHUP")
"""Signals that end a process at once unless it handles them; SIGINT is Python's KeyboardInterrupt already."""


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *names: str) -> Iterator[None]:
    """Pass these signals to `handler` in the block; those that are ignored, as under nohup, stay ignored.

    Does nothing except on the main thread, which alone receives signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for name in names if is_main else ():
            number = getattr(signal, name, None)
            before = signal.SIG_IGN if number is None else signal.getsignal(number)
            if number is not None and before not in (signal.SIG_IGN, None):
                signal.signal(number, handler)
                stack.callback(signal.signal, number, before)
        yield


def interrupt(number: int, frame: FrameType | None) -> None:
    """End the work as Ctrl-C does, so that no program is left behind."""
    raise KeyboardInterrupt


def leave(number: int, frame: FrameType | None) -> None:
    """Unwind the process, so that temporary files are removed and settings restored; shells expect this exit code."""
    raise SystemExit(128 + number)
