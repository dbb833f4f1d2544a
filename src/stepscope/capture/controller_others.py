"""Profilers of torch that the program starts itself: only one can record at a time, and the program's goes first.

While captures are asked for, the three functions through which every profiler of torch is prepared, started and
stopped are wrapped, so that the program's own are seen coming.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

_FUNCTIONS: Final = {"_prepare_profiler": True, "_enable_profiler": True, "_disable_profiler": False}
"""Functions of torch.autograd.profiler, and whether a profiler is in use after they were called."""


_watchers: list[OtherProfilers] = []
_originals: dict[str, Any] = {}


class OtherProfilers:
    """Sees profilers of torch that are not stepscope's.

    Args:
        give_way: called when one is about to begin while stepscope records.

    Attributes:
        seen: whether there ever was one.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.seen = False
        self._give_way = give_way
        self._in_use = False
        self._our_own = False
        self._recording = False

    def watch(self) -> None:
        """Look out for them from now on; does nothing where torch is not imported or already watched."""
        module = sys.modules.get("torch.autograd.profiler")
        if module is None or self in _watchers:
            return
        self._in_use = bool(getattr(module, "_is_profiler_enabled", False))
        if not _watchers:
            _wrap(module)
        _watchers.append(self)

    def unwatch(self) -> None:
        """Look out no more; after the last, torch is as it was."""
        if self in _watchers:
            _watchers.remove(self)
            if not _watchers:
                _unwrap(sys.modules.get("torch.autograd.profiler"))

    def active(self) -> bool:
        """Whether one is prepared or records now."""
        return self._in_use

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """What is called inside is stepscope's."""
        self._our_own = True
        try:
            yield
        finally:
            self._our_own = False

    def guard(self, recording: bool) -> None:
        """Whether to give way to the next one, because stepscope has the profiler."""
        self._recording = recording

    def _called(self, in_use: bool) -> None:
        if not self._our_own:
            if in_use and self._recording:
                self._give_way()
            self._in_use, self.seen = in_use, True


def _wrap(module: Any) -> None:
    for name, in_use in _FUNCTIONS.items():
        original = getattr(module, name, None)
        if original is not None:
            _originals[name] = original
            setattr(module, name, _wrapped(original, in_use))


def _unwrap(module: Any) -> None:
    for name, original in _originals.items():
        setattr(module, name, original)
    _originals.clear()


def _wrapped(original: Any, in_use: bool) -> Any:
    def called(*positional: Any, **named: Any) -> Any:
        for watcher in list(_watchers):
            watcher._called(in_use)
        return original(*positional, **named)

    return called
