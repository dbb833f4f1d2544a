"""Run a sweep: parallel trials, each watched, pruned and recorded, until there are enough; no interruption loses one.

One loop in one thread looks after all programs. Any number of processes may run it for the same study.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.machine.signals import ENDING, handled, interrupt
from stepscope.tune.study import BEAT_S
from stepscope.tune.sweep.study import FOLDER, VALUES, SweepStudy, iterations_to_compare
from stepscope.tune.sweep.trial import TrialProgram, end_left_over

if TYPE_CHECKING:
    import optuna

Stop: TypeAlias = Literal["trials", "budget", "target", "interrupted", "failing"]
_State: TypeAlias = Literal["complete", "pruned", "failed", "interrupted"]

POLL_S: Final = 0.2
ASK_S: Final = 3.0
"""How often to ask the study for a trial while there is none: another process may give one back."""
FIRST_FAILURES: Final = 5
"""A run that begins with so many failures, and no other trial, is stopped."""


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How one trial of this process ended.

    Attributes:
        value: of the metric; None without one.
        seconds: from its start to its end.
    """

    number: int
    state: _State
    values: dict[str, Any]
    value: float | None
    iterations: int
    seconds: float
    folder: Path
    reason: str | None = None


@dataclass
class _Running:
    trial: optuna.Trial
    program: TrialProgram
    values: dict[str, Any]
    slot: int
    told_s: float
    to_compare: list[int] = field(default_factory=list)


class SweepRun:
    """This process's part of a sweep.

    Args:
        folder: the sweep's.
        tell: called with each trial that ended.
        say: called with each other event, a sentence each.

    Attributes:
        ended: the trials of this process, in the order in which they ended.
    """

    def __init__(
        self, study: SweepStudy, folder: Path, tell: Callable[[TrialEnd], None], say: Callable[[str], None]
    ) -> None:
        self._study, self._sweep, self._folder = study, study.sweep, folder
        self._tell, self._say = tell, say
        self._running: list[_Running] = []
        self._begun_s = time.monotonic()
        self._looked_s = -BEAT_S
        self._again_s = 0.0
        self._devices = visible_devices() if self._sweep.jobs > 1 else []
        self.ended: list[TrialEnd] = []

    def run(self) -> Stop:
        """Run trials until there are enough, or until Ctrl-C or SIGTERM; return why it ended.

        Raises UsageError if a program cannot be started, or something cannot be written.
        """
        with handled(interrupt, *ENDING):
            try:
                while (stop := self._stop()) is None:
                    self._look_for_the_dead()
                    self._fill()
                    if not self._running:
                        return "trials"
                    self._look()
                while self._running:
                    self._look()
            except KeyboardInterrupt:
                return "interrupted"
            finally:
                self._end_all()
        return stop

    def _stop(self) -> Stop | None:
        """Why no further trial begins; None if one may."""
        budget_s = self._sweep.budget_s
        if budget_s is not None and time.monotonic() - self._begun_s >= budget_s:
            return "budget"
        if self._study.has_reached_target():
            return "target"
        if len(self.ended) >= FIRST_FAILURES and all(each.state == "failed" for each in self.ended):
            return "failing"
        return None

    def _fill(self) -> None:
        """Begin trials in the free slots; if there was none to begin, retry only after a while or after an end."""
        if time.monotonic() < self._again_s:
            return
        for slot in sorted({*range(self._sweep.jobs)} - {each.slot for each in self._running}):
            trial = self._study.begin()
            if trial is None:
                self._again_s = time.monotonic() + ASK_S
                return
            self._begin(trial, slot)

    def _begin(self, trial: optuna.Trial, slot: int) -> None:
        values, devices = trial.user_attrs[VALUES], devices_of(slot, self._sweep.jobs, self._devices)
        with contextlib.ExitStack() as stack:  # also after Ctrl-C: the trial was taken, and nobody would run it
            stack.callback(self._study.give_back, trial, "it could not be started")
            program = TrialProgram(self._sweep, self._folder, trial.number, values, devices)
            stack.pop_all()
        self._study.note(trial, FOLDER, program.folder.name)
        compared = list(iterations_to_compare(self._sweep))
        self._running.append(_Running(trial, program, values, slot, time.monotonic(), compared))

    def _look(self) -> None:
        """Look once at every trial, then wait a little."""
        for each in list(self._running):
            self._look_at(each)
        if all(not each.program.is_over for each in self._running):
            time.sleep(POLL_S)

    def _look_at(self, running: _Running) -> None:
        program = running.program
        now_s = time.monotonic()
        if now_s - running.told_s >= BEAT_S:
            running.told_s = now_s
            self._study.beat(running.trial)
        if program.is_over:
            self._running.remove(running)
            self._finish(running)
            return
        if program.is_pruned:
            return
        for iteration, value in program.look():
            if iteration not in running.to_compare or not self._study.is_behind(running.trial, iteration, value):
                continue
            if not program.has_ended:  # otherwise ending it saves nothing: it has its value
                program.is_pruned = True
                program.end()
                return

    def _finish(self, running: _Running) -> None:
        program, trial = running.program, running.trial
        iterations, value = program.seen.count, program.seen.result
        state: _State = "pruned" if program.is_pruned else "complete"
        reason = None if program.is_pruned else program.failure()
        if state == "complete" and (reason is not None or value is None):
            state = "failed"
        program.keep(state, reason)
        if state == "pruned":
            self._study.prune(trial, iterations)
        elif state == "failed" or value is None:
            self._study.fail(trial, reason or "it has no value")
        else:
            self._study.complete(trial, value, iterations)
        self._ended(running, state, reason)

    def _ended(self, running: _Running, state: _State, reason: str | None = None) -> None:
        program = running.program
        end = TrialEnd(
            number=running.trial.number,
            state=state,
            values=running.values,
            value=program.seen.result,
            iterations=program.seen.count,
            seconds=time.monotonic() - program.begun_s,
            folder=program.folder,
            reason=reason,
        )
        self.ended.append(end)
        self._again_s = 0.0
        self._tell(end)

    def _look_for_the_dead(self) -> None:
        """Now and then, have the trials of dead processes repeated, and end the programs they left running."""
        if time.monotonic() - self._looked_s < BEAT_S:
            return
        self._looked_s = time.monotonic()
        for number in self._study.take_from_the_dead():
            name = self._study.trials()[number].user_attrs.get(FOLDER)
            if isinstance(name, str) and (self._folder / name).is_dir() and name == Path(name).name:
                end_left_over(self._folder / name)
            self._say(f"trial {number} was left unfinished by a process that is gone; it is repeated")

    def _end_all(self) -> None:
        """End all running trials at the same time, and have them repeated later.

        Further signals are ignored meanwhile: an impatient second one must leave no program behind.
        """
        with handled(lambda number, frame: None, "SIGINT", *ENDING):
            for each in self._running:
                each.program.end()
            for each in self._running:
                each.program.wait()
                with contextlib.suppress(UsageError):
                    each.program.keep("interrupted", None)
                self._study.give_back(each.trial, "it was interrupted")
                self._ended(each, "interrupted")
            self._running.clear()


def devices_of(slot: int, jobs: int, devices: Sequence[str]) -> str | None:
    """The devices of one of the slots in which trials run, divided evenly.

    With more slots than devices several slots share one; without devices None.
    """
    if not devices or jobs < 2:
        return None
    return ",".join(devices[slot::jobs]) if len(devices) >= jobs else devices[slot % len(devices)]


def visible_devices() -> list[str]:
    """The GPUs that a child process would see, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except OSError:
        return []
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))] if done.returncode == 0 else []
