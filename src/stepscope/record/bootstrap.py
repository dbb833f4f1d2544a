"""The part of `stepscope run` inside the program: warm up, record a few steps, time some more, and detach.

`was_imported` is called by `bootstrap_path/sitecustomize.py`.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from stepscope import guard
from stepscope.record.batch_samples import model_calls
from stepscope.record.bench_steps import BenchSteps
from stepscope.record.captures import CaptureHandle, CaptureRequest, CaptureResult
from stepscope.record.controller import StepController, StepSource, controller, set_controller
from stepscope.record.counters import TIMED_S, TIMED_STEPS, StepTimes, mark
from stepscope.record.equal_values import value_look
from stepscope.record.hooks import AllHooks
from stepscope.record.manifest import process_facts, rank_and_world_size
from stepscope.record.run_folder import LEFT, RunFolder, is_run_folder
from stepscope.record.run_process import (
    OPTIMIZER_PATIENCE_S,
    RUN,
    RUN_OPTIONS,
    BackgroundHelpers,
    RunOptions,
    end_program,
    is_helper,
    keep_compile_log,
    optimizer_exists,
)
from stepscope.record.step_objects import evaluation_watch

if TYPE_CHECKING:
    from stepscope.record.energy import EnergyMeter

WARMUP_STEPS: Final = 5
WARMUP_S: Final = 3.0
MOST_WARMUP_STEPS: Final = 10
"""Warm-up lasts at least WARMUP_STEPS, then until WARMUP_S have passed or this many steps; with several ranks, this
many.
"""
LOOK_AFTER_STEPS: Final = 2
"""Steps before the first look at values."""
_LOOK_S: Final = 5.0
_LOOK_STEPS: Final = 20
"""A look ends after this time, or that of this many steps, even if none ends: the program may have left its loop."""
CALL_PATIENCE_S: Final = (1.0, 3.0)
MOST_FORWARD_CALLS: Final = 512
"""Time, or number of forward calls, after which each of them is a step unless a function around them was repeated: the
longer time if one was called again, but not yet often enough.
"""
LONG_WARMUP_S: Final = 60.0
"""If two steps take this long, the program is warm after them."""
_LONGEST_STEP_S: Final = 60.0
_LONGEST_END_S: Final = 30.0
_EXIT: Final = os._exit
_LONGEST_STEP_RATIO: Final = 20


class Phase(Enum):
    WARMING_UP = auto()
    """Steps pass until the program is warm."""
    CAPTURING = auto()
    """A capture is requested or running."""
    TIMING = auto()
    """The capture has ended; steps are timed and their energy is measured without a profiler."""
    RESTING = auto()
    """Everything is saved; only a better step source restarts the recording."""
    OVER = auto()
    """The program has ended, or stepscope has failed in it."""


class Event(Enum):
    """An event that moves a first recording from one phase to another."""

    BETTER_SIGN = auto()
    """A better step source was seen: recordings by the worse one are dropped."""
    WARM = auto()
    GAVE_WAY = auto()
    """The program started a profiler of its own before a step was recorded."""
    CAPTURED = auto()
    """The capture has ended, and steps without a profiler follow."""
    CAPTURED_LAST = auto()
    """The capture has ended, and the program must end too."""
    TIMED = auto()
    ENDED = auto()


TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.WARMING_UP, Event.WARM): Phase.CAPTURING,
    (Phase.CAPTURING, Event.GAVE_WAY): Phase.WARMING_UP,
    (Phase.CAPTURING, Event.CAPTURED): Phase.TIMING,
    (Phase.CAPTURING, Event.CAPTURED_LAST): Phase.RESTING,
    (Phase.TIMING, Event.TIMED): Phase.RESTING,
    **{(phase, Event.BETTER_SIGN): Phase.WARMING_UP for phase in Phase if phase is not Phase.OVER},
    **{(phase, Event.ENDED): Phase.OVER for phase in Phase},
}
"""All valid transitions; any other event in a phase is an internal error."""


class FirstRecording:
    """The first recording of a process, a listener of its steps; `phase` is its current state.

    If the steps were only guessed from DataLoaders or forward calls and an optimizer steps later, the optimizer's steps
    are recorded too, into a second trace.
    """

    def __init__(self, controller: StepController, hooks: AllHooks, folder: RunFolder, options: RunOptions) -> None:
        self.process = os.getpid()
        self.phase = Phase.WARMING_UP
        self._controller = controller
        self._hooks = hooks
        self._folder = folder
        self._options = options
        self._helpers = BackgroundHelpers(folder.path, options, telemetry=options.telemetry)
        self._times = StepTimes()
        self._energy = _energy_meter(controller) if options.energy else None
        self._meters: list[StepTimes | EnergyMeter] = [
            self._times,
            *([self._energy] if self._energy is not None else []),
        ]
        self._source = StepSource.NONE
        self._counted = 0  # steps of this source since `_started_s`
        self._started_s = time.monotonic()
        self._waits_for_optimizer: bool | None = None
        self._handle: CaptureHandle | None = None
        self._result: CaptureResult | None = None  # the last capture that was reported
        self._look = value_look()
        self._looks = options.record.lines
        self._evaluations = evaluation_watch()
        self._captured = (0, 0.0)  # step and time at the end of the capture

    @property
    def has_begun(self) -> bool:
        return self._source is not StepSource.NONE

    def _move(self, event: Event) -> None:
        self.phase = TRANSITIONS[self.phase, event]

    def step_ended(self, step: int) -> None:
        """Count the step, and request the capture once the program is warm."""
        if self.phase is Phase.OVER:
            return
        for meter in self._meters:
            meter.ended()
        now = time.monotonic()
        if self._controller.source is not self._source:
            self._restart(now)
        self._counted += 1
        if not is_helper():
            self._helpers.begin()
            if self._options.serve and not self._controller.stays:
                self._serve()
        self._look.border()
        self._watch_evaluations()
        if self.phase is Phase.WARMING_UP and self._counted == LOOK_AFTER_STEPS and self._looks:
            self._look.start(max(_LOOK_S, (now - self._started_s) * _LOOK_STEPS))
        if self.phase is Phase.WARMING_UP and self._is_warm(now):
            self._look.stop()
            if is_helper():
                self.let_go()
            else:
                self._capture(step, now)

    def _watch_evaluations(self) -> None:
        if self.phase is Phase.WARMING_UP and self._counted == 1 and self._looks:
            self._evaluations.start()
        elif self.phase in (Phase.WARMING_UP, Phase.CAPTURING, Phase.TIMING):
            self._evaluations.border(recorded=self._controller.is_busy)
        else:
            self._evaluations.stop()

    def step_begins(self, step: int) -> None:
        """Detach from the program some steps after the capture has ended, or end the program if requested."""
        if self.phase is Phase.CAPTURING:
            self._look_at_result(step)
        if self.phase is Phase.TIMING and self._is_timed(step):
            self._move(Event.TIMED)
            if self._energy is not None:
                self._energy.finish()
            self.report()
            self._rest()
            if self._options.exit_after:
                end_program()
        recorded = self._is_recorded()
        if self._energy is not None:
            if self.phase is Phase.TIMING and recorded is False:
                self._energy.begins(step)
            else:
                self._energy.pauses()
        self._times.begins(step, recorded)

    @guard.entry
    def program_ends(self) -> None:
        """Keep what was recorded so far."""
        if os.getpid() != self.process or not self.has_begun or self.phase is Phase.OVER:
            return
        was_timing = self.phase is Phase.TIMING
        self._move(Event.ENDED)
        self._controller.finish("the program ended first")
        self._helpers.recording_ends()
        if self._energy is not None:
            self._energy.finish()
        result = self._handle.result if self._handle is not None else None
        if not is_helper() and (self._result is None or was_timing or result not in (None, self._result)):
            self._result = result
            self.report()
        self.let_go()

    def let_go(self) -> None:
        """Remove the hooks from torch and jax and stop counting steps."""
        self._look.stop()
        self._evaluations.stop()
        self._hooks.remove()
        self._controller.listener = None

    def abandon(self) -> None:
        """After an internal error, report it if possible and leave the program unchanged."""
        self._move(Event.ENDED)
        for action in (self._controller.abandon, self._helpers.recording_ends, self.let_go):
            guard.attempted(action)
        if self._energy is not None:
            guard.attempted(self._energy.finish)
        if not is_helper() and (self._result is None or self._result.path is None):
            self._result = CaptureResult(problem="stepscope failed in the program, which continued without it")
            self._folder.sign(LEFT)
            guard.attempted(self.report)

    def report(self) -> None:
        """Write what was recorded into the run folder."""
        rank, world_size = rank_and_world_size()
        result = self._result or CaptureResult(problem=self._why_nothing())
        evaluations = guard.attempted(self._evaluations.facts)
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
                "complete": self.phase in (Phase.RESTING, Phase.OVER),
                "own_profiler": self._controller.others.seen,
                "own_profiler_name": self._controller.others.name,
                "said": self._helpers.said,
                "step_times": self._times.to_json(),
                "evaluations": {} if evaluations is None else msgspec.to_builtins(evaluations),
                "model_calls": guard.attempted(model_calls().later) or {},
                "facts": process_facts(redact=self._options.redact),
                **({} if self._energy is None else {"energy": self._energy.record.to_json()}),
            },
        )

    def _restart(self, now: float) -> None:
        """Drop the request made for a worse step source, since a better one was seen."""
        self._move(Event.BETTER_SIGN)
        self._source = self._controller.source
        self._counted, self._started_s = 0, now
        self._look.forget()
        for meter in self._meters:
            meter.clear()
        if self._handle is not None and self._handle.result is None:
            self._handle.cancel()
        self._handle = None

    def _serve(self) -> None:
        from stepscope.record.agent.server import serve_for_run

        self._controller.stays = True  # set even if the start fails: it is tried only once
        serve_for_run(self._folder, rank_and_world_size()[0])

    def _capture(self, step: int, now: float) -> None:
        self._move(Event.WARM)
        self._helpers.recording_begins()
        asked = max(self._options.warmup, 1) if self._options.warmup is not None else None
        mean_s = (now - self._started_s) / self._counted
        # Reserve the name before the agent names any trace, so that the run's own trace is not the latest one later.
        out = self._folder.new_trace_path(rank_and_world_size()[0]) if self._options.serve else None
        self._handle = self._controller.request(
            CaptureRequest(
                steps=self._options.steps,
                # After the requested steps it begins, even if its profiler had no warm-up steps.
                first_step=step if asked is not None and self._counted >= asked else None,
                options=self._options.record,
                out=out,
                timeout_s=max(_LONGEST_STEP_S, mean_s * _LONGEST_STEP_RATIO),
            )
        )

    def _look_at_result(self, step: int) -> None:
        result = self._handle.result if self._handle is not None else None
        if result is None:
            return
        if result.gave_way and result.path is None:
            self._handle = None  # ask again: the controller waits for the program's own profiler to end
            self._move(Event.GAVE_WAY)
            return
        self._result = result
        self._helpers.recording_ends()
        self.report()
        if self._options.exit_after and not (self._options.energy and result.path is not None):
            self._move(Event.CAPTURED_LAST)
            self._rest()
            if not result.cancelled:
                end_program()
            return
        self._captured = (step, time.monotonic())
        self._move(Event.CAPTURED)

    def _is_timed(self, step: int) -> bool:
        captured_step, captured_s = self._captured
        past_s = time.monotonic() - captured_s
        if self._energy is not None and (self._options.exit_after or self._energy.wants_more(past_s)):
            return not self._energy.wants_more(past_s)
        return step - captured_step >= TIMED_STEPS or past_s >= TIMED_S

    def _is_recorded(self) -> bool | None:
        """Whether the step that begins is recorded; None if a profiler exists but is not recording."""
        if self._controller.others.active() or not self._look.is_over:
            return None
        if self._controller.is_recording:
            return True
        return None if self._controller.is_busy else False

    def _rest(self) -> None:
        """Do nothing more at the end of steps, except to watch for a better step source."""
        is_certain = self._source >= StepSource.OPTIMIZER
        if self._controller.stays and not self._options.exit_after:
            if is_certain:
                self._controller.listener = None
        elif is_certain or self._options.exit_after:
            self.let_go()
        else:
            self._hooks.keep(StepSource.OPTIMIZER)

    def _is_warm(self, now: float) -> bool:
        """Whether the profiler may warm up in the step that begins, so that the next one is recorded."""
        past_s, count = now - self._started_s, self._counted + 1
        if self._source < StepSource.OPTIMIZER and past_s < OPTIMIZER_PATIENCE_S and self._has_optimizer(count):
            return False
        if self._options.warmup is not None:
            return count >= self._options.warmup
        if (
            self._source is StepSource.FORWARD
            and past_s < CALL_PATIENCE_S[self._controller.expects_calls]
            and count < MOST_FORWARD_CALLS
        ):
            return False
        if rank_and_world_size()[1] > 1:  # every rank records the same steps
            return count >= MOST_WARMUP_STEPS
        if count >= MOST_WARMUP_STEPS or (count > 2 and past_s >= LONG_WARMUP_S):
            return True
        return count >= WARMUP_STEPS and past_s >= WARMUP_S

    def _has_optimizer(self, count: int) -> bool:
        """Whether the program has made an optimizer; checked once, when the program may be warm."""
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


_hooks: AllHooks | None = None
"""The hooks of the plan that records this process."""


def _run_of_environment() -> tuple[RunFolder, RunOptions] | None:
    path = os.environ.get(RUN, "")
    if not is_run_folder(path):
        return None
    return RunFolder(Path(path)), RunOptions.parse(os.environ.get(RUN_OPTIONS, ""))


@guard.entry
def was_imported(module: str) -> None:
    """Record this process as the environment requests; without a request, do nothing.

    Args:
        module: the module just imported: torch, jax, torch_xla.debug.profiler, or a tracker's.
    """
    run = _run_of_environment()
    if run is None:
        return
    folder, options = run
    package = module.partition(".")[0]
    folder.sign(package)
    if options.trackers:
        from stepscope.record.telemetry.log import keep_tracked_values

        keep_tracked_values(module)
        return
    if options.apply and module == "torch":
        _apply(folder, options)
    if options.measure:
        measured = _measure(folder, options) if module == "torch" else None
        if measured is not None:
            measured.watch_torch()
        return
    if module == "torch":
        keep_compile_log(folder)
    hooks = _hooks_for(folder, options)
    if hooks is not None:
        mark(f"{package}_imported")
        hooks.install_in(module)


@guard.entry
def steps_are_marked() -> None:
    """Let `stepscope bench` see the steps that the program marks itself, even if it never imports torch."""
    run = _run_of_environment()
    if run is not None and run[1].measure:
        _measure(*run)


def _apply(folder: RunFolder, options: RunOptions) -> None:
    from stepscope.record.apply import install

    applying = install(options.apply, folder, is_recorded=not options.measure)
    atexit.register(applying.end)
    _before_exit(applying.end)


def _hooks_for(folder: RunFolder, options: RunOptions) -> AllHooks | None:
    """Return the hooks of this process, creating them if needed; None if something else counts its steps."""
    global _hooks
    if controller() is None:
        steps = StepController(lambda: folder.new_trace_path(rank_and_world_size()[0]))
        _hooks = AllHooks(steps)
        _have_listen(steps, FirstRecording(steps, _hooks, folder, options))
        return _hooks
    listens = _hooks is not None and isinstance(getattr(controller(), "listener", None), FirstRecording)
    return _hooks if listens else None


def _measure(folder: RunFolder, options: RunOptions) -> BenchSteps | None:
    """Record when this process's steps end; return None if something else already listens to them."""
    steps = controller() or StepController()
    if steps.listener is None:
        _have_listen(steps, BenchSteps(steps, folder, options))
    return steps.listener if isinstance(steps.listener, BenchSteps) else None


