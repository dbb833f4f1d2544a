"""The block of code recorded by `stepscope.profile`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from stepscope import guard
from stepscope.errors import StepscopeError, UsageError
from stepscope.record import schedule as schedules
from stepscope.record.annotations import tell_controller
from stepscope.record.input_stages import input_watch
from stepscope.record.manifest import RunManifest, rank_and_world_size
from stepscope.record.recorder import Recorder, copy_trace, profiler_is_active
from stepscope.record.run_folder import RunFolder, default_root, is_run_folder
from stepscope.record.schedule import RecordOptions

if TYPE_CHECKING:
    from stepscope import Diagnosis

_SUFFIXES: Final = (".json.gz", ".json")
_PACKAGE_FOLDER: Final = str(Path(__file__).resolve().parents[2])
_one_block = threading.Lock()
"""Held while a block of this process is open."""


class ProfileBlock:
    """An open or closed `with stepscope.profile(...)` block; `start` and `stop` do the same without `with`.

    Attributes:
        enabled: False for what `profile(enabled=False)` gives.
        step_number: number of the step that runs now, from 0.
        traces: the files saved so far.
        problem: what went wrong, in a sentence; None if nothing did.
    """

    enabled: Final = True

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        schedule: schedules.Schedule | None,
        options: RecordOptions,
        *,
        diagnose: bool = False,
        on_trace_ready: Callable[[ProfileBlock], Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.step_number = 0
        self.problem: str | None = None
        self._traces: list[Path] = []
        self._places = TracePlaces(out, name)
        self._schedule = schedule or schedules.every_step
        self._options = options
        self._diagnose = diagnose
        self._on_trace_ready = on_trace_ready
        self._recorder: Recorder | None = None
        self._action = schedules.NOTHING
        self._is_open = False
        self._is_new = False
        self._held: object = None

    @property
    def traces(self) -> tuple[Path, ...]:
        return tuple(self._traces)

    @property
    def is_recording(self) -> bool:
        return self._recorder is not None and self._recorder.is_recording

    def __enter__(self) -> ProfileBlock:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(failed=error is not None)

    def start(self) -> None:
        """Begin the block. Raises UsageError if PyTorch is not installed, or another recording runs in this process."""
        self._begin(schedules.action_of(self._schedule(0)))

    @guard.entry(raises=UsageError)
    def _begin(self, first: str) -> None:
        if find_spec("torch") is None:
            raise UsageError("profile: recording needs PyTorch, which is not installed here")
        if not _one_block.acquire(blocking=False):
            raise UsageError("profile: another profile block is open in this process; blocks cannot overlap")
        try:
            if profiler_is_active():
                raise UsageError("profile: another profiler of torch is running; only one can record at a time")
            self.step_number, self._is_open = 0, True
            self._held = guard.on_failure("", self._abandon)
            input_watch().install(self)
            self._enter(first)
        finally:
            if not self._is_open:
                _one_block.release()

    def step(self) -> None:
        """Mark the end of a step and the beginning of the next."""
        if self._is_open:
            self.step_number += 1
            self._goes_on(schedules.action_of(self._schedule(self.step_number)))
            self._hand_over(failed=False)
        tell_controller()

    @guard.entry
    def _goes_on(self, now: str) -> None:
        before = self._action
        goes_on = before in (schedules.RECORD,) and now in (schedules.RECORD, schedules.RECORD_AND_SAVE)
        if goes_on and self._recorder is not None:
            self._action = now
            self._recorder.step()
        else:
            self._leave(before, now)
            self._enter(now)

    def stop(self) -> None:
        self._end(failed=False)

    def _abandon(self) -> None:
        self._is_open, self._recorder = False, None
        self.problem = self.problem or "stepscope failed, and the program continued without it"
        guard.attempted(lambda: input_watch().uninstall(self))
        _one_block.release()

    def diagnosis(self) -> Diagnosis | None:
        """Diagnose why the steps of the last trace are slow; None if no trace was saved.

        Raises TraceError if the file can no longer be read.
        """
        if not self._traces:
            return None
        import stepscope

        return stepscope.diagnose(stepscope.open_trace(self._traces[-1]))

    def export_chrome_trace(self, path: str | os.PathLike[str], use_python_export: bool = False) -> None:
        """Copy the last trace to another file, compressed or not by its name; called by torch.profiler's handlers.

        Args:
            use_python_export: passed by torch's handlers and ignored.

        Raises:
            UsageError: there is no trace. A file that cannot be written is reported on stderr and not raised.
        """
        if not self._traces:
            raise UsageError("profile: no trace was saved yet")
        with self._reported("the trace was not copied", StepscopeError, OSError):
            copy_trace(self._traces[-1], Path(path))

    def _enter(self, action: str) -> None:
        self._action = action
        if action == schedules.NOTHING:
            return
        if self._recorder is None:
            self._recorder = Recorder(self._options, first_step=self.step_number)
            self._recorder.prepare()
        if action != schedules.WARM_UP:
            self._recorder.step_number = self.step_number
            self._recorder.start()

    def _leave(self, before: str, now: str) -> None:
        """End a phase that does not continue: save a finished cycle, discard a warm-up without a recording."""
        if before in (schedules.RECORD, schedules.RECORD_AND_SAVE):
            self._save()
        elif before == schedules.WARM_UP and now == schedules.NOTHING and self._recorder is not None:
            self._recorder.discard()
            self._recorder = None

    def _end(self, *, failed: bool) -> None:
        if self._is_open:
            self._close()
            self._hand_over(failed=failed)
            self._wind_up(failed)

    @guard.entry
    def _close(self) -> None:
        self._is_open = False
        if self._action in (schedules.RECORD, schedules.RECORD_AND_SAVE):
            self._save()
        elif self._recorder is not None:
            self._recorder.discard()
        self._recorder = None
        guard.off(self._held)
        input_watch().uninstall(self)
        _one_block.release()

    def _hand_over(self, *, failed: bool) -> None:
        """Pass a saved trace to the program's handler, whose errors are the program's own."""
        is_new, self._is_new = self._is_new, False
        if not is_new or self._on_trace_ready is None:
            return
        if failed:
            with self._reported("on_trace_ready failed", Exception):
                self._on_trace_ready(self)
        else:
            self._on_trace_ready(self)

    @guard.entry
    def _wind_up(self, failed: bool) -> None:
        with contextlib.suppress(StepscopeError, OSError):  # an error in the list of runs must not end the program
            self._places.ended(failed=failed)
        if self._diagnose and self._traces and rank_and_world_size()[0] == 0:
            with self._reported("the trace could not be diagnosed", OSError):
                print(_diagnosis_text(self._traces[-1]), flush=True)

    def _save(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        first = recorder.first_step
        recorder.stop()
        self.problem = self.problem or recorder.problem
        if recorder.problem is not None:  # already reported by the recorder
            recorder.discard()
            return
        with self._reported("the trace was not saved", StepscopeError, OSError):
            self._traces.append(recorder.save(self._places.next()))
            self._is_new = True
        recorder.discard()
        if self._is_new and rank_and_world_size()[0] == 0:
            guard.tell(f"{_steps(first, recorder.step_number)} recorded: {self._traces[-1]}")

    @contextlib.contextmanager
    def _reported(self, what: str, *kinds: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            self.problem = self.problem or f"{what}: {error}"
            guard.tell(f"{what}: {error}")


@guard.entry(raises=UsageError)
def open_block(
    out: str | os.PathLike[str] | None,
    schedule: schedules.Schedule | None,
    options: RecordOptions,
    *,
    diagnose: bool,
    on_trace_ready: Callable[[ProfileBlock], Any] | None,
    name: str | None,
) -> ProfileBlock | None:
    """Make the block of `stepscope.profile`, which documents the arguments; None if that failed."""
    return ProfileBlock(out, schedule, options, diagnose=diagnose, on_trace_ready=on_trace_ready, name=name)


class TracePlaces:
    """The paths of a block's traces, one after the other: a trace file, a folder, or a run folder.

    Raises UsageError if a file's name has another suffix.
    """

    def __init__(self, out: str | os.PathLike[str] | None, name: str | None) -> None:
        self._out = None if out is None else Path(os.path.abspath(os.path.expanduser(out)))
        self._name = name
        self._number = 0
        self._folder: RunFolder | None = None
        self._suffix = next((suffix for suffix in _SUFFIXES if str(self._out).endswith(suffix)), "")
        if self._out is not None and not self._suffix and self._out.suffix and not self._out.is_dir():
            raise UsageError(
                f"profile: out is a file that ends in {' or '.join(_SUFFIXES)}, or a folder, not {self._out.name!r}"
            )

    def next(self) -> Path:
        """Return the path of the next trace, which no other rank gets."""
        rank, world_size = rank_and_world_size()
        self._number += 1
        if self._out is None:
            self._folder = self._folder or _run_folder(self._name, world_size)
            return self._folder.new_trace_path(rank)
        if not self._suffix:
            folder = self._out / f"rank{rank}" if world_size > 1 else self._out
            return folder / f"trace-{self._number}.json.gz"
        stem = self._out.name.removesuffix(self._suffix)
        stem += f"-rank{rank}" if world_size > 1 else ""
        stem += f"-{self._number}" if self._number > 1 else ""
        return self._out.with_name(stem + self._suffix)

    def ended(self, *, failed: bool) -> None:
        """Record the end in a run folder that the block created, and update the list of runs."""
        if self._folder is None or os.environ.get("STEPSCOPE_RUN") or rank_and_world_size()[0] != 0:
            return
        import time

        from stepscope.record.runs import RunIndex

        ended = self._folder.manifest().ended(time.time(), int(failed), self._folder.recordings())
        self._folder.write_manifest(ended)
        RunIndex().add(self._folder)


def _run_folder(name: str | None, world_size: int) -> RunFolder:
    """Return the run folder of `stepscope run`, or a new one; ranks of one launcher share it."""
    running = os.environ.get("STEPSCOPE_RUN")
    if running:
        return RunFolder.open(running)
    import time

    manifest = RunManifest.begin([sys.executable, *sys.argv], time.time(), options={}, redact=False)
    if world_size > 1 and name is None:
        name = f"{Path(sys.argv[0]).stem or 'run'}-{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}"
    try:
        folder = RunFolder.create(None, name, manifest)
    except UsageError:
        place = default_root() / (name or "")
        if world_size == 1 or not is_run_folder(place):
            raise
        return RunFolder.open(place)  # another rank made it first
    from stepscope.record.runs import RunIndex

    with contextlib.suppress(StepscopeError, OSError):  # an error in the list of runs must not end the program
        RunIndex().add(folder)
    return folder


def _diagnosis_text(path: Path) -> str:
    """Return the output of `stepscope diagnose`, run in another process to leave the program's memory alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_RUN")}
    places = [_PACKAGE_FOLDER, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", "stepscope", "diagnose", str(path)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.rstrip("\n")


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
