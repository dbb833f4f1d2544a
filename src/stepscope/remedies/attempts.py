"""Errors in functions that remedies call: the user's are kept, to be raised in their place; ours become warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Attempt:
    """A block of the user's code: its exception is kept in `error`, and execution continues after the block.

    Args:
        kinds: the classes of exceptions to keep; others propagate.
    """

    __slots__ = ("_kinds", "error")

    def __init__(self, kinds: type[BaseException] = Exception) -> None:
        self._kinds = kinds
        self.error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, self._kinds):
            return False
        self.error = error
        return True


BACKGROUND: Final[dict[str, Callable[..., Any]]] = {}
"""Functions that remedies leave with torch or Python, to be called later, by module and qualified name."""

_guarded: Final[dict[str, Callable[..., Any]]] = {}
_guard: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def in_background(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Mark a function that the program did not call: an error in it becomes None and a warning."""
    name = f"{function.__module__.removeprefix('stepscope.')}.{function.__qualname__}"

    @wraps(function)
    def called(*positional: _P.args, **named: _P.kwargs) -> _R | None:
        if _guard is not None:
            if name not in _guarded:
                _guarded[name] = _guard(function)
            return _guarded[name](*positional, **named)  # type: ignore[no-any-return]
        with Attempt() as attempt:
            return function(*positional, **named)
        warnings.warn(f"{name} failed: {type(attempt.error).__name__}: {attempt.error}", RuntimeWarning, stacklevel=2)
        return None

    BACKGROUND[name] = called
    return called


def guard_with(guard: Callable[[Callable[..., Any]], Callable[..., Any]] | None) -> None:
    """Let another decorator handle the errors of all these functions; None restores the warnings."""
    global _guard
    _guarded.clear()
    _guard = guard
