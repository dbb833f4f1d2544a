"""Code shared by the integrations: a profile block that a framework's hooks begin, step and end."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.errors import StepscopeError
from stepscope.record.annotations import tell_controller
from stepscope.record.controller import controller
from stepscope.record.profile import profile
from stepscope.record.schedule import schedule

DEFAULT_SCHEDULE: Final = schedule(skip_first=5, warmup=2, active=5, repeat=1)
"""Skips five steps, warms up for two, records five, and then leaves the training alone."""


class FrameworkRecording:
    """A profile block driven by a framework's hooks, which may be called in any order; none of them raises.

    Within `stepscope run`, which records by itself, only the steps are marked.

    Args:
        framework: its name, for messages.
        out: as in `stepscope.profile`.
        when: schedule of the recorded steps; None for DEFAULT_SCHEDULE.
        options: further arguments of `stepscope.profile`.

    Raises:
        UsageError: the suffix of `out` is not that of a trace.
    """

    def __init__(
        self,
        framework: str,
        out: str | os.PathLike[str] | None,
        when: Callable[[int], Any] | None,
        options: dict[str, Any],
    ) -> None:
        self._arguments = (framework, out, when, options)
        self._framework = framework
        self._block = profile(out, schedule=when or DEFAULT_SCHEDULE, **options)
        self._is_open = False
        self._steps = 0
        self._old_traces = 0
        self._process = os.getpid()

    @property
    def traces(self) -> tuple[Path, ...]:
        return self._block.traces

    @property
    def is_recording(self) -> bool:
        return self._block.is_recording

    @guard.entry
    def begin(self, obstacle: str = "") -> None:
        """Begin the loop. An `obstacle`, such as another profiler, is reported, and then nothing is recorded."""
        self.end()
        if within_run():
            return
        try:
            if obstacle:
                raise StepscopeError(obstacle)
            self._block.start()
        except StepscopeError as error:
            guard.tell(f"{self._framework} is not recorded: {error}")
            return
        self._is_open, self._steps, self._process = True, 0, os.getpid()
        self._old_traces = len(self._block.traces)
        atexit.register(self.end)

    @guard.entry
    def step(self) -> None:
        """Mark the end of a step."""
        if self._is_open:
            self._steps += 1
            self._block.step()
        elif within_run():
            tell_controller()

    @guard.entry
    def end(self) -> None:
        """Save the recording at the end of the loop, also when it was interrupted."""
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        atexit.unregister(self.end)
        self._block.stop()
        if len(self._block.traces) == self._old_traces and self._block.problem is None:
            steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
            guard.tell(
                f"nothing of {self._framework} was recorded: it ended after {steps}; use a schedule that begins sooner"
            )

    def __reduce__(self) -> tuple[type[FrameworkRecording], tuple[Any, ...]]:
        """Frameworks copy and pickle their callbacks: a copy starts without the recording in progress."""
        return FrameworkRecording, self._arguments


class RecordingCallback:
    """Base class of the callbacks for several frameworks.

    Args:
        out, schedule, options: as out, when and options of `FrameworkRecording`.
    """

    _framework = ""

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        schedule: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        self._recording = FrameworkRecording(self._framework, out, schedule, options)

    @property
    def traces(self) -> tuple[Path, ...]:
        """Paths of the files saved so far."""
        return self._recording.traces


def within_run() -> bool:
    """Whether `stepscope run` started this program and records it."""
    return bool(os.environ.get("STEPSCOPE_RUN")) and controller() is not None
