"""A file lock that one process at a time holds, and that the system gives back however the process ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stepscope.errors import UsageError
from stepscope.whole_files import private_folder

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_LOOK_S: Final = 0.1


@contextlib.contextmanager
def held(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock that is the file at `path`, which is made where it is missing and stays.

    Where the system has no such locks, nothing is held.

    Args:
        waiting: called once where another process holds it.

    Raises:
        UsageError: the file cannot be made.
    """
    try:
        private_folder(path.parent, tighten=False)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be locked: {error.strerror}") from error
    try:
        told = False
        while not _take(handle):
            if not told:
                told = True
                waiting()
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(handle)  # which gives the lock back


def _take(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
