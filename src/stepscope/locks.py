"""Locks of ours in the user's process."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Final


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
