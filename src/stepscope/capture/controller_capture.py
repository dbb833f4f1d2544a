"""One capture: what was asked for, how far it is, and how it ended. Imports only the standard library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from stepscope.capture.options import RecordOptions
from stepscope.errors import StepscopeError, UsageError

PATIENCE_S: Final = 60.0


class Recording(Protocol):
    """What the controller needs of `stepscope.capture.recorder.Recorder`."""

    notice: str | None

    def prepare(self) -> None: ...
    def start(self) -> None: ...
    def step(self) -> None: ...
    def stop(self) -> None: ...
    def save(self, path: Path) -> Path: ...
    def discard(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to record. With neither steps nor seconds it lasts until it is finished.

    Attributes:
        steps: how many steps.
        seconds: for how long; the step that runs then is recorded whole.
        first_step: number of the first step; None for the next that can be. One that has passed means the next.
        options: what to record besides times.
        out: the trace file to write; None for the controller's choice.
        timeout_s: seconds without the end of a step after which the capture is given up, and what it has is kept.
    """

    steps: int | None = None
    seconds: float | None = None
    first_step: int | None = None
    options: RecordOptions = field(default_factory=RecordOptions)
    out: Path | None = None
    timeout_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise UsageError("a capture lasts either some steps or some seconds, not both")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"a capture has at least one step, not {self.steps}")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"a capture lasts longer than {self.seconds} seconds")


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """How a capture ended.

    Attributes:
        path: the trace file; None where nothing was kept.
        first_step: number of the first recorded step.
        steps: how many were recorded to their end.
        problem: one sentence, where it is not what was asked for.
        cancelled: whether it was cancelled.
        gave_way: whether it ended because the program started a profiler of its own.
    """

    path: Path | None = None
    first_step: int | None = None
    steps: int = 0
    problem: str | None = None
    cancelled: bool = False
    gave_way: bool = False


class CaptureHandle:
    """A capture that was asked for. Every method may be called from any thread."""

    def __init__(self, request: CaptureRequest, end: Callable[[CaptureHandle, bool], None]) -> None:
        self.request = request
        self._end = end
        self.has_begun = False
        self._result: CaptureResult | None = None
        self._done = threading.Event()

    @property
    def is_recording(self) -> bool:
        """Whether its first step has begun."""
        return self.has_begun and not self._done.is_set()

    @property
    def result(self) -> CaptureResult | None:
        """How it ended; None as long as it has not."""
        return self._result

    def wait(self, timeout: float | None = None) -> CaptureResult:
        """Wait for its end, `timeout` seconds at the longest.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
        """
        if not self._done.wait(timeout) or self._result is None:
            raise TimeoutError(f"the capture has not ended after {timeout} s")
        return self._result

    def finish(self) -> None:
        """End it at the end of the current step, and keep what was recorded."""
        self._end(self, True)

    def cancel(self) -> None:
        """End it now, and keep nothing."""
        self._end(self, False)

    def settle(self, result: CaptureResult) -> None:
        self._result = result
        self._done.set()


class Capture:
    """The capture that is under way: its handle, its recorder, and how far it is."""

    def __init__(self, handle: CaptureHandle, first_step: int) -> None:
        self.handle = handle
        self.first_step = first_step
        self.recorder: Recording | None = None
        self.started_s: float | None = None
        self.complete_steps = 0
        self.asked_to_finish = False
        self.is_abandoned = False

    def is_over(self, now_s: float) -> bool:
        """Whether, at the end of a step, everything that was asked for is recorded."""
        request = self.handle.request
        if self.asked_to_finish:
            return True
        if request.steps is not None:
            return self.complete_steps >= request.steps
        return request.seconds is not None and now_s - (self.started_s or now_s) >= request.seconds

    def saved(self, new_path: Callable[[], Path], problem: str | None) -> CaptureResult:
        """Stop recording and write the trace."""
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
        """Stop and keep nothing."""
        if self.recorder is not None:
            self.recorder.discard()
