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
        self._originals: dict[str, Any] = {}

    def watch(self) -> None:
        """Look out for them from now on; does nothing where torch is not imported or already watched."""
        module = sys.modules.get("torch.autograd.profiler")
        if module is None or self._originals:
            return
        self._in_use = bool(getattr(module, "_is_profiler_enabled", False))
        for name, in_use in _FUNCTIONS.items():
            original = getattr(module, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(module, name, self._wrapped(original, in_use))

    def unwatch(self) -> None:
        """Leave torch as it was."""
        module = sys.modules.get("torch.autograd.profiler")
        for name, original in self._originals.items():
            setattr(module, name, original)
        self._originals.clear()

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

    def _wrapped(self, original: Any, in_use: bool) -> Any:
        def seen(*positional: Any, **named: Any) -> Any:
            if not self._our_own:
                if in_use and self._recording:
                    self._give_way()
                self._in_use, self.seen = in_use, True
            return original(*positional, **named)

        return seen
