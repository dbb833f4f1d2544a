"""Whether attention's backward pass computes again what the forward pass could have saved: the switches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_LOCAL: Final[ContextVar[bool | None]] = ContextVar("stepscope_recompute_attention", default=None)
_everywhere = True


@contextmanager
def recompute_attention(enabled: bool) -> Iterator[None]:
    """Within the block, let `attention` recompute in its backward pass (True) or save more instead (False).

    It holds for this thread, or this asynchronous task, and for nobody else; blocks can be nested. A `recompute` given
    to `attention` itself wins, and is what to use under `torch.compile`, where a switch read inside the compiled
    function can break its graph.

    Raises:
        TypeError: `enabled` is neither True nor False.
    """
    token = _LOCAL.set(_checked(enabled))
    try:
        yield
    finally:
        _LOCAL.reset(token)


def set_recompute_attention(enabled: bool) -> None:
    """Set the mode for all threads of the process, until set again; a surrounding `recompute_attention` block wins.

    Raises:
        TypeError: `enabled` is neither True nor False.
    """
    global _everywhere
    _everywhere = _checked(enabled)


def recompute_attention_enabled() -> bool:
    """Whether `attention` recomputes where no `recompute` is given to it: True unless something switched it off."""
    local = _LOCAL.get()
    return _everywhere if local is None else local


def _checked(enabled: bool) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(f"recomputing attention is switched by True or False, not by {enabled!r}")
    return enabled
