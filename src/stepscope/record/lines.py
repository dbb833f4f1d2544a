"""Record which line of the user's code each thread is executing, while steps are recorded.

Python reports when a line of the user's code begins: through `sys.monitoring` from 3.12 on, `sys.settrace` before.
Only the user's own functions are watched; framework code runs unchanged. Framework work belongs to the user's line
that called it, so an operator's line is the one its thread had reached when the operator began. Nothing is inserted
between the program and the framework, such as a TorchFunctionMode, which would make torch.compile recompile
everything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Container, Iterator
from types import CodeType, FrameType
from typing import Any, Final, Protocol

from stepscope import guard
from stepscope.record.program_objects import (
    CallNotes,
    ModuleRef,
    NamedCalls,
    call_code,
    call_time,
    module_ref,
    named_calls,
    stack_room,
)
from stepscope.record.repetition import REVIEW_EVERY, STRIDE, BusyFunctions, Notes, seen_before
from stepscope.trace.line_records import LineRecords, Location, ThreadLines
from stepscope.trace.naming import UserCode

MOST_NOTES: Final = 3_000_000
"""Limit for one thread, at about 100 bytes each; lines beyond it are lost."""
_RESUMABLE: Final = 0x20 | 0x80 | 0x200  # generators and coroutines, by inspect.CO_*


class Watch(Protocol):
    """A mechanism that reports lines.

    Attributes:
        threads: each thread's number, its line notes and its module-call notes.
        gave_up_unix_ns: when recording stopped because there were too many notes; 0 if it did not.
    """

    threads: list[tuple[int, Notes, CallNotes]]
    gave_up_unix_ns: int

    def start(self, frame: FrameType | None) -> str | None: ...
    def stop(self) -> None: ...


class _UserFiles(dict[str, bool]):
    """Whether a code object's file is the user's, cached for each file."""

    def __init__(self) -> None:
        super().__init__()
        self._user_code = UserCode.from_environment(os.environ)

    def __missing__(self, file: str) -> bool:
        found = file in self._user_code
        self[file] = found
        return found


_is_user = _UserFiles()


def is_users(file: str) -> bool:
    return _is_user[file]


_TRACE: Final = "record.lines.Tracing"
_MONITOR: Final = "record.lines.Monitoring"
guard.INLINE.update((_TRACE, _MONITOR))
_CALLER: Final = 2
"""Number of frames between a callback, which the guard calls, and the code that it is called for."""


def line_of(frame: FrameType | None, busy: Container[CodeType] = ()) -> tuple[CodeType | None, int | None]:
    """Return the code and line of the user's innermost function; None for both outside the user's code.

    Args:
        busy: functions for which the line of their definition is returned.
    """
    while frame is not None:
        code = frame.f_code
        if _is_user[code.co_filename]:
            return code, code.co_firstlineno if code in busy else frame.f_lineno
        frame = frame.f_back
    return None, None


_LONGEST_COMPILATION_S: Final = 300.0


def compiling() -> Callable[[], bool]:
    """Return a function that says whether torch.compile is tracing; replacements must be invisible to it."""
    found: Callable[[], bool] = getattr(getattr(sys.modules["torch"], "compiler", None), "is_compiling", lambda: False)
    return found


def compiles() -> bool:
    """Whether the program has made compiled functions by torch.compile.

    What replaces a method of its modules then is traced, and compiled as a part of the program.
    """
    kept = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    # None is that of functions that shall not be compiled, of which torch has some
    return bool(kept is not None and kept()) or any(callable(each) for each in list(backends.values()))


@contextlib.contextmanager
def while_nothing_compiles() -> Iterator[None]:
    """Wait until no thread compiles: what a compilation has traced must not be gone before it makes its guards."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    held = lock is not None and lock.acquire(timeout=_LONGEST_COMPILATION_S)
    try:
        yield
    finally:
        if held:
            lock.release()


def hide_from_compiler(*functions: Callable[..., Any]) -> None:
    """Keep torch.compile, if it is used, from compiling these functions and what they call, which run at every line."""
    evaluation: Any = sys.modules.get("torch._dynamo.eval_frame")
    types: Any = sys.modules.get("torch._dynamo.types")
    if evaluation is None:
        return
    inner = (function.__wrapped__ for function in functions if hasattr(function, "__wrapped__"))
    for function in (*functions, *inner):
        with guard.attempt():  # this torch version uses another name
            code = getattr(function, "__func__", function).__code__
            if hasattr(types, "FrameExecStrategy"):
                skip = types.FrameAction.SKIP
                evaluation.set_code_exec_strategy(code, types.FrameExecStrategy(skip, skip))
            else:
                evaluation.skip_code(code)


