"""Naming in the trace where a program saves and loads checkpoints, while steps are recorded.

Such a call stands in the trace as "stepscope.checkpoint#torch.save", with the user's line as operators have it.
Afterwards the functions are the program's own again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from stepscope.capture import guard
from stepscope.capture.logging_calls import marked, recorded_mark

PREFIX: Final = "stepscope.checkpoint#"

_FUNCTIONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("torch", "save", "torch.save"),
    ("torch.serialization", "save", "torch.save"),
    ("torch", "load", "torch.load"),
    ("torch.serialization", "load", "torch.load"),
    ("safetensors.torch", "serialize_file", "safetensors.save_file"),  # what its save_file calls, however imported
    ("torch.distributed.checkpoint", "save", "torch.distributed.checkpoint.save"),
    ("torch.distributed.checkpoint", "load", "torch.distributed.checkpoint.load"),
    ("torch.distributed.checkpoint", "async_save", "torch.distributed.checkpoint.async_save"),
)
"""Module, function, and what its calls are called in the trace; only modules that the program imported count."""


class CheckpointCalls:
    """Names calls from `start` to `stop`; neither raises.

    Attributes:
        saved_bytes: what the files that were saved hold, as far as their names were given.
    """

    def __init__(self) -> None:
        self.saved_bytes = 0
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin; what cannot be named is left alone."""
        with guard.attempt():
            mark = recorded_mark()
            for module, function, name in _FUNCTIONS:
                owner = sys.modules.get(module)
                original = getattr(owner, function, None)
                if callable(original):
                    self._wrap(owner, function, original, PREFIX + name, mark)

    def stop(self) -> None:
        """Give the functions back."""
        while self._restore:
            self._restore.pop()()

    @guard.entry
    def _saved(self, *positional: Any, **_: Any) -> None:
        if len(positional) > 1:
            with contextlib.suppress(OSError, TypeError, ValueError):
                self.saved_bytes += os.stat(positional[1]).st_size

    def _wrap(self, owner: Any, attribute: str, original: Any, name: str, mark: Callable[[str], Any]) -> None:
        named = marked(original, mark, name, self._saved if name.endswith("save") else None)

        def restore() -> None:
            if getattr(owner, attribute, None) is named:
                setattr(owner, attribute, original)

        setattr(owner, attribute, named)
        self._restore.append(restore)
