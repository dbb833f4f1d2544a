"""XLA's profilers in this process, JAX's and PyTorch/XLA's, and a recording with one of them.

Both write an `.xplane.pb` file and record the device as well as the host. Imports only what the program has imported.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.files import private_folder, whole_file
from stepscope.record.captures import ProfilerRecording, RecorderState
from stepscope.record.run_folder import xplane_name
from stepscope.record.schedule import RecordOptions

STEP_NAME: Final = "step"
"""Name of the step events that stepscope adds; the number is the event's `step_num`."""


class XlaProfiler(Protocol):
    def start(self, folder: Path, options: RecordOptions) -> None:
        """Begin recording; the profile will be written below the folder."""

    def stop(self) -> None: ...

    def step(self, number: int) -> AbstractContextManager[Any]: ...

    def wait(self) -> None: ...


class JaxProfiler:
    def start(self, folder: Path, options: RecordOptions) -> None:
        """Begin recording; Python frames only with `stacks`, since they are many."""
        profiler: Any = sys.modules["jax"].profiler
        if not hasattr(profiler, "ProfileOptions"):  # absent before jax 0.5
            profiler.start_trace(str(folder))
            return
        chosen = profiler.ProfileOptions()
        chosen.python_tracer_level = int(options.stacks)
        profiler.start_trace(str(folder), profiler_options=chosen)

    def stop(self) -> None:
        profiler: Any = sys.modules["jax"].profiler
        profiler.stop_trace()

    def step(self, number: int) -> AbstractContextManager[Any]:
        profiler: Any = sys.modules["jax"].profiler
        mark: AbstractContextManager[Any] = profiler.TraceAnnotation(STEP_NAME, _r=1, step_num=number)
        return mark

    def wait(self) -> None:
        """Wait for every live array, and so for the work that computes it."""
        jax: Any = sys.modules["jax"]
        for array in jax.live_arrays():
            with guard.attempt():  # donated to a later call, or the result of a failed computation
                array.block_until_ready()


class TorchXlaProfiler:
    def start(self, folder: Path, options: RecordOptions) -> None:
        import_module("torch_xla.debug.profiler").start_trace(str(folder))

    def stop(self) -> None:
        import_module("torch_xla.debug.profiler").stop_trace()

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Return a StepTrace's event without the synchronisation at its end."""
        return torch_xla_event(STEP_NAME, _r=1, step_num=number)

    def wait(self) -> None:
        import_module("torch_xla.core.xla_model").wait_device_ops()


def torch_xla_event(name: str, **stats: Any) -> AbstractContextManager[Any]:
    """Return a plain profile event; inside PyTorch/XLA's own annotations, torch_xla.sync() is not allowed."""
    annotation: Any = import_module("torch_xla.debug.profiler").Trace
    event: AbstractContextManager[Any] = annotation.__bases__[0](name, **stats)
    return event


_COPY_BYTES: Final = 1 << 20


class XlaRecorder(ProfilerRecording):
    """Records XLA's profile, host events and devices. Every method may be called from any thread.

    Args:
        options: only `stacks` has an effect.
        marks_steps: mark the steps; False if the program does so itself.
    """

    def __init__(
        self, profiler: XlaProfiler, options: RecordOptions, *, first_step: int = 0, marks_steps: bool = True
    ) -> None:
        super().__init__(options, first_step)
        self._profiler = profiler
        self._marks_steps = marks_steps
        self._folder: Path | None = None

    def prepare(self) -> None:
        """Start and stop the profiler once, since its first start is slow; nothing is kept."""
        with self._lock, self._guarded("the profiler could not be prepared"):
            if self._state is RecorderState.NEW:
                self._state = RecorderState.STOPPED  # unless the calls below succeed
                self._begin()
                self._end()
                self._state = RecorderState.PREPARED

    def start(self) -> None:
        self.prepare()
        with self._lock, self._guarded("the recording could not be started"):
            if self._state is RecorderState.PREPARED:
                self._state = RecorderState.STOPPED
                self._begin()
                self._state = RecorderState.RECORDING
                self._open_step()

    def step(self) -> None:
        with self._lock, self._guarded("a step could not be marked"):
            if self._state is RecorderState.RECORDING:
                self._close_step()
                self.step_number += 1
                self._open_step()

    def stop(self) -> None:
        """End the recording after the devices have finished the recorded work; it can then be saved."""
        with self._lock:
            if self._state is RecorderState.RECORDING:
                self._state = RecorderState.STOPPED
                with self._guarded("the last step could not be marked"):
                    self._close_step()
                with self._guarded("the devices could not be waited for"):
                    self._profiler.wait()
                with self._guarded("the profiler could not be stopped"):
                    self._profiler.stop()

    def save(self, path: Path) -> Path:
        """Write the profile, complete or not at all, beside `path` with suffix .xplane.pb; return its path.

        Raises UsageError if nothing was recorded, it was saved before, or the file cannot be written.
        """
        self.stop()
        with self._lock:
            found = sorted(self._folder.rglob("*.xplane.pb")) if self._folder is not None else []
            if not found:
                raise UsageError(self.problem or "nothing was recorded, so there is no trace to save")
            place = xplane_name(path)
            try:
                private_folder(place.parent, tighten=False)
                with found[0].open("rb") as source, whole_file(place, private=True) as file:
                    shutil.copyfileobj(source, file, _COPY_BYTES)
            except OSError as error:
                raise UsageError(f"the trace cannot be written to {place}: {error}") from error
            self._remove_folder()
            return place

    def discard(self) -> None:
        with self._lock:
            self.stop()
            self._state = RecorderState.STOPPED
            self._remove_folder()

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stepscope-"))
        self._held = guard.on_failure("the recording under way", self._abandon)
        with contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.callback(self._remove_folder)
            self._profiler.start(self._folder, self.options)
            unless_it_starts.pop_all()

    def _end(self) -> None:
        try:
            self._profiler.stop()
        finally:
            self._remove_folder()

    def _abandon(self) -> None:
        """After an internal error, stop the profiler the shortest way and discard the recording."""
        was_on, self._state = self._state is RecorderState.RECORDING, RecorderState.STOPPED
        guard.attempted(self._close_step)
        if was_on:
            guard.attempted(self._profiler.stop)
        self._remove_folder()

    def _remove_folder(self) -> None:
        guard.off(self._held)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _open_step(self) -> None:
        if self._marks_steps:
            self._mark_step(self._profiler.step(self.step_number))
