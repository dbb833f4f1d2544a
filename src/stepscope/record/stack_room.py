"""Room on the stack for functions of ours that Python calls at any depth of the program's."""

from __future__ import annotations

import sys
from typing import Final

from stepscope import guard

_FRAMES: Final = 60


class _StackRoom:
    """Raises the limit of recursion while a profile, trace or monitoring function of ours is on.

    Without it a function that just fits the program's limit would end in a RecursionError, as ours do not fit.
    """

    def __init__(self) -> None:
        self._users = 0
        self._limits = (0, 0)  # the program's, and ours in its place

    def take(self) -> None:
        if not self._users:
            usual = sys.getrecursionlimit()
            self._limits = usual, usual + _FRAMES
            sys.setrecursionlimit(self._limits[1])
        self._users += 1

    def give_back(self) -> None:
        self._users -= 1
        if not self._users and sys.getrecursionlimit() == self._limits[1]:  # the program has set no other
            with guard.attempt():  # the stack is deeper than that now
                sys.setrecursionlimit(self._limits[0])


stack_room: Final = _StackRoom()
