"""Errors of the user's code, caught whatever their class: to be raised at their place, or explained."""

from __future__ import annotations

from types import TracebackType


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
