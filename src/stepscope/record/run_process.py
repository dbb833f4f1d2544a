"""The options that `stepscope run`, `bench` or `sweep` passes to a process, and the helpers that it starts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.files import private_folder
from stepscope.record.manifest import rank_and_world_size
from stepscope.record.run_folder import RunFolder
from stepscope.record.schedule import RecordOptions

RUN: Final = "STEPSCOPE_RUN"
"""The environment variable with the run folder of a program that stepscope started."""
RUN_OPTIONS: Final = "STEPSCOPE_RUN_OPTIONS"
OPTIMIZER_PATIENCE_S: Final = 30.0
"""How long a program with an optimizer may take to step it before worse step sources count."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `stepscope run` for the processes of the program.

    Attributes:
        steps: number of steps to record.
        warmup: steps to wait for before; None for the defaults of `FirstRecording`.
        exit_after: end the program after the recording.
        redact: omit folder and machine names from the files beside the traces.
        serve: start an agent, through which more steps can be recorded at any time.
        telemetry: keep logged values and the machine's load.
        quiet: pin the process, and stop garbage collection while steps are recorded.
        seed: for the random generators of a quiet machine; None leaves them alone.
        energy: measure the energy of the steps after the recording.
        record: optional parts of the recording.
        measure: only time steps and record nothing (`stepscope bench`); the program ends after `steps`.
        apply: remedies to apply as the program starts, such as "fuse-optimizer" or "workers=4".
        losses: with `measure`, also keep the first value of each backward pass.
        trackers: record nothing, but keep what the program logs to W&B and TensorBoard (`stepscope sweep`).
    """

    steps: int = 5
    warmup: int | None = None
    exit_after: bool = False
    redact: bool = False
    serve: bool = False
    telemetry: bool = True
    quiet: bool = False
    seed: int | None = None
    energy: bool = False
    record: RecordOptions = field(default_factory=RecordOptions)
    measure: bool = False
    apply: tuple[str, ...] = ()
    losses: bool = False
    trackers: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunOptions:
        """Read the form written by `to_json`; unknown names are ignored."""
        values = {item.name: content[item.name] for item in fields(cls) if item.name in content}
        known = {item.name for item in fields(RecordOptions)}
        record = {name: bool(value) for name, value in (values.pop("record", None) or {}).items() if name in known}
        values["apply"] = tuple(map(str, values.get("apply") or ()))
        return cls(**values, record=RecordOptions(**record))

    @classmethod
    def parse(cls, text: str) -> RunOptions:
        return cls.from_json(json.loads(text or "{}"))


class BackgroundHelpers:
    """Telemetry and the quiet machine, started at a rank's first step, when its rank is known.

    Attributes:
        said: sentences for the end of the run, about what was done and what could not be.
    """

    def __init__(self, folder: Path, options: RunOptions, *, telemetry: bool) -> None:
        self.said: list[str] = []
        self._folder = folder
        self._options = options
        self._telemetry = telemetry
        self._started = False
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        """Start telemetry and pin the process; only the first call has an effect."""
        if self._started:
            return
        self._started = True
        rank, world_size = rank_and_world_size()
        if self._telemetry:
            from stepscope.record.telemetry.log import telemetry

            problem = telemetry(self._folder, rank=rank).problem
            self.said.extend([problem] if problem else [])
        if self._options.quiet:
            from stepscope.machine.quiet import prepare_quiet

            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            report = prepare_quiet(rank, int(local) if local.isdecimal() else world_size, seed=self._options.seed)
            self._undo.callback(report.undo)
            self.said.extend(report.sentences())

    def recording_begins(self) -> None:
        """Stop garbage collection for the recorded steps."""
        if self._options.quiet and self._started:
            from stepscope.machine.quiet import quiet_steps

            steps = self._undo.enter_context(quiet_steps())
            self.said.extend(f"Quiet machine: {phrase}." for phrase in [*steps.done, *steps.noise])

    def recording_ends(self) -> None:
        self._undo.close()


MOST_LOG_BYTES: Final = 256 * 2**20
"""Bytes of torch's log of compilation that a process writes; what is compiled later is not in it."""


def keep_compile_log(folder: RunFolder) -> None:
    """Let torch write what it compiles into the run's folder, unless the program has it written elsewhere.

    Its handler makes a file with the first compilation. If that fails, as on a full disk, only the log ends.
    """
    module = sys.modules.get("torch._logging._internal")
    handler = getattr(module, "LOG_TRACE_HANDLER", None)
    if getattr(handler, "root_dir", "") is None:
        log = _CompileLog(handler, folder.compile_logs)
        guard.on_failure("", log.end)


class _CompileLog:
    """Takes the records of torch's handler for compilations, and writes them into a folder."""

    def __init__(self, handler: Any, folder: Path) -> None:
        self._handler, self._folder = handler, folder
        self._emit = handler.emit
        self._give_back = (guard.put(handler, "emit", self.emit), guard.put(handler, "handleError", self._fail))

    def _fail(self, record: Any) -> None:
        """Hand on what the handler caught, which logging would print."""
        error = sys.exc_info()[1]
        if error is not None:
            raise error

    def emit(self, record: Any) -> None:
        """Write a record; called by the program's compilations, none of which an error here stops."""
        with guard.attempt():
            if self._handler.root_dir is None:
                private_folder(self._folder)
                self._handler.root_dir = str(self._folder)
            self._emit(record)
            stream = self._handler.stream
            if stream is None or stream.tell() < MOST_LOG_BYTES:
                return
        self.end()

    def end(self) -> None:
        """Leave the handler as it was, and write no more."""
        for give_back in self._give_back:
            give_back()
        self._handler.root_dir = None
        with guard.attempt():
            self._handler._close_stream()


def is_helper() -> bool:
    """Whether multiprocessing started this process as a helper rather than as a rank."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None and not is_distributed()


def is_distributed() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())


def end_program() -> None:
    """End the program as sys.exit(0) would; from another thread, end the main thread too."""
    if threading.current_thread() is not threading.main_thread():
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(SystemExit))
    raise SystemExit(0)


def optimizer_exists() -> bool:
    module: Any = sys.modules.get("torch.optim.optimizer")
    if module is None:
        return False
    optimizer: Any = module.Optimizer
    return any(issubclass(type(each), optimizer) for each in gc.get_objects())
