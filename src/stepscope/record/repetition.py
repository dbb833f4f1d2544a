"""Functions that run again and again: which one calls the model repeatedly, and which are too quick to be noted.

A function may call the model for each request or sequence, for example. A frame is new if no earlier call of the model
came from it. The mark is its `f_trace`, which only tracers read and which ends with the frame; the trace function of
the line recorder counts as a mark, too. A function is busy if it runs so many quick lines that noting each would
dominate the run time, such as a loop over pixels.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from stepscope import guard

_LONGEST_S: Final = 2.0
"""Mean time between two calls of a function above which it holds many steps rather than one."""
_FEWEST: Final = 2
"""Calls of a function after the first one that show that it is repeated."""
_SETTLES_S: Final = 1.0
_DEEP: Final = 3
"""Functions between a script and the chosen one from which on, for _SETTLES_S, one of them may turn out to be it."""
_RAREST: Final = 256
"""A function around the chosen one does not mark steps if it calls the chosen one more often than this."""


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
        self._chosen_s = 0.0  # when the first one was
        self._has_started = False

    @property
    def has_candidates(self) -> bool:
        """Whether a function around the model's calls was called again."""
        return bool(self._counts)

    def begins(self, frames: list[FrameType]) -> bool:
        """Whether a new call of the chosen function has come to the model; False while none is chosen.

        Args:
            frames: those around this call of the model, the outermost first.
        """
        new = [depth for depth, frame in enumerate(frames) if _is_new(frame)]
        first = new[0] if new else len(frames)
        for depth in new:
            frames[depth].f_trace = getattr(frames[depth].f_trace, "when_marked", seen_before)
        if not self._has_started:
            self._has_started = True
            return False
        if first < len(frames):
            self._entered(first, frames[first].f_code)
        return self._is_chosen_new(first, frames)

    def _entered(self, depth: int, code: CodeType) -> None:
        """Count a new call of a function from frames seen before; choose it if it is around the chosen one."""
        key = (depth, code)
        self._counts[key] += 1
        times = self._times[key]
        times.append(time.monotonic())
        del times[:-_FEWEST]
        if len(times) < _FEWEST or (times[-1] - times[0]) > _LONGEST_S * (_FEWEST - 1):
            return
        chosen = self._chosen
        if chosen is None:
            self._chosen_s = time.monotonic()
        if chosen is None or (depth < chosen[0] and self._counts[chosen] <= _RAREST * self._counts[key]):
            self._chosen = key

    def _may_change(self, frames: list[FrameType]) -> bool:
        """Whether a function around the chosen one has perhaps not been called often enough to be it."""
        depth = self._chosen[0] if self._chosen is not None else 0
        scripts = [at for at, frame in enumerate(frames[:depth]) if frame.f_code.co_name == "<module>"]
        is_deep = bool(scripts) and depth - scripts[-1] > _DEEP
        return is_deep and time.monotonic() - self._chosen_s < _SETTLES_S

    def _is_chosen_new(self, first: int, frames: list[FrameType]) -> bool:
        if self._chosen is None or self._may_change(frames):
            return False
        depth, code = self._chosen
        return first <= depth < len(frames) and frames[depth].f_code is code


STRIDE: Final = 3
Notes = list[Any]
"""Flat list of time, code and line, which costs the garbage collector nothing."""

REVIEW_EVERY: Final = 2048
_BUSY_NS: Final = REVIEW_EVERY * 2_000
"""Lines that are faster than every 2 us take several times as long when each is recorded."""
_BUSY_SHARE: Final = 0.25
_INTERVAL_S: Final = 0.003
_SWITCH_S: Final = 0.0002
"""How soon the sampled thread lets the sampler run; if only while waiting, only waiting lines would be seen."""


class BusyFunctions(dict[CodeType, int]):
    """Functions that are no longer recorded line by line.

    A function found busy is from then on recorded at its call, by the line of its definition, and a thread samples the
    line that it has reached. If it is found again, because it is called so often, it is not recorded at all, and its
    time belongs to the calling line.

    Args:
        is_users: whether a file is the user's.
    """

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_users = is_users
        self._notes: dict[int, Notes] = {}
        self._is_over = False  # no threading.Event, whose lock a forked child may inherit
        self._is_sampling = False
        self._intervals_s: tuple[float, float] | None = None  # the program's, and ours in its place

    def follow(self, notes: Notes) -> None:
        """Sample this thread's busy functions into its notes."""
        self._notes[threading.get_ident()] = notes

    def review(self, notes: Notes) -> list[CodeType]:
        """Return the functions that are busy in a thread's latest notes."""
        recent = notes[-REVIEW_EVERY * STRIDE :]
        if recent[-STRIDE] - recent[0] > _BUSY_NS:
            return []
        counts = Counter(code for code in recent[1::STRIDE] if code is not None)
        found = [code for code, count in counts.items() if count >= _BUSY_SHARE * REVIEW_EVERY]
        for code in found:
            self[code] = self.get(code, 0) + 1
        if found and not self._is_sampling and not self._is_over:
            self._is_sampling = True
            _thread.start_new_thread(self._sample, ())  # hidden from the program's list of threads
        return found

    def stop(self) -> None:
        """End the sampling, also in a forked child, which has no thread that samples."""
        self._is_over = True
        intervals_s, self._intervals_s = self._intervals_s, None
        if intervals_s is not None and sys.getswitchinterval() == intervals_s[1]:  # the program has chosen no other one
            sys.setswitchinterval(intervals_s[0] + 0.25e-6)  # cut to whole microseconds: 200 would come back as 199

    @guard.entry(in_background=True)
    def _sample(self) -> None:
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(min(usual_s, _SWITCH_S))
        self._intervals_s = usual_s, sys.getswitchinterval()
        try:
            while True:
                time.sleep(_INTERVAL_S)
                frames = guard.current_frames()
                if self._is_over:
                    return
                for thread, notes in list(self._notes.items()):
                    self._note(notes, frames.get(thread))
                del frames
        finally:
            self.stop()

    def _note(self, notes: Notes, frame: FrameType | None) -> None:
        """Note the line of a busy function; the part of its call that was not sampled yet belongs to it as well."""
        while frame is not None and not (self.get(frame.f_code) == 1 or self._is_noted(frame.f_code)):
            frame = frame.f_back
        if frame is None or frame.f_code not in self or not notes:
            return
        code, last = frame.f_code, len(notes) - STRIDE
        if notes[last + 1] is code and notes[last + 2] == code.co_firstlineno:
            notes[last + 2] = frame.f_lineno
        else:
            notes.extend((time.time_ns(), code, frame.f_lineno))

    def _is_noted(self, code: CodeType) -> bool:
        return code not in self and self._is_users(code.co_filename)
