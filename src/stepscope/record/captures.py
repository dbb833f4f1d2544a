"""One capture: its request, its progress and its result. Imports only the standard library."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope import guard
from stepscope.errors import StepscopeError, UsageError
from stepscope.record.program_objects import unseen
from stepscope.record.schedule import RecordOptions
from stepscope.threads import Lock

PATIENCE_S: Final = 60.0


class RecorderState(Enum):
    """State of a recorder; it passes through these in order, and goes straight to STOPPED if something fails."""

    NEW = auto()
    PREPARED = auto()
    RECORDING = auto()
    STOPPED = auto()


class Recording(Protocol):
    """The recorder interface that the controller uses."""

    notice: str | None

    def prepare(self) -> None: ...
    def start(self) -> None: ...
    def step(self) -> None: ...
    def stop(self) -> None: ...
    def save(self, path: Path) -> Path: ...
    def discard(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to record; with neither steps nor seconds, it lasts until it is finished.

    Attributes:
        seconds: duration, extended to the end of the step that is then running.
        first_step: None for the next possible step; a number that has passed means the same.
        out: the trace file to write; None lets the controller choose.
        timeout_s: after this many seconds without the end of a step, the capture ends and keeps what it has.
    """

    steps: int | None = None
    seconds: float | None = None
    first_step: int | None = None
    options: RecordOptions = field(default_factory=RecordOptions)
    out: Path | None = None
    timeout_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise UsageError("a capture has a number of steps or seconds, not both")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"a capture needs at least one step, not {self.steps}")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"a capture needs more than {self.seconds} seconds")


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """How a capture ended.

    Attributes:
        path: the trace file; None if nothing was kept.
        steps: number of complete steps recorded.
        problem: one sentence, if the result is not what was requested.
        gave_way: whether it ended because the program started a profiler of its own.
    """

    path: Path | None = None
    first_step: int | None = None
    steps: int = 0
    problem: str | None = None
    cancelled: bool = False
    gave_way: bool = False


