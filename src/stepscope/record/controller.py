"""Captures of the running program: pending requests, and when each begins and ends.

Each process has one controller. It is notified of the end of every step, and between two steps it has the recorder
prepared, started or stopped. Imports only the standard library; the recorder, which needs torch, is imported for the
first capture.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope import guard
from stepscope.record.captures import (
    PATIENCE_S,
    Capture,
    CaptureHandle,
    CaptureRequest,
    CaptureResult,
    OtherProfilers,
    Recording,
)
from stepscope.record.program_objects import unseen
from stepscope.record.schedule import RecordOptions
from stepscope.threads import Lock, Thread

__all__ = [
    "CaptureHandle",
    "CaptureRequest",
    "CaptureResult",
    "MakeRecording",
    "Recording",
    "StepController",
    "StepListener",
    "StepSource",
    "controller",
    "set_controller",
]


_AT_LEAST_S: Final = 0.05
_LONGEST_END_S: Final = 30.0
_GAVE_WAY: Final = "the program started {} itself, so the recording was ended"


class StepSource(IntEnum):
    """What marks the end of a step, from the least reliable source to the most."""

    NONE = 0
    JITTED = 1
    FORWARD = 2
    CALL = 3
    LOADER = 4
    OPTIMIZER = 5
    ANNOTATION = 6
    EXPLICIT = 7

    @property
    def marks_steps(self) -> bool:
        """Whether the program marks its steps itself, so that XLA's profile already contains them."""
        return self >= StepSource.ANNOTATION


MakeRecording = Callable[[RecordOptions, int], Recording]


class StepListener(Protocol):
    """Is notified of steps, on the thread that runs them."""

    def step_ended(self, step: int) -> None:
        """A step has ended and `step` is about to begin; captures that begin with it may still be requested."""

    def step_begins(self, step: int) -> None:
        """All work between the steps is done; may end the program by SystemExit."""


