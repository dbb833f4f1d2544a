"""Captures of the running program: which are asked for, and when they begin and end.

One controller a process. It hears of every step's end, and between two steps it has the recorder prepared, started
or stopped. Imports only the standard library; the recorder, which needs torch, comes when the first capture does.
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
from stepscope.record.schedule import RecordOptions

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
_GAVE_WAY: Final = "the program started {} itself, so the recording was ended"


class StepSource(IntEnum):
    """What shows where a step ends, from the least certain to the most."""

    NONE = 0
    JITTED = 1
    FORWARD = 2
    LOADER = 3
    OPTIMIZER = 4
    ANNOTATION = 5
    EXPLICIT = 6

    @property
    def marks_steps(self) -> bool:
        """Whether the steps stand in XLA's profile already, because the program marks them itself."""
        return self >= StepSource.ANNOTATION


MakeRecording = Callable[[RecordOptions, int], Recording]


class StepListener(Protocol):
    """Hears of steps, on the thread that takes them."""

    def step_ended(self, step: int) -> None:
        """A step has ended, and `step` is about to begin; captures that begin with it may still be asked for."""

    def step_begins(self, step: int) -> None:
        """Everything that was due between the steps is done; may end the program by SystemExit."""


class StepController:
    """Counts the steps of this process and records those that are asked for.

    Args:
        new_path: gives the file for a trace; None for a temporary folder.
        make_recording: makes a recorder for the options and the number of the first step.

    Attributes:
        source: what marks the steps: the best that was seen so far.
        on_source: called when a better source was seen.
        others: the profilers that the program starts itself.
        keeps_watch: whether to look out for these also while nothing is asked for. One that was prepared unseen, and
            is started when stepscope records, takes the program down.
        stays: whether captures may be asked for at any time, as by an agent, so that steps are counted to the end.
        uses_jax: whether a sign of steps came from JAX.
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
        self._new_path = new_path or _temporary_path
        self._make_recording = make_recording or self._recording_of_its_own
        self._step = 0
        self._thread = 0
        self._last_boundary_s = time.monotonic()
        self._lock = threading.RLock()
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
        """The number of the step that runs now: how many ended before it."""
        return self._step

    @guard.entry
    def step_boundary(self, source: StepSource = StepSource.EXPLICIT) -> None:
        """A step has ended, as `source` shows; what a better source contradicts is passed over.

        An entry of the guard's: raises nothing but the SystemExit by which a listener ends the program.
        """
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
        """Ask for a capture; it begins between two steps, after those that were asked for earlier."""
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
                threading.Thread(target=self._watch_captures, name="stepscope-captures", daemon=True).start()
        return handle

    def finish(self, problem: str) -> None:
        """End everything, such as because the program ends; what was recorded is kept."""
        with self._lock:
            self._settle_capture(problem)
            if self._capture is not None:
                self._drop(self._capture)
            while self._waiting:
                self._waiting.popleft().settle(CaptureResult(problem=problem))
            self._rest()

    def abandon(self) -> None:
        """After an error of ours: keep nothing, and cost nothing more."""
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
        """In a process that was forked: drop what belongs to the other one, without touching its profiler."""
        self._lock, self._wake, self._watched = threading.RLock(), threading.Event(), False
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
            self._advance()  # the one that was asked for next may begin with this very step
        else:
            capture.recorder.step()

    def _next_capture(self) -> Capture | None:
        """Take up the next request; its first step comes, at the earliest, after one in which the profiler warms up."""
        if not self._waiting:
            self._rest()
            return None
        handle = self._waiting.popleft()
        asked = handle.request.first_step
        first = self._step + 1 if asked is None else max(asked, self._step)
        self._capture = Capture(handle, first)
        return self._capture

    def _prepare_or_start(self, capture: Capture) -> None:
        if self.others.active():  # the program's own profiler goes first
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
        """End the capture under way, keep what it recorded, and tell whoever waits."""
        capture = self._capture
        if capture is None or capture.is_abandoned:
            return
        with self.others.ours():
            result = capture.saved(self._new_path, problem)
        if result.path is None:
            if problem and self._thread != threading.get_ident() and capture.started_s is not None:
                result = CaptureResult(problem=f"{problem}, and nothing of it could be kept")
            self._abandon(capture, result)
            return
        self._capture = None
        self.others.guard(False)
        capture.handle.settle(result)
        self._rest()

    def _abandon(self, capture: Capture, result: CaptureResult) -> None:
        """Keep nothing of it. What torch records can take the program down when another thread ends it, so that is
        left to the thread that takes the steps."""
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
        """Cost nothing any more where nothing is asked for."""
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
        """The program starts a profiler of its own: keep the whole steps there are, if any."""
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
        """On a thread of its own: end the captures that no step comes by for."""
        while True:
            with self._lock:
                if not self._busy:
                    self._watched = False
                    return
                self._wake.clear()
                left_s = self._give_up_late_ones()
            self._wake.wait(max(left_s, _AT_LEAST_S))

    def _give_up_late_ones(self) -> float:
        """End what no step has come by for too long; returns in how many seconds that may next be so."""
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
    """A recording that has not begun.

    Args:
        source: what shows where steps end.
        uses_jax: whether JAX showed any; a program may import it and do its steps in torch.
    """
    if _torch_xla_runs():
        from stepscope.record.xla import TorchXlaProfiler, XlaRecorder

        return XlaRecorder(TorchXlaProfiler(), options, first_step=first_step, marks_steps=not source.marks_steps)
    is_torchs = source in (StepSource.FORWARD, StepSource.OPTIMIZER)
    if "jax" in sys.modules and not is_torchs and (uses_jax or "torch" not in sys.modules):
        from stepscope.record.xla import JaxProfiler, XlaRecorder

        return XlaRecorder(JaxProfiler(), options, first_step=first_step, marks_steps=not source.marks_steps)
    from stepscope.record.recorder import Recorder

    return Recorder(options, first_step=first_step)


def _torch_xla_runs() -> bool:
    """Whether PyTorch/XLA has a device in use, and is not merely imported."""
    module: Any = sys.modules.get("torch_xla")
    is_initialized = getattr(getattr(module, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return bool(is_initialized is not None and is_initialized())
