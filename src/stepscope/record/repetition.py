"""Which function a program calls again and again around its model's calls, such as for each request or sequence.

A frame is new if no earlier call of the model came from it. `f_trace` tells: nothing but a tracer reads it, and a
mark there ends with the frame. The recorder of lines, which traces too, has a trace function that is also a mark.
"""

from __future__ import annotations

import time
from collections import defaultdict
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

_LONGEST_S: Final = 2.0
"""Mean time between two calls of a function above which it holds many steps rather than one."""
_FEWEST: Final = 2
"""Calls of a function after the first one that show that it is repeated."""
_RAREST: Final = 256
"""Calls of the function chosen so far to one of a function around it, above which that one does not mark steps."""


def seen_before(frame: FrameType, event: str, argument: Any) -> Any:
    """Mark a frame, as its local trace function, which does nothing."""
    return seen_before


def _is_new(frame: FrameType) -> bool:
    """Whether no call of the model came from this frame before; other tracers' frames never count as new."""
    return frame.f_trace is None or (type(frame.f_trace) is FunctionType and hasattr(frame.f_trace, "when_marked"))


class Repetition:
    """Chooses the outermost function that is called repeatedly, by the frames around each call of a model."""

    def __init__(self) -> None:
        self._times: defaultdict[tuple[int, CodeType], list[float]] = defaultdict(list)
        self._counts: defaultdict[tuple[int, CodeType], int] = defaultdict(int)
        self._chosen: tuple[int, CodeType] | None = None
        self._has_begun = False

    def begins(self, frames: list[FrameType]) -> bool:
        """Whether a new call of the chosen function has come to the model; False while none is chosen.

        Args:
            frames: those around this call of the model, the outermost first.
        """
        new = [depth for depth, frame in enumerate(frames) if _is_new(frame)]
        first = new[0] if new else len(frames)
        for depth in new:
            frames[depth].f_trace = getattr(frames[depth].f_trace, "when_marked", seen_before)
        if not self._has_begun:
            self._has_begun = True
            return False
        if first < len(frames):
            self._entered(first, frames[first].f_code)
        return self._is_chosen_new(first, frames)

    def _entered(self, depth: int, code: CodeType) -> None:
        """Count that a function was called anew from frames that go on, and choose it if it is outside the chosen."""
        key = (depth, code)
        self._counts[key] += 1
        times = self._times[key]
        times.append(time.monotonic())
        del times[:-_FEWEST]
        if len(times) < _FEWEST or (times[-1] - times[0]) > _LONGEST_S * (_FEWEST - 1):
            return
        chosen = self._chosen
        if chosen is None or (depth < chosen[0] and self._counts[chosen] <= _RAREST * self._counts[key]):
            self._chosen = key

    def _is_chosen_new(self, first: int, frames: list[FrameType]) -> bool:
        if self._chosen is None:
            return False
        depth, code = self._chosen
        return first <= depth < len(frames) and frames[depth].f_code is code