def _have_listen(steps: StepController, plan: FirstRecording | BenchSteps) -> None:
    steps.listener = plan
    set_controller(steps)
    atexit.register(plan.program_ends)
    _before_exit(plan.program_ends)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _forked(steps, plan))
    guard.on_failure("", plan.abandon)


def _before_exit(action: Callable[[], None]) -> None:
    """Also run the action if the program ends by os._exit, which skips atexit handlers."""
    ours = guard.around(os._exit, before=functools.partial(_ends_now, os.getpid(), action))
    guard.on_failure("", guard.put(os, "_exit", ours))


@guard.entry
def _ends_now(process: int, action: Callable[[], None], status: int = 0) -> None:
    """End what we do, but not for long: a program may call os._exit because its device or another thread hangs."""
    if os.getpid() == process:
        _thread.start_new_thread(_exit_late, (status,))
    action()


@guard.entry(in_background=True)
def _exit_late(status: int) -> None:
    time.sleep(_LONGEST_END_S)
    _EXIT(status)


@guard.entry
def _forked(steps: StepController, plan: FirstRecording | BenchSteps) -> None:
    """Handle a fork: before the first step the child may be a rank; later it is a helper of its parent."""
    if plan.has_begun:
        plan.let_go()
        set_controller(None)
    else:
        plan.process = os.getpid()
    steps.forget()
