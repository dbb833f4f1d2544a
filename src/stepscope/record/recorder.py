"""One recording with torch.profiler in the user's process, from warm-up to trace file."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.files import make_private, private_file, private_folder
from stepscope.record.annotations import LoggingCalls
from stepscope.record.captures import ProfilerRecording, RecorderState
from stepscope.record.counters import WarmUp
from stepscope.record.equal_values import LookFacts, value_look
from stepscope.record.facts import FactsRecording, add_to_trace
from stepscope.record.lines import LineTracker
from stepscope.record.run_process import RUN_OPTIONS, RunOptions
from stepscope.record.schedule import RecordOptions
from stepscope.record.source_facts import metric_facts, of_sources, operations_of_source, source_facts, with_readers
from stepscope.record.step_objects import evaluation_watch
from stepscope.record.work_facts import work_facts
from stepscope.trace.line_records import LineRecords, lines_path, packed_sources, write_lines
from stepscope.trace.program_facts import ProgramFacts

_COPY_BYTES: Final = 1 << 20
_ERRORS_ONLY: Final = 2  # of the levels of messages in torch's C++ code


def write_trace(path: Path, export: Callable[[str], None], *, private: bool = True) -> None:
    """Let `export` write a plain file beside `path`, compress it if the name ends in `.gz`, and rename it.

    Args:
        private: readable for the owner only; otherwise the user's umask applies.

    Raises UsageError if the file cannot be written.
    """
    try:
        if private:
            private_folder(path.parent, tighten=False)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path, "plain", private=private) as plain, _partial(path, "packed", private=private) as packed:
            export(str(plain))
            if path.name.endswith(".gz"):
                _pack(plain, packed)
            written = packed if path.name.endswith(".gz") else plain
            if private:
                make_private(written)  # the profiler may have written a file there
            os.replace(written, path)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the trace cannot be written to {path}: {error}") from error


def copy_trace(source: Path, target: Path) -> None:
    """Copy a trace and its line records, compressing or decompressing by file name.

    Raises UsageError if a file cannot be read or written.
    """

    def export(plain: str) -> None:
        with _unpacked(source) as file, open(plain, "wb") as copy:
            shutil.copyfileobj(file, copy, _COPY_BYTES)
        if lines_path(source).is_file():
            shutil.copyfile(lines_path(source), lines_path(target))

    write_trace(target, export, private=False)


@contextlib.contextmanager
def _partial(path: Path, what: str, *, private: bool) -> Iterator[Path]:
    """Yield a temporary name beside `path` that does not look like a trace; the file is removed afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{what}.partial")
    try:
        if private:
            private_file(partial)
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _unpacked(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _pack(source: Path, target: Path) -> None:
    from isal import igzip

    opened: Any = igzip.open
    with source.open("rb") as file, opened(target, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(file, packed, _COPY_BYTES)


STEP_NAME: Final = "ProfilerStep#{}"
"""Name of torch.profiler's step events, which every reader of its traces knows."""

_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_WORLD_SIZES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

_only_one = threading.Lock()
"""Held while a recorder of this process uses the profiler."""


class Recorder(ProfilerRecording):
    """Records operators, kernels and steps of this process.

    Operators of all threads are recorded; with allocations (`memory`) only those of the thread that calls `start` and
    of its autograd threads, since torch's profiler cannot do both.

    `stop` may be called from any thread; if torch allows only the recorded thread to end a recording, it ends at that
    thread's next call.

    Attributes:
        first_step: number of the first step; set by `start`.
    """

    def __init__(self, options: RecordOptions, *, first_step: int = 0) -> None:
        super().__init__(options, first_step)
        self.first_step = first_step
        self._profiler: Any = None
        self._lines: LineTracker | None = None
        self._line_records: LineRecords | None = None
        self._logging_calls = LoggingCalls()
        self._warm_up: WarmUp | None = None
        self._facts_recording: FactsRecording | None = None
        self._facts: ProgramFacts | None = None
        self._holds_profiler = False
        self._thread: int | None = None
        self._stop_wanted = False
        self._unwanted = False
        self._saved: Path | None = None
        _living.add(self)

    def prepare(self) -> None:
        """Warm the profiler up; nothing before `start` is kept."""
        with self._lock, self._guarded("the profiler could not be prepared"):
            if self._state is RecorderState.NEW:
                self._state = RecorderState.STOPPED  # unless the calls below succeed
                self._choose_threads()
                self._held = guard.on_failure("the recording under way", self._abandon, thread=self._thread)
                self._take_profiler()
                self._profiler = _new_profiler(self.options)
                self._profiler.prepare_trace()
                self._warm_up = WarmUp()
                self._state = RecorderState.PREPARED

    def start(self) -> None:
        """Begin recording with step `step_number`."""
        self.prepare()
        with self._lock, self._guarded("the recording could not be started"):
            if self._state is RecorderState.PREPARED:
                self._state = RecorderState.STOPPED
                warm_up = self._warm_up.figures() if self._warm_up is not None else None
                with _unprinted_first_warning() if self.options.memory else contextlib.nullcontext():
                    self._profiler.start_trace()
                self._state = RecorderState.RECORDING
                self.first_step = self.step_number
                _add_rank(self._profiler)
                if self.options.lines:
                    self._lines = LineTracker()
                    self._lines.start()
                self._facts_recording = FactsRecording(warm_up=warm_up)
                self._facts_recording.start()
                self._logging_calls.start()
                self._open_step()

    def step(self) -> None:
        if self._stop_wanted:
            self.stop()
        if self._state is RecorderState.RECORDING:
            with self._lock, self._guarded("a step could not be marked"):
                if self._state is RecorderState.RECORDING:
                    self._close_step()
                    if self._facts_recording is not None:
                        self._facts_recording.step_ended(self.step_number)
                    self.step_number += 1
                    self._open_step()

    def stop(self) -> None:
        """End the recording, which can then be saved."""
        with self._lock:
            recording, prepared = self._state is RecorderState.RECORDING, self._state is RecorderState.PREPARED
            if not recording and not prepared:
                return
            if self._thread not in (None, threading.get_ident()):
                self._stop_wanted = True
                return
            self._state, self._stop_wanted = RecorderState.STOPPED, False
            self._logging_calls.stop()
            with self._guarded("the last step could not be marked"):
                self._close_step()
            if self._facts_recording is not None:
                self._facts_recording.step_ended(self.step_number)
            if self._lines is not None:
                self._lines.stop()
            with self._guarded("the profiler could not be stopped"):
                if prepared:  # the profiler leaves its warm-up only by recording
                    self._profiler.start_trace()
                self._profiler.stop_trace()
            if self._facts_recording is not None:
                self._facts = self._facts_recording.finish()
                self._facts_recording = None
            self._give_profiler_back()
            if prepared or self._unwanted:
                self._profiler = self._lines = None

    def save(self, path: Path) -> Path:
        """Write the trace, complete or not at all, compressed if the name of `path` ends in `.gz`.

        Raises UsageError if nothing was recorded, it was saved before, or the file cannot be written.
        """
        self.stop()
        with self._lock:
            if self._stop_wanted:
                raise UsageError("the trace can be saved when the recorded thread has reached its next step")
            if self._saved is not None:
                raise UsageError(f"the trace was already saved as {self._saved}")
            if self._profiler is None:
                raise UsageError(self.problem or "nothing was recorded, so there is no trace to save")
            if self._lines is not None:
                lines, self._lines = self._lines, None
                self._line_records = lines.records()
                self._facts = _with_source(self._facts, self._line_records)
                guard.attempted(lambda: _keep_sources(self._line_records))
            try:
                private_folder(path.parent, tighten=False)
                write_lines(self._line_records, path)
                write_trace(path, self._export)
            except OSError as error:
                raise UsageError(f"the trace cannot be written to {path}: {error}") from error
            finally:
                if not path.exists():
                    with contextlib.suppress(OSError):
                        lines_path(path).unlink(missing_ok=True)
            self._saved, self._profiler, self._line_records = path, None, None  # the profiler writes a trace only once
            return path

    def _export(self, path: str) -> None:
        self._profiler.export_chrome_trace(path)
        add_to_trace(Path(path), self._facts)

    def discard(self) -> None:
        with self._lock:
            self._unwanted = True
            self.stop()
            if self._state is RecorderState.NEW:
                self._state = RecorderState.STOPPED
            if self._state is RecorderState.STOPPED:
                self._profiler = self._lines = None

    def _choose_threads(self) -> None:
        """Record allocations on the main thread only: torch (2.13) crashes when the recorded thread ends earlier."""
        if not self.options.memory:
            return
        if threading.current_thread() is threading.main_thread():
            self._thread = threading.get_ident()
        else:
            self.options = replace(self.options, memory=False)
            self.notice = "allocations were not recorded, because the steps run on another thread than the main one"

    def leave_child(self) -> None:
        """In a forked child, end the inherited profiler, which would keep about 1 kB for each of the child's operators.

        With a device, ending the parent's profiler is not safe; the child's first thread is then not recorded.
        """
        if self._state not in (RecorderState.PREPARED, RecorderState.RECORDING):
            return
        if self._state is RecorderState.PREPARED:
            self._profiler = None
        elif len(_activities()) > 1:
            self._profiler = None
            guard.attempted(_record_nothing)
        self._abandon()

    def _abandon(self) -> None:
        """After an internal error, stop the profiler the shortest way and discard the recording."""
        was_prepared, self._state = self._state is RecorderState.PREPARED, RecorderState.STOPPED
        lines, facts, profiler = self._lines, self._facts_recording, self._profiler
        self._profiler = self._lines = self._facts_recording = None
        guard.attempted(self._logging_calls.stop)
        guard.attempted(self._close_step)
        if facts is not None:
            guard.attempted(facts.abandon)
        if lines is not None:
            guard.attempted(lines.stop)
        if profiler is not None and was_prepared:  # it leaves its warm-up only by recording
            guard.attempted(profiler.start_trace)
        if profiler is not None and profiler_is_active():
            guard.attempted(profiler.stop_trace)
        self._give_profiler_back()

    def _open_step(self) -> None:
        from torch.autograd.profiler import record_function

        self._mark_step(record_function(STEP_NAME.format(self.step_number)))

    def _take_profiler(self) -> None:
        if not _only_one.acquire(blocking=False):
            raise UsageError("another recording of stepscope is running in this process")
        self._holds_profiler = True
        if profiler_is_active():
            raise UsageError("another profiler of torch is running in this process; only one can record at a time")

    def _give_profiler_back(self) -> None:
        guard.off(self._held)
        if self._holds_profiler:
            self._holds_profiler = False
            _only_one.release()

    def _after_error(self) -> None:
        if self._state is RecorderState.STOPPED:
            self._profiler = self._lines = None
            self._give_profiler_back()


def _record_nothing() -> None:
    import torch.autograd

    autograd: Any = torch.autograd
    autograd._enable_record_function(False)


_living: Final[weakref.WeakSet[Recorder]] = weakref.WeakSet()


@guard.entry
def _in_child() -> None:
    for each in list(_living):
        each.leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _with_source(facts: ProgramFacts | None, lines: LineRecords | None) -> ProgramFacts | None:
    """Add facts from the source of the recorded lines, and the findings of the look: equal values, unused gradients.

    Only bindings of names with hashed values, or that keep graphs, are kept.
    """
    if facts is None or lines is None:
        return facts
    look = value_look()
    seen = guard.attempted(look.facts) or LookFacts()
    files = [place.file for place in lines.locations]
    files += [stage.file for stage in facts.input_stages if stage.file is not None]
    files += [place.file for place in facts.waiting]
    loops, bindings = guard.attempted(lambda: source_facts(files)) or ((), ())
    functions, works = guard.attempted(lambda: work_facts(files)) or ((), ())
    wanted = {(each.file, each.line, each.name) for each in seen.values}
    wanted |= {(each.file, each.line, each.name) for each in seen.kept_graphs}
    kept = tuple(each for each in bindings if (each.file, each.function, each.name) in wanted)
    return msgspec.structs.replace(
        facts,
        backward=seen.backward,
        constants=seen.constants,
        sparse=seen.sparse,
        kept_graphs=seen.kept_graphs,
        loops=loops,
        bindings=kept,
        values=seen.values,
        evaluations=guard.attempted(evaluation_watch().facts),
        metrics=guard.attempted(lambda: metric_facts(files)) or (),
        functions=functions,
        works=works,
        operations=tuple(guard.attempted(lambda: of_sources(files, operations_of_source)) or ()),
        lists=guard.attempted(lambda: with_readers(look.lists())) or (),
        made=look.made.facts(),
    )


def _keep_sources(lines: LineRecords | None) -> None:
    """Keep the text of the files that the lines name, with which they are found again after the files have changed."""
    if lines is not None and not RunOptions.parse(os.environ.get(RUN_OPTIONS, "")).redact:
        lines.sources = packed_sources((place.file for place in lines.locations), lines.start_unix_ns)


def profiler_is_active() -> bool:
    module = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(module, "_is_profiler_enabled", False))


def _new_profiler(options: RecordOptions) -> Any:
    import torch.profiler

    module: Any = torch.profiler
    return module._KinetoProfile(  # `profile`, which counts steps of its own, leaves its counter in torch
        activities=_activities(),
        record_shapes=options.shapes,
        profile_memory=options.memory,
        with_stack=options.stacks,
        with_flops=options.flops,
        with_modules=options.modules,
        experimental_config=_experimental_config(options),
    )


@contextlib.contextmanager
def _unprinted_first_warning() -> Iterator[None]:
    """Around a profiler's start: free a block of before it while torch prints no warnings.

    torch (2.13) warns of the first such block, and then of each thousandth, although every recording frees some.
    """
    import torch

    block = torch.empty(1)
    yield
    with contextlib.suppress(OSError, ValueError):  # another build, whose library or flag has another name
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        before, level.value = level.value, max(level.value, _ERRORS_ONLY)
        del block
        level.value = before


def _activities() -> list[Any]:
    """Return the CPU and every present accelerator that this torch build can record."""
    import torch.profiler

    profiler: Any = torch.profiler
    found = [profiler.ProfilerActivity.CPU]
    supported = profiler.supported_activities()
    for activity, module in (("CUDA", "cuda"), ("XPU", "xpu"), ("HPU", "hpu"), ("MTIA", "mtia")):
        kind = getattr(profiler.ProfilerActivity, activity, None)
        device = getattr(torch, module, None)
        if kind in supported and device is not None and device.is_available():
            found.append(kind)
    return found


def _experimental_config(options: RecordOptions) -> Any:
    """Enable all threads and disable Python objects for events, as far as this torch version supports it.

    A profiler of all threads records no allocations (torch 2.13 and older).
    """
    from torch._C._profiler import _ExperimentalConfig

    config: Any = _ExperimentalConfig
    threads = {"profile_all_threads": not options.memory}
    for wanted in ({**threads, "trace_only": not options.stacks}, threads):
        with contextlib.suppress(TypeError):  # an older torch does not have this argument
            return config(**wanted)
    return None


def _add_rank(profiler: Any) -> None:
    """Add the launcher's rank and world size if torch.distributed does not know them yet."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return
    rank, world_size = _number(_RANKS), _number(_WORLD_SIZES)
    if rank is not None and world_size is not None:
        profiler.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": world_size}))


def _number(variables: tuple[str, ...]) -> int | None:
    value = next((os.environ[name] for name in variables if name in os.environ), "")
    return int(value) if value.isdecimal() else None