class StepController:
    """Counts the steps of this process and records the requested ones.

    Args:
        new_path: returns the path of the next trace; None for a temporary folder.
        make_recording: makes a recorder for the options and the number of the first step.

    Attributes:
        source: the best step source seen so far.
        on_source: called when a better source is seen.
        others: the profilers that the program starts itself.
        keeps_watch: whether to watch for these even without a request. A profiler that was prepared unseen and is
            started while stepscope records crashes the program.
        stays: whether captures may be requested at any time, as by an agent, so that steps are counted to the end.
        uses_jax: whether a step was detected through JAX.
        expects_calls: whether a function around forward calls was called again, which may turn out to mark steps.
    """

    def __init__(
        self, new_path: Callable[[], Path] | None = None, *, make_recording: MakeRecording | None = None
    ) -> None:
        self.source = StepSource.NONE
        self.listener: StepListener | None = None
        self.on_source: Callable[[StepSource], None] | None = None
        self.others = OtherProfilers(self._give_way)
        self.keeps_watch = False
        self.stays = False
        self.uses_jax = False
        self.expects_calls = False
        self._new_path = new_path or _temporary_path
        self._make_recording = make_recording or self._recording_of_its_own
        self._step = 0
        self._thread = 0
        self._last_boundary_s = time.monotonic()
        self._lock = Lock()
        self._waiting: deque[CaptureHandle] = deque()
        self._capture: Capture | None = None
        self._busy = False
        self._watched = False
        self._wake = threading.Event()

    @property
    def is_recording(self) -> bool:
        return self._capture is not None and self._capture.started_s is not None

    @property
    def is_busy(self) -> bool:
        return self._busy

    def current_step(self) -> int:
        """The number of the current step: how many have ended before it."""
        return self._step

    @guard.entry
    def step_boundary(self, source: StepSource = StepSource.EXPLICIT) -> None:
        """Report the end of a step, as seen by `source`; it is ignored if a better source is known.

        This is a guard entry: it raises only the SystemExit by which a listener ends the program.
        """
        with unseen:
            self._boundary(source)

    def _boundary(self, source: StepSource) -> None:
        if source is not self.source:
            if source < self.source:
                return
            self.source = source
            if self.on_source is not None:
                self.on_source(source)
        self._step += 1
        listener = self.listener
        if listener is not None:
            listener.step_ended(self._step)
        if self._busy:
            with self._lock:
                self._last_boundary_s = time.monotonic()
                self._thread = threading.get_ident()
                self._advance()
        if listener is not None:
            listener.step_begins(self._step)

    def request(self, request: CaptureRequest) -> CaptureHandle:
        """Request a capture; it begins between two steps, after all earlier requests."""
        handle = CaptureHandle(request, self._end)
        with self._lock:
            if not self._busy:
                self._last_boundary_s = time.monotonic()
                self.others.watch()
            self._waiting.append(handle)
            self._busy = True
            self._wake.set()
            if not self._watched:
                self._watched = True
                Thread(self._watch_captures).start()
        return handle

    def finish(self, problem: str) -> None:
        """End every capture, for example at the program's end; what was recorded is kept.

        Does not wait for a thread whose recording never returns because its device hangs.
        """
        if not self._lock.acquire(timeout_s=_LONGEST_END_S):
            return
        try:
            self._settle_capture(problem)
            if self._capture is not None:
                self._drop(self._capture)
            while self._waiting:
                self._waiting.popleft().settle(CaptureResult(problem=problem))
            self._rest()
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """After an internal error, discard every capture and stop all work."""
        self.listener = self.on_source = None
        self.stays = self.keeps_watch = False
        with guard.attempt():
            self.finish("stepscope failed")
        self._busy, self._capture = False, None
        self._waiting.clear()
        self._wake.set()
        with guard.attempt():
            self.others.unwatch()

    def forget(self) -> None:
        """In a forked process, drop the parent's captures without touching its profiler."""
        self._wake, self._watched = threading.Event(), False
        self._capture, self._busy = None, False
        self._waiting.clear()

    def _advance(self) -> None:
        if self._capture is not None and self._capture.is_abandoned:
            self._drop(self._capture)
        capture = self._capture or self._next_capture()
        if capture is None:
            return
        if capture.started_s is None or capture.recorder is None:
            self._prepare_or_start(capture)
            return
        capture.complete_steps += 1
        if capture.is_over(time.monotonic()):
            self._settle_capture(None)
            self._advance()  # the next request may begin with this very step
        else:
            capture.recorder.step()

    def _next_capture(self) -> Capture | None:
        """Start on the next request; its first step comes at the earliest after one warm-up step."""
        if not self._waiting:
            self._rest()
            return None
        handle = self._waiting.popleft()
        asked = handle.request.first_step
        first = self._step + 1 if asked is None else max(asked, self._step)
        self._capture = Capture(handle, first)
        return self._capture

    def _prepare_or_start(self, capture: Capture) -> None:
        if self.others.active():  # the program's own profiler has priority
            capture.first_step = max(capture.first_step, self._step + 2)
            return
        if self._step < capture.first_step - 1:
            return
        with self.others.ours():
            if capture.recorder is None:
                capture.recorder = self._make_recording(capture.handle.request.options, capture.first_step)
                capture.recorder.prepare()
            if self._step >= capture.first_step:
                capture.recorder.start()
                capture.started_s = time.monotonic()
                capture.handle.has_begun = True
        self.others.guard(True)

    def _settle_capture(self, problem: str | None) -> None:
        """End the current capture, keep its recording, and notify the waiting threads."""
        capture = self._capture
        if capture is None or capture.is_abandoned:
            return
        with self.others.ours():
            result = capture.saved(self._new_path, problem)
        if result.path is None:
            if problem and self._thread != threading.get_ident() and capture.started_s is not None:
                result = CaptureResult(problem=f"{problem}, and none of it could be kept")
            self._abandon(capture, result)
            return
        self._capture = None
        self.others.guard(False)
        capture.handle.settle(result)
        self._rest()

    def _abandon(self, capture: Capture, result: CaptureResult) -> None:
        """Discard a capture on the thread that runs the steps: on another thread, ending torch's profiler can crash."""
        capture.handle.settle(result)
        if capture.recorder is None or self._thread == threading.get_ident():
            self._drop(capture)
        else:
            capture.is_abandoned = True

    def _drop(self, capture: Capture) -> None:
        self._capture = None
        self.others.guard(False)
        with self.others.ours():
            capture.discard()
        self._rest()

    def _rest(self) -> None:
        """Drop all per-step work while nothing is requested."""
        self._busy = self._capture is not None or bool(self._waiting)
        if not self._busy:
            if not self.keeps_watch:
                self.others.unwatch()
            self._wake.set()

    def _end(self, handle: CaptureHandle, keep: bool) -> None:
        with self._lock:
            capture = self._capture
            if handle in self._waiting:
                self._waiting.remove(handle)
                handle.settle(CaptureResult(cancelled=not keep, problem="the capture ended before it began"))
            elif capture is None or capture.handle is not handle or capture.is_abandoned:
                return
            elif keep and capture.started_s is not None:
                capture.asked_to_finish = True
            elif keep:
                self._settle_capture(None)
            else:
                self._abandon(capture, CaptureResult(cancelled=True, problem="the capture was cancelled"))
            self._rest()

    @guard.entry
    def _give_way(self) -> None:
        """Give way to a profiler that the program starts: keep the complete steps, if any."""
        with self._lock:
            capture = self._capture
            if capture is not None and capture.is_abandoned:
                self._drop(capture)
            elif capture is not None and not capture.complete_steps:
                self._drop(capture)
                capture.handle.settle(CaptureResult(problem=_GAVE_WAY.format(self.others.name), gave_way=True))
            elif capture is not None:
                self._settle_capture(_GAVE_WAY.format(self.others.name))

    def _recording_of_its_own(self, options: RecordOptions, first_step: int) -> Recording:
        return new_recording(options, first_step, self.source, uses_jax=self.uses_jax)

    @guard.entry(in_background=True)
    def _watch_captures(self) -> None:
        """End captures that no longer see any step end; runs on its own thread."""
        while True:
            with self._lock:
                if not self._busy:
                    self._watched = False
                    return
                self._wake.clear()
                left_s = self._give_up_late_ones()
            self._wake.wait(max(left_s, _AT_LEAST_S))

    def _give_up_late_ones(self) -> float:
        """End captures without a step for too long; return the seconds until the next deadline."""
        waited_s = time.monotonic() - self._last_boundary_s
        left_s = [PATIENCE_S]
        capture = self._capture
        if capture is not None and not capture.is_abandoned:
            timeout_s = capture.handle.request.timeout_s
            if waited_s >= timeout_s:
                self._settle_capture(_no_step(timeout_s, recording=capture.started_s is not None))
            left_s.append(timeout_s - waited_s)
        for handle in list(self._waiting):
            timeout_s = handle.request.timeout_s
            if waited_s >= timeout_s:
                self._waiting.remove(handle)
                handle.settle(CaptureResult(problem=_no_step(timeout_s, recording=False)))
            left_s.append(timeout_s - waited_s)
        self._rest()
        return min(left_s)