class ProfilerRecording:
    """The part of a recorder that torch and XLA share.

    Only `save` raises: every other error is reported on stderr once, kept in `problem`, and leaves the program
    unchanged. Calls out of order do nothing, so that each may be repeated.

    Attributes:
        problem: what went wrong, in a sentence; None if nothing did.
        notice: what was requested but is not recorded, in a sentence; None for nothing.
        step_number: number of the current step, or of the next one.
    """

    def __init__(self, options: RecordOptions, first_step: int) -> None:
        self.options = options
        self.problem: str | None = None
        self.notice: str | None = None
        self.step_number = first_step
        self._state = RecorderState.NEW
        self._lock = Lock()
        self._annotation: Any = None
        self._held: object = None

    @property
    def is_recording(self) -> bool:
        return self._state is RecorderState.RECORDING

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Keep an error out of the training loop, and report it once."""
        with guard.attempt() as doing:
            yield
        if doing.error is None:
            return
        if self.problem is None:
            self.problem = f"{what}: {guard.sentence(doing.error)}"
            guard.tell(self.problem)
        self._after_error()

    def _after_error(self) -> None: ...

    def _mark_step(self, annotation: Any) -> None:
        self._annotation = annotation
        with unseen:
            annotation.__enter__()

    def _close_step(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            with unseen:
                annotation.__exit__(None, None, None)


class CaptureHandle:
    """A requested capture. Every method may be called from any thread."""

    def __init__(self, request: CaptureRequest, end: Callable[[CaptureHandle, bool], None]) -> None:
        self.request = request
        self._end = end
        self.has_begun = False
        self._result: CaptureResult | None = None
        self._done = threading.Event()

    @property
    def is_recording(self) -> bool:
        return self.has_begun and not self._done.is_set()

    @property
    def result(self) -> CaptureResult | None:
        return self._result

    def wait(self, timeout: float | None = None) -> CaptureResult:
        """Wait for the capture to end. Raises TimeoutError if it has not ended by then; it continues."""
        if not self._done.wait(timeout) or self._result is None:
            raise TimeoutError(f"the capture has not ended after {timeout} s")
        return self._result

    def finish(self) -> None:
        """End the capture at the end of the current step, and keep what was recorded."""
        self._end(self, True)

    def cancel(self) -> None:
        """End the capture now and discard the recording."""
        self._end(self, False)

    def settle(self, result: CaptureResult) -> None:
        self._result = result
        self._done.set()


class Capture:
    def __init__(self, handle: CaptureHandle, first_step: int) -> None:
        self.handle = handle
        self.first_step = first_step
        self.recorder: Recording | None = None
        self.started_s: float | None = None
        self.complete_steps = 0
        self.asked_to_finish = False
        self.is_abandoned = False

    def is_over(self, now_s: float) -> bool:
        """Whether, at the end of a step, everything requested is recorded."""
        request = self.handle.request
        if self.asked_to_finish:
            return True
        if request.steps is not None:
            return self.complete_steps >= request.steps
        return request.seconds is not None and now_s - (self.started_s or now_s) >= request.seconds

    def saved(self, new_path: Callable[[], Path], problem: str | None) -> CaptureResult:
        if self.started_s is None or self.recorder is None:
            self.discard()
            return CaptureResult(problem=problem or "the capture ended before its first step began")
        try:
            self.recorder.stop()
            path = self.recorder.save(self.handle.request.out or new_path())
        except (StepscopeError, OSError) as error:
            return CaptureResult(problem=f"{problem}; {error}" if problem else str(error))
        said = "; ".join(filter(None, [problem, self.recorder.notice])) or None
        return CaptureResult(path, self.first_step, self.complete_steps, said)

    def discard(self) -> None:
        if self.recorder is not None:
            self.recorder.discard()


_XLA: Final = {"start_trace": True, "stop_trace": False, "stop_and_get_fdo_profile": False}
_FUNCTIONS: Final = {
    "torch.autograd.profiler": {"_prepare_profiler": True, "_enable_profiler": True, "_disable_profiler": False},
    "jax.profiler": _XLA,
    "jax._src.profiler": _XLA,  # called by jax.profiler.trace
    "torch_xla.debug.profiler": _XLA,
}
"""Functions by module, each with whether a profiler is in use after the call."""
_NAMES: Final = {"torch.autograd.profiler": "torch.profiler", "torch_xla.debug.profiler": "torch_xla.debug.profiler"}

_watchers: list[OtherProfilers] = []
_originals: dict[tuple[str, str], Any] = {}


class OtherProfilers:
    """Detects profilers of torch and XLA that are not stepscope's.

    Args:
        give_way: called when one is about to begin while stepscope records.

    Attributes:
        seen: whether there ever was one.
        name: the program's name for it.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.seen = False
        self.name = "torch.profiler"
        self._give_way = give_way
        self._in_use = False
        self._our_own = False
        self._recording = False

    def watch(self) -> None:
        """Watch the imported modules; call it again after further imports."""
        modules = {name: sys.modules[name] for name in _FUNCTIONS if name in sys.modules}
        for name, module in modules.items():
            _wrap(name, module)
        if modules and self not in _watchers:
            self._in_use = _is_in_use()
            _watchers.append(self)

    def unwatch(self) -> None:
        """Stop watching; the last call restores the modules."""
        if self in _watchers:
            _watchers.remove(self)
            if not _watchers:
                _unwrap()

    def active(self) -> bool:
        return self._in_use

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Treat profiler calls inside the block as stepscope's own."""
        self._our_own = True
        try:
            yield
        finally:
            self._our_own = False

    def guard(self, recording: bool) -> None:
        """Set whether stepscope is recording, and must give way when another profiler begins."""
        self._recording = recording

    def _called(self, module: str, in_use: bool) -> None:
        if not self._our_own:
            self.name = _NAMES.get(module, "jax.profiler")
            if in_use and self._recording:
                self._give_way()
            self._in_use, self.seen = in_use, True


def _is_in_use() -> bool:
    if getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False):
        return True
    states = (
        getattr(sys.modules.get(name), "_profile_state", None)
        for name in ("jax._src.profiler", "torch_xla.debug.profiler")
    )
    return any(getattr(state, "profile_session", None) is not None for state in states)


def _wrap(name: str, module: Any) -> None:
    for function, in_use in _FUNCTIONS[name].items():
        original = getattr(module, function, None)
        if original is not None and (name, function) not in _originals:
            _originals[name, function] = original
            setattr(module, function, guard.around(original, before=functools.partial(_tell, name, in_use)))


def _unwrap() -> None:
    for (name, function), original in _originals.items():
        module = sys.modules.get(name)
        if module is not None:
            setattr(module, function, original)
    _originals.clear()


@guard.entry
def _tell(module: str, in_use: bool, *_: object, **__: object) -> None:
    for watcher in list(_watchers):
        watcher._called(module, in_use)