class Tracing:
    """Uses `sys.settrace`: covers the thread that starts it, and threads that begin later."""

    def __init__(self) -> None:
        self.threads: list[tuple[int, Notes, CallNotes]] = []
        self.gave_up_unix_ns = 0
        self._is_on = True
        self._on_call: Any = None
        self._busy = BusyFunctions(is_users)
        self._local: dict[
            int, tuple[Callable[..., Any], Any]
        ] = {}  # by id, with the function that it replaced in a frame
        self._ends: list[Callable[[], None]] = []

    def start(self, frame: FrameType | None) -> str | None:
        if sys.gettrace() is not None or threading.gettrace() is not None:
            return "source lines were not recorded: a debugger or a coverage tool traces the program"
        self._on_call, on_line = self._functions(frame)
        while frame is not None:  # running functions can be traced only through their frames
            before = frame.f_trace
            if _is_user[frame.f_code.co_filename] and (before is None or before is seen_before):
                frame.f_trace = on_line if before is None else getattr(on_line, "when_marked", on_line)
            frame = frame.f_back
        threading.settrace(self._begin_thread)
        sys.settrace(self._on_call)
        return None

    def stop(self) -> None:
        self._busy.stop()
        if self._on_call is None:
            return
        if threading.gettrace() == self._begin_thread:
            threading.settrace(None)
        if sys.gettrace() is self._on_call:
            sys.settrace(None)
        self._end()

    def _end(self) -> None:
        """Leave every running frame; other threads stop at their next call."""
        self._is_on = False
        for end in self._ends:
            end()
        for running in guard.current_frames().values():
            frame: FrameType | None = running
            while frame is not None:
                self._leave(frame)
                frame = frame.f_back

    def _leave(self, frame: FrameType) -> None:
        """Remove our function from a frame, or a debugger that starts later would not see its lines."""
        ours, before = self._local.get(id(frame.f_trace), (None, None))
        if ours is not None:
            frame.f_trace = before
        if ours is not None or frame.f_code in self._busy:
            frame.f_trace_lines = True

    def _give_up(self) -> None:
        self.gave_up_unix_ns = time.time_ns()
        sys.settrace(None)
        self._end()

    @guard.inline(_TRACE)
    def _begin_thread(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._is_on:
            sys.settrace(None)
            return None
        on_call, _ = self._functions(None)
        sys.settrace(on_call)
        return on_call(frame, event, argument)

    def _functions(self, frame: FrameType | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return this thread's trace functions: one for calls, one for lines of the user's functions."""
        notes: Notes = [time.time_ns(), *line_of(frame)]
        calls: CallNotes = []
        known: dict[int, ModuleRef] = {}
        self.threads.append((threading.get_native_id(), notes, calls))
        self._busy.follow(notes)
        note, now, is_user, most = notes.extend, time.time_ns, _is_user, MOST_NOTES * STRIDE
        note_call, module_call = calls.extend, call_code()
        busy, review_at = self._busy, min(REVIEW_EVERY * STRIDE, most)

        def end() -> None:
            nonlocal review_at
            review_at = 0

        def review(frame: FrameType) -> Any:
            nonlocal review_at
            if not self._is_on:  # in a function that ran elsewhere when the others were left
                return self._leave(frame)
            if len(notes) >= most:
                return self._give_up()
            review_at = min(len(notes) + REVIEW_EVERY * STRIDE, most)
            code = frame.f_code
            if code in busy.review(notes):
                frame.f_trace_lines = False
                note((now(), code, code.co_firstlineno))
            return on_line

        @guard.inline(_TRACE)
        def on_module(frame: FrameType, event: str, argument: object) -> Any:
            if event == "return":
                note_call((now(), None))
            return on_module

        def on_line(frame: FrameType, event: str, argument: object) -> Any:
            try:
                if event == "line":
                    note((now(), frame.f_code, frame.f_lineno))
                    return on_line if len(notes) < review_at else review(frame)
                if event == "return":
                    note((now(), *line_of(frame.f_back, busy)))
                    frame.f_trace_lines = True  # a generator resumes
                return on_line
            except BaseException as error:  # inlined, since it runs at every line
                return guard.caught(error, _TRACE)

        def on_line_of_marked(frame: FrameType, event: str, argument: object) -> Any:
            return on_line(frame, event, argument) and on_line_of_marked

        on_line.when_marked = on_line_of_marked  # type: ignore[attr-defined]

        def on_call(frame: FrameType, event: str, argument: object) -> Any:
            try:
                if not self._is_on:
                    sys.settrace(None)
                    return None
                code = frame.f_code
                if code is module_call and len(calls) < most:
                    module = frame.f_locals.get("self")
                    note_call((call_time(module), module_ref(module, known)))
                    frame.f_trace_lines = False
                    return on_module
                if not is_user[code.co_filename] or busy.get(code, 0) > 1:
                    return None
                if code in busy:
                    note((now(), code, code.co_firstlineno))
                    frame.f_trace_lines = False
                elif code.co_flags & _RESUMABLE:  # resumes in the middle of a line
                    note((now(), code, frame.f_lineno))
                return on_line
            except BaseException as error:
                return guard.caught(error, _TRACE)

        hide_from_compiler(on_call, on_line, on_line_of_marked, on_module, self._begin_thread)
        self._ends.append(end)
        for local, before in ((on_line, None), (on_module, None), (on_line_of_marked, seen_before)):
            self._local[id(local)] = local, before
        return on_call, on_line


class _ThreadNotes(threading.local):
    def __init__(self, threads: list[tuple[int, Notes, CallNotes]], busy: BusyFunctions) -> None:
        notes: Notes = []
        calls: CallNotes = []
        threads.append((threading.get_native_id(), notes, calls))
        busy.follow(notes)
        self.notes = notes
        self.note = notes.extend
        self.note_call = calls.extend
        self.known: dict[int, ModuleRef] = {}
        self.review_at = min(REVIEW_EVERY, MOST_NOTES) * STRIDE


_TOOL: Final = "stepscope"
_IDS: Final = (4, 3)
"""Ids that Python reserves for no kind of tool; cProfile, coverage and debuggers fail if theirs is taken."""


class Monitoring:
    """Uses `sys.monitoring` (Python 3.12): covers all threads.

    Calls of functions that are not the user's are reported once and then disabled, for this recording and later ones:
    `restart_events` would also re-enable what other tools have disabled.
    """

    def __init__(self) -> None:
        self.threads: list[tuple[int, Notes, CallNotes]] = []
        self.gave_up_unix_ns = 0
        self._busy = BusyFunctions(is_users)
        self._here = _ThreadNotes(self.threads, self._busy)
        self._api: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self._tool: int | None = None
        self._module_call: CodeType | None = None
        self._codes: dict[int, CodeType] = {}

    def start(self, frame: FrameType | None) -> str | None:
        api, events = self._api, self._api.events
        self._tool = next((tool for tool in _IDS if api.get_tool(tool) is None), None)
        if self._tool is None:
            return "source lines were not recorded: other tools monitor the program"
        api.use_tool_id(self._tool, _TOOL)
        here, now, most = self._here, time.time_ns, MOST_NOTES * STRIDE
        self._module_call = call_code()

        def on_line(code: CodeType, line: int) -> None:
            try:
                here.note((now(), code, line))
                if len(here.notes) >= here.review_at:
                    review(code)
            except BaseException as error:
                guard.caught(error, _MONITOR)

        def review(code: CodeType) -> None:
            if len(here.notes) >= most:
                self.gave_up_unix_ns = now()
                self.stop()
                return
            here.review_at = min(len(here.notes) + REVIEW_EVERY * STRIDE, most)
            found = self._busy.review(here.notes)
            for each in found:
                self._watch_less(each)
            if code in found and self._busy[code] == 1:
                here.note((now(), code, code.co_firstlineno))

        callbacks = (on_line, self._returned, self._returned, self._resumed, self._started, self._unwound)
        hide_from_compiler(*callbacks)
        for event, function in zip(self._events(), callbacks, strict=True):
            api.register_callback(self._tool, event, function)
        self._watch_running()
        here.note((now(), *line_of(frame)))
        everywhere = events.PY_START
        if self._module_call is not None:
            self._codes[id(self._module_call)] = self._module_call
            api.set_local_events(self._tool, self._module_call, events.PY_RETURN)
            everywhere |= events.PY_UNWIND
        api.set_events(self._tool, everywhere)
        return None

    @guard.inline(_MONITOR)
    def _returned(self, code: CodeType, offset: int, value: object) -> None:
        if code is self._module_call:
            self._here.note_call((time.time_ns(), None))
        else:
            self._here.note((time.time_ns(), *line_of(sys._getframe(_CALLER).f_back, self._busy)))

    @guard.inline(_MONITOR)
    def _unwound(self, code: CodeType, offset: int, error: object) -> None:
        if code is self._module_call:
            self._here.note_call((time.time_ns(), None))

    @guard.inline(_MONITOR)
    def _resumed(self, code: CodeType, offset: int) -> None:
        self._here.note((time.time_ns(), code, sys._getframe(_CALLER).f_lineno))

    @guard.inline(_MONITOR)
    def _started(self, code: CodeType, offset: int) -> Any:
        if code is self._module_call:
            module = sys._getframe(_CALLER).f_locals.get("self")
            self._here.note_call((call_time(module), module_ref(module, self._here.known)))
        elif not _is_user[code.co_filename]:
            return self._api.DISABLE
        elif code not in self._busy:
            self._watch(code)
        elif self._busy[code] == 1:
            self._here.note((time.time_ns(), code, code.co_firstlineno))
        return None

    def _events(self) -> list[int]:
        names = ("LINE", "PY_RETURN", "PY_YIELD", "PY_RESUME", "PY_START", "PY_UNWIND")
        return [getattr(self._api.events, name) for name in names]

    def stop(self) -> None:
        self._busy.stop()
        if self._tool is None:
            return
        api = self._api
        if api.get_tool(self._tool) != _TOOL:  # another tool has taken it
            self._tool = None
            return
        api.set_events(self._tool, 0)
        for code in self._codes.values():
            api.set_local_events(self._tool, code, 0)
        for event in self._events():
            api.register_callback(self._tool, event, None)
        api.free_tool_id(self._tool)
        self._tool = None
        self._codes.clear()

    def _watch(self, code: CodeType) -> None:
        events = self._api.events
        if self._tool is not None and id(code) not in self._codes:
            self._codes[id(code)] = code
            wanted = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
            self._api.set_local_events(self._tool, code, wanted)

    def _watch_less(self, code: CodeType) -> None:
        """Record only the calls of a busy function, or stop recording it."""
        if self._tool is not None:
            events = self._api.events
            self._api.set_local_events(self._tool, code, events.PY_RETURN if self._busy[code] == 1 else 0)

    def _watch_running(self) -> None:
        """Register functions that are already running on any thread, since they produce no start event."""
        for running in guard.current_frames().values():
            frame: FrameType | None = running
            while frame is not None:
                if _is_user[frame.f_code.co_filename]:
                    self._watch(frame.f_code)
                frame = frame.f_back


class LineTracker:
    """Records lines from `start` to `stop`; never raises, since it runs inside the user's program.

    Attributes:
        problem: why lines were not recorded, or not to the end; None if they were.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self._watch: Watch | None = None
        self._start_unix_ns = 0
        self._end_unix_ns = 0

    def start(self) -> None:
        """Start recording lines of threads that begin later and, from Python 3.12 on, of running threads."""
        self._start_unix_ns = time.time_ns()
        watch = self._watch = _new_watch()
        _running.add(self)
        stack_room.take()
        with guard.attempt() as starting:
            self.problem = watch.start(sys._getframe(1))
        if starting.error is not None:
            self.problem = f"source lines could not be recorded: {guard.sentence(starting.error)}"

    def stop(self) -> None:
        if self._watch is not None and not self._end_unix_ns:
            self._end_unix_ns = self._watch.gave_up_unix_ns or time.time_ns()
            _running.discard(self)
            stack_room.give_back()
            with guard.attempt() as stopping:
                self._watch.stop()
            if stopping.error is not None:
                why = guard.sentence(stopping.error)
                self.problem = self.problem or f"recording source lines could not be ended: {why}"

    def records(self) -> LineRecords | None:
        """Return and clear the recorded lines; None if it was not started."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        if watch.gave_up_unix_ns:
            self.problem = self.problem or "source lines were recorded only in part: the steps run too many of them"
        places = _Places()
        calls = self._module_calls(watch)
        threads = []
        for (thread, notes, _), (call_times, called) in zip(watch.threads, calls.threads, strict=True):
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
            modules=calls.names,
            evaluating=calls.evaluating,
            module_functions=calls.functions,
        )

    def _module_calls(self, watch: Watch) -> NamedCalls:
        with guard.attempt() as naming:  # names come from the program's own modules, whose methods may do anything
            return named_calls([calls for _, _, calls in watch.threads])
        self.problem = self.problem or f"calls of modules could not be named: {guard.sentence(naming.error)}"
        return NamedCalls([], [], [(array("q"), array("i")) for _ in watch.threads])


def _bytes(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _new_watch() -> Watch:
    return Monitoring() if hasattr(sys, "monitoring") else Tracing()


_running: set[LineTracker] = set()


@guard.entry
def _stop_all() -> None:
    """Stop recording lines in a forked worker, which is not part of the recording."""
    for tracker in list(_running):
        tracker.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_all)


class _Places:
    def __init__(self) -> None:
        self.locations: list[Location] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def index(self, code: CodeType | None, line: int | None) -> int:
        """Return the line's number; -1 for no line."""
        if code is None or line is None:
            return -1
        number = self._numbers.get((id(code), line))
        if number is None:
            number = self._numbers[id(code), line] = len(self.locations)
            file = code.co_filename
            self.locations.append(Location(file if file[:1] == "<" else os.path.abspath(file), line, code.co_name))
        return number