_controller: StepController | None = None


def controller() -> StepController | None:
    return _controller


def set_controller(new: StepController | None) -> None:
    global _controller
    _controller = new


def _temporary_path() -> Path:
    return Path(tempfile.mkdtemp(prefix="stepscope-")) / "trace.json.gz"


def _no_step(timeout_s: float, *, recording: bool) -> str:
    if recording:
        return f"no step ended for {timeout_s:g} s, so the recording was ended"
    return f"no step ended within {timeout_s:g} s: the program is not in its loop, or its steps cannot be seen"


def new_recording(options: RecordOptions, first_step: int, source: StepSource, *, uses_jax: bool) -> Recording:
    """Make a recording that has not begun.

    Args:
        source: what marks the steps.
        uses_jax: whether steps were detected through JAX; a program may import JAX and train in torch.
    """
    if _torch_xla_runs():
        from stepscope.record.xla import TorchXlaProfiler, XlaRecorder

        return XlaRecorder(TorchXlaProfiler(), options, first_step=first_step, marks_steps=not source.marks_steps)
    is_torchs = source in (StepSource.FORWARD, StepSource.CALL, StepSource.OPTIMIZER)
    if "jax" in sys.modules and not is_torchs and (uses_jax or "torch" not in sys.modules):
        from stepscope.record.xla import JaxProfiler, XlaRecorder

        return XlaRecorder(JaxProfiler(), options, first_step=first_step, marks_steps=not source.marks_steps)
    from stepscope.record.recorder import Recorder

    return Recorder(options, first_step=first_step)


def _torch_xla_runs() -> bool:
    module: Any = sys.modules.get("torch_xla")
    is_initialized = getattr(getattr(module, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return bool(is_initialized is not None and is_initialized())
