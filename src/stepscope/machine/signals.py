"""Handlers that receive signals for the length of a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

ENDING: Final = ("SIGTERM", "SIGHUP")
"""Signals that end a process at once unless it handles them; SIGINT is Python's KeyboardInterrupt already."""


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *names: str) -> Iterator[None]:
    """Pass these signals to `handler` in the block; those that are ignored, as under nohup, stay so.

    Does nothing on other threads than the main one, which alone receives signals.
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
