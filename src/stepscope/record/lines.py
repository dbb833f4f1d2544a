"""At which line of the user's code each thread is, noted while steps are recorded.

Python itself says when a line of the user's code begins: `sys.monitoring` from 3.12 on, `sys.settrace` before. Only
the user's own functions are watched; code of frameworks runs as it is. What a framework does belongs to the user's
line that called it, so an operator's line is the one its thread was at when it began. Nothing is put between the
program and the framework, as a TorchFunctionMode would be, for which torch.compile compiles everything again.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from types import CodeType

from stepscope import guard
from stepscope.record.line_watches import STRIDE, Monitoring, Tracing, Watch, named_calls
from stepscope.trace.program_facts import LineRecords, Location, ThreadLines


class LineTracker:
    """Notes lines from `start` to `stop`; never raises, since it runs inside the user's program.

    Attributes:
        problem: what kept lines from being noted, or from being noted to the end; None as long as nothing did.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self._watch: Watch | None = None
        self._start_unix_ns = 0
        self._end_unix_ns = 0

    def start(self) -> None:
        """Begin to note lines, of threads that run now (Python 3.12 and later) or begin later."""
        self._start_unix_ns = time.time_ns()
        _stop_in_forked_children()
        watch = self._watch = _new_watch()
        _running.add(self)
        with guard.attempt() as starting:
            self.problem = watch.start(sys._getframe(1))
        if starting.error is not None:
            self.problem = f"source lines could not be recorded: {guard.sentence(starting.error)}"

    def stop(self) -> None:
        """Note no more."""
        if self._watch is not None and not self._end_unix_ns:
            self._end_unix_ns = self._watch.gave_up_unix_ns or time.time_ns()
            _running.discard(self)
            with guard.attempt() as stopping:
                self._watch.stop()
            if stopping.error is not None:
                why = guard.sentence(stopping.error)
                self.problem = self.problem or f"recording source lines could not be ended: {why}"

    def records(self) -> LineRecords | None:
        """What was noted, and forget it; None if nothing was started."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        if watch.gave_up_unix_ns:
            self.problem = self.problem or "source lines were recorded only in part: the steps run too many of them"
        places = _Places()
        modules, calls = self._module_calls(watch)
        threads = []
        for (thread, notes, _), (call_times, called) in zip(watch.threads, calls, strict=True):
            kept = len(notes) - len(notes) % STRIDE
            indices = array("i", map(places.index, notes[1:kept:STRIDE], notes[2:kept:STRIDE]))
            times = array("q", notes[0:kept:STRIDE])
            threads.append(ThreadLines(thread, *map(_bytes, (times, indices, call_times, called))))
        return LineRecords(
            process=os.getpid(),
            start_unix_ns=self._start_unix_ns,
            end_unix_ns=self._end_unix_ns,
            locations=places.locations,
            threads=threads,
            problem=self.problem,
            modules=modules,
        )

    def _module_calls(self, watch: Watch) -> tuple[list[str], list[tuple[array[int], array[int]]]]:
        with guard.attempt() as naming:  # names come from the program's own modules, whose methods may do anything
            return named_calls([calls for _, _, calls in watch.threads])
        self.problem = self.problem or f"calls of modules could not be named: {guard.sentence(naming.error)}"
        return [], [(array("q"), array("i")) for _ in watch.threads]


def _bytes(values: array[int]) -> bytes:
    """Little-endian."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _new_watch() -> Watch:
    return Monitoring() if hasattr(sys, "monitoring") else Tracing()


_running: set[LineTracker] = set()
_child_is_told = False


def _stop_in_forked_children() -> None:
    """A worker that the program forks is not recorded, so it needs no lines."""
    global _child_is_told
    if not _child_is_told and hasattr(os, "register_at_fork"):
        _child_is_told = True
        os.register_at_fork(after_in_child=_stop_all)


@guard.entry
def _stop_all() -> None:
    for tracker in list(_running):
        tracker.stop()


class _Places:
    """The different lines that were noted, each once."""

    def __init__(self) -> None:
        self.locations: list[Location] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def index(self, code: CodeType | None, line: int | None) -> int:
        """The line's number; -1 for no line."""
        if code is None or line is None:
            return -1
        number = self._numbers.get((id(code), line))
        if number is None:
            number = self._numbers[id(code), line] = len(self.locations)
            file = code.co_filename
            self.locations.append(Location(file if file[:1] == "<" else os.path.abspath(file), line, code.co_name))
        return number
