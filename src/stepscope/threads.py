"""Threads and locks of ours in the user's process."""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final


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
        """Wait for its end, but not longer than this."""
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
        """Whether the lock is held now; a negative time waits for ever."""
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


def _in_child() -> None:
    for each in list(_locks):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
