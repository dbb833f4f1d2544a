"""What a process of a program that `stepscope run` started does with its steps: warm up, record a few, let go."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope import guard
from stepscope.record.controller import CaptureHandle, CaptureRequest, CaptureResult, StepController, StepSource
from stepscope.record.hooks import AllHooks
from stepscope.record.manifest import process_facts, rank_and_world_size
from stepscope.record.run_folder import LEFT, RunFolder
from stepscope.record.schedule import RecordOptions
from stepscope.record.step_times import TIMED_S, TIMED_STEPS, StepTimes

if TYPE_CHECKING:
    from stepscope.record.energy import EnergyMeter


class Company:
    """Starts with a rank's first step, when its rank is known; what it cannot do it says, and the program goes on.

    Attributes:
        said: sentences for the end of the run, about what was done and what could not be.
    """

    def __init__(self, folder: Path, *, telemetry: bool, quiet: bool, seed: int | None) -> None:
        self.said: list[str] = []
        self._folder = folder
        self._telemetry = telemetry
        self._quiet = quiet
        self._seed = seed
        self._begun = False
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        """Start telemetry and pin the process; only the first call does anything."""
        if self._begun:
            return
        self._begun = True
        rank, world_size = rank_and_world_size()
        if self._telemetry:
            from stepscope.record.telemetry.log import start_for_run

            problem = start_for_run(self._folder, rank).problem
            self.said.extend([problem] if problem else [])
        if self._quiet:
            from stepscope.machine.quiet import prepare_quiet

            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            report = prepare_quiet(rank, int(local) if local.isdecimal() else world_size, seed=self._seed)
            self._undo.callback(report.undo)
            self.said.extend(report.sentences())

    def recording_begins(self) -> None:
        """Stop garbage collection for the steps that are recorded."""
        if self._quiet and self._begun:
            from stepscope.machine.quiet import quiet_steps

            steps = self._undo.enter_context(quiet_steps())
            self.said.extend(f"Quiet machine: {phrase}." for phrase in [*steps.done, *steps.noise])

    def recording_ends(self) -> None:
        """Leave the process as it was."""
        self._undo.close()


WARMUP_STEPS: Final = 5
WARMUP_S: Final = 3.0
MOST_WARMUP_STEPS: Final = 10
"""Warm-up: at least WARMUP_STEPS, then until WARMUP_S have passed or this many steps; with several ranks this many."""
LONG_WARMUP_S: Final = 60.0
"""Steps so long that two of them take this are warm by then."""
OPTIMIZER_PATIENCE_S: Final = 30.0
"""How long a program that has an optimizer is given to step it, before other signs count as its steps."""
_LONGEST_STEP_S: Final = 60.0
_LONGEST_STEP_RATIO: Final = 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `stepscope run` was told, for the processes of the program.

    Attributes:
        steps: how many to record.
        warmup: how many steps to let pass before; None for the defaults above.
        exit_after: end the program when they are recorded.
        redact: leave names of folders and of the machine out of what is kept beside the traces.
        serve: start an agent, through which more can be recorded at any time.
        telemetry: keep what the program logs and how busy the machine is.
        quiet: pin the process, and collect no garbage while steps are recorded.
        seed: for the random generators of a quiet machine; None leaves them alone.
        energy: measure the energy of the steps after the recording.
        record: what is recorded besides times.
        measure: only note when steps end, and record nothing (`stepscope bench`); `steps` are timed, and then the
            program is ended.
        apply: remedies to apply to the program as it starts, such as "fuse-optimizer" or "workers=4".
        losses: with `measure`, also keep the value that each backward pass begins with.
        trackers: record nothing, and keep what the program hands to W&B and TensorBoard (`stepscope sweep`).
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
        """For STEPSCOPE_RUN_OPTIONS and `run.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunOptions:
        """The reverse of `to_json`; what is not known is passed over."""
        values = {item.name: content[item.name] for item in fields(cls) if item.name in content}
        known = {item.name for item in fields(RecordOptions)}
        record = {name: bool(value) for name, value in (values.pop("record", None) or {}).items() if name in known}
        values["apply"] = tuple(map(str, values.get("apply") or ()))
        return cls(**values, record=RecordOptions(**record))

    @classmethod
    def parse(cls, text: str) -> RunOptions:
        """From STEPSCOPE_RUN_OPTIONS."""
        return cls.from_json(json.loads(text or "{}"))


class FirstRecording:
    """Lets a process warm up, records its steps once, times some more of them, and leaves it alone.

    Where the steps were only guessed from DataLoaders or forward calls and an optimizer steps later, its steps are
    recorded too, into a second trace.
    """

    def __init__(self, controller: StepController, hooks: AllHooks, folder: RunFolder, options: RunOptions) -> None:
        self._controller = controller
        self._hooks = hooks
        self._folder = folder
        self._options = options
        self._handle: CaptureHandle | None = None
        self._result: CaptureResult | None = None
        self._source = StepSource.NONE
        self._counted = 0
        self._begun_s = time.monotonic()
        self._waits_for_optimizer: bool | None = None
        self._times = StepTimes()
        self._energy = _energy_meter(controller) if options.energy else None
        self._recorded: tuple[int, float] | None = None  # the step and the time at which the recording ended
        self._over = False
        self._company = Company(folder.path, telemetry=options.telemetry, quiet=options.quiet, seed=options.seed)
        self.process = os.getpid()

    @property
    def has_begun(self) -> bool:
        """Whether any step was seen."""
        return self._source is not StepSource.NONE

    def step_ended(self, step: int) -> None:
        """Count it, and ask for the capture when the program is warm."""
        self._times.ended()
        if self._energy is not None:
            self._energy.ended()
        now = time.monotonic()
        if self._controller.source is not self._source:
            self._restart(now)
        self._counted += 1
        if not is_helper():
            self._company.begin()
        if self._options.serve and not self._controller.stays and not is_helper():
            self._serve()
        if self._handle is None and self._is_warm(now):
            if is_helper():
                self.let_go()
                return
            self._company.recording_begins()
            mean_s = (now - self._begun_s) / self._counted
            self._handle = self._controller.request(
                CaptureRequest(
                    steps=self._options.steps,
                    first_step=step if self._counted >= self._wanted_warmup() else None,
                    options=self._options.record,
                    out=self._numbered_first(),
                    timeout_s=max(_LONGEST_STEP_S, mean_s * _LONGEST_STEP_RATIO),
                )
            )

    def step_begins(self, step: int) -> None:
        """Let go of the program some steps after the capture has ended, or end it if that was asked for."""
        self._look_at_result(step)
        if self._recorded is not None and self._is_timed(step, *self._recorded):
            self._recorded = None
            if self._energy is not None:
                self._energy.finish()
            self.report()
            self._rest()
            if self._options.exit_after:
                end_program()
        recorded = self._is_recorded()
        if self._energy is not None:
            if self._recorded is not None and recorded is False:
                self._energy.begins(step)
            else:
                self._energy.pauses()
        self._times.begins(step, recorded)

    def _look_at_result(self, step: int) -> None:
        """Keep word of a capture that has ended."""
        result = self._handle.result if self._handle is not None else None
        if result is None or result is self._result:
            return
        if result.gave_way and result.path is None:
            self._handle = None  # ask again: the controller waits for the program's own profiler to end
            return
        self._result = result
        self._company.recording_ends()
        self.report()
        if self._options.exit_after and not (self._options.energy and result.path is not None):
            self._rest()
            if not result.cancelled:
                end_program()
            return
        self._recorded = (step, time.monotonic())

    def _is_timed(self, step: int, recorded_step: int, recorded_s: float) -> bool:
        """Whether enough steps were timed since the recording ended."""
        past_s = time.monotonic() - recorded_s
        if self._energy is not None and (self._options.exit_after or self._energy.wants_more(past_s)):
            return not self._energy.wants_more(past_s)
        return step - recorded_step >= TIMED_STEPS or past_s >= TIMED_S

    def _is_recorded(self) -> bool | None:
        """Whether the step that begins is one that is recorded; None where a profiler is there, but does not record."""
        if self._controller.others.active():
            return None
        if self._controller.is_recording:
            return True
        return None if self._controller.is_busy else False

    def _rest(self) -> None:
        """Nothing more is to be done at the end of steps, but to look out for a better sign of them."""
        if self._controller.stays and not self._options.exit_after:
            if self._source >= StepSource.OPTIMIZER:
                self._controller.listener = None
        elif self._source >= StepSource.OPTIMIZER or self._options.exit_after:
            self.let_go()
        else:
            self._hooks.keep(StepSource.OPTIMIZER)

    @guard.entry
    def program_ends(self) -> None:
        """Keep what was recorded so far."""
        if os.getpid() != self.process or not self.has_begun or self._over:
            return
        self._over = True
        self._controller.finish("the program ended first")
        self._company.recording_ends()
        if self._energy is not None:
            self._energy.finish()
        result = self._handle.result if self._handle is not None else None
        if not is_helper() and (self._result is None or self._recorded or result not in (None, self._result)):
            self._result = result
            self.report()
        self.let_go()

    def let_go(self) -> None:
        """Leave torch and jax as they were; the steps are not counted any more."""
        self._hooks.remove()
        self._controller.listener = None

    def abandon(self) -> None:
        """After an error of ours: leave word of it if that can be done, and the program as it was."""
        self._over = True
        for action in (self._controller.abandon, self._company.recording_ends, self.let_go):
            guard.attempted(action)
        if self._energy is not None:
            guard.attempted(self._energy.finish)
        if not is_helper() and (self._result is None or self._result.path is None):
            self._result = CaptureResult(problem="stepscope failed in the program, which went on without it")
            self._folder.sign(LEFT)
            guard.attempted(self.report)

    def _serve(self) -> None:
        """Start the agent, now that the rank is known and that this process has steps to record."""
        from stepscope.record.agent import serve_for_run

        self._controller.stays = True  # also where it cannot be started: it is tried only once
        serve_for_run(self._folder, rank_and_world_size()[0])

    def report(self) -> None:
        """Leave word in the run folder of what was recorded."""
        rank, world_size = rank_and_world_size()
        result = self._result or CaptureResult(problem=self._why_nothing())
        self._folder.write_recording(
            rank,
            {
                "process": self.process,
                "world_size": world_size,
                "source": self._source.name.lower(),
                "steps_seen": self._controller.current_step(),
                "asked_steps": self._options.steps,
                "steps": result.steps,
                "first_step": result.first_step,
                "trace": result.path.name if result.path else None,
                "problem": result.problem,
                "own_profiler": self._controller.others.seen,
                "own_profiler_name": self._controller.others.name,
                "said": self._company.said,
                "step_times": self._times.to_json(),
                "facts": process_facts(redact=self._options.redact),
                **({} if self._energy is None else {"energy": self._energy.record.to_json()}),
            },
        )

    def _numbered_first(self) -> Path | None:
        """A name taken before any that the agent gives, so that the run's own trace is not the latest one later."""
        return self._folder.new_trace_path(rank_and_world_size()[0]) if self._options.serve else None

    def _restart(self, now: float) -> None:
        """A better sign of steps was seen: what was asked for by the lesser one is dropped."""
        self._source = self._controller.source
        self._counted, self._begun_s = 0, now
        self._recorded = None
        self._times.clear()
        if self._energy is not None:
            self._energy.clear()
        if self._handle is not None and self._handle.result is None:
            self._handle.cancel()
        self._handle = None

    def _is_warm(self, now: float) -> bool:
        """Whether the profiler may warm up in the step that begins, and the one after it be recorded."""
        past_s, count = now - self._begun_s, self._counted + 1
        if self._source < StepSource.OPTIMIZER and past_s < OPTIMIZER_PATIENCE_S and self._has_optimizer(count):
            return False
        if self._options.warmup is not None:
            return count >= self._options.warmup
        if rank_and_world_size()[1] > 1:  # every rank records the same steps
            return count >= MOST_WARMUP_STEPS
        if count >= MOST_WARMUP_STEPS or (count > 2 and past_s >= LONG_WARMUP_S):
            return True
        return count >= WARMUP_STEPS and past_s >= WARMUP_S

    def _wanted_warmup(self) -> float:
        """The steps after which the recording begins although its profiler had none to warm up in."""
        return max(self._options.warmup, 1) if self._options.warmup is not None else float("inf")

    def _has_optimizer(self, count: int) -> bool:
        """Whether the program has made an optimizer; looked for once, when the program could be warm."""
        if self._waits_for_optimizer is None and count >= min(WARMUP_STEPS, self._options.warmup or WARMUP_STEPS):
            self._waits_for_optimizer = optimizer_exists()
        return bool(self._waits_for_optimizer)

    def _why_nothing(self) -> str:
        seen = self._counted
        if self._controller.others.seen:
            return f"the program used {self._controller.others.name} itself when it was to be recorded"
        if self._waits_for_optimizer and self._source < StepSource.OPTIMIZER:
            return "the program made an optimizer that never stepped, and ended before other steps were recorded"
        if seen == 0:
            return "the program ended before its first step did"
        one = "1 step" if seen == 1 else f"{seen} steps"
        return f"the program ended after {one}, before the recording began; --warmup 1 begins it sooner"


def _energy_meter(controller: StepController) -> EnergyMeter:
    from stepscope.record.energy import EnergyMeter

    return EnergyMeter(uses_jax=lambda: controller.uses_jax)


def is_helper() -> bool:
    """Whether this is a process that another one of the program started by multiprocessing, and no rank of its own."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return False
    distributed = sys.modules.get("torch.distributed")
    return not (distributed is not None and distributed.is_available() and distributed.is_initialized())


def end_program() -> None:
    """End the program as if it had called sys.exit(0); on another thread than the main one, that one too."""
    if threading.current_thread() is not threading.main_thread():
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(SystemExit))
    raise SystemExit(0)


def optimizer_exists() -> bool:
    """Whether the program has made an optimizer of torch."""
    module: Any = sys.modules.get("torch.optim.optimizer")
    if module is None:
        return False
    optimizer: Any = module.Optimizer
    return any(issubclass(type(each), optimizer) for each in gc.get_objects())
