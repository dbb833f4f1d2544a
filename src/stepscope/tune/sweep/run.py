"""Run a sweep, and sum up its results: parallel trials, each watched, pruned and recorded; no interruption loses one.

One loop in one thread looks after all programs. Any number of processes may run it for the same study.

Importance is PED-ANOVA's (Watanabe, Bansal and Hutter, "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance
in Arbitrary Subspaces", IJCAI 2023) as Optuna computes it: how differently a parameter is distributed in the best
quarter of the complete trials and in all of them. It needs no model of the metric. Correlation is Spearman's, of ranks:
its sign says whether a larger value goes with a larger metric.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import shutil
import statistics
import subprocess
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.threads import ENDING, handled, interrupt
from stepscope.tune.study import BEAT_S, import_optuna, open_storage, open_study
from stepscope.tune.sweep.file import Sweep
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.study import (
    COUNT,
    FOLDER,
    REASON,
    SWEEP,
    VALUES,
    SweepStudy,
    counted,
    iterations_to_compare,
    kept_sweep,
)
from stepscope.tune.sweep.trial import TrialProgram, end_left_over

if TYPE_CHECKING:
    import optuna

State: TypeAlias = Literal["complete", "pruned", "failed", "running", "waiting"]

_STATES: Final[dict[str, State]] = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "waiting",
}
BEST_SHARE: Final = 0.25
"""Share of the complete trials that importance compares with all of them."""
FEWEST_FOR_IMPORTANCE: Final = 8
"""With fewer complete trials the best quarter is a single one, whose spread means nothing."""
FEWEST_FOR_CORRELATION: Final = 3


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """One trial.

    Attributes:
        values: values of every parameter, including constants; empty while the trial waits.
        value: the metric's value; for a pruned trial the last one; None without one.
        iterations: number of metric values that it gave; None if unknown.
        folder: its name in the sweep's folder; None without one.
    """

    number: int
    state: State
    values: dict[str, Any]
    value: float | None
    iterations: int | None
    seconds: float | None
    reason: str | None
    folder: str | None


@dataclass(frozen=True, slots=True)
class Effect:
    """How a parameter relates to the metric, over the complete trials.

    Attributes:
        importance: its share of all parameters' importance, 0 to 1; None with too few trials.
        correlation: Spearman's, -1 to 1; None if its values have no order or did not vary.
        trials: number of complete trials used.
    """

    parameter: Parameter
    importance: float | None
    correlation: float | None
    trials: int


@dataclass(frozen=True, slots=True)
class SweepResults:
    """A sweep and its trials so far, in order, without abandoned ones, which were repeated.

    Attributes:
        effects: the searched parameters' effects, most important first.
        abandoned: number of trials that were left unfinished and repeated.
    """

    sweep: Sweep
    trials: tuple[SweepTrial, ...]
    effects: tuple[Effect, ...]
    abandoned: int

    def of_state(self, state: State) -> list[SweepTrial]:
        return [trial for trial in self.trials if trial.state == state]

    @property
    def ranked(self) -> list[SweepTrial]:
        sign = -1 if self.sweep.metric.is_maximized else 1
        return sorted(self.of_state("complete"), key=lambda trial: (sign * (trial.value or 0.0), trial.number))

    @property
    def best(self) -> SweepTrial | None:
        return next(iter(self.ranked), None)


def read_results(place: str | Path, name: str | None = None) -> SweepResults:
    """Read the results of a study.

    Args:
        place: the database.
        name: the study's name; None if the database has only one.

    Raises:
        UsageError: there is no study of `stepscope sweep`.
    """
    if name is None:
        name = only_study(place)
    study = open_study(place, name, create=False)
    content = study.user_attrs.get(SWEEP)
    if content is None:
        raise UsageError(f"stepscope sweep did not create the study {name} in {place}")
    return results_of(kept_sweep(content, f"{name} in {place}"), study)


def only_study(place: str | Path) -> str:
    """The name of a database's only study. Raises UsageError if it has none, or several."""
    names = sorted(import_optuna().get_all_study_names(open_storage(place)))
    if len(names) != 1:
        has = f"{len(names)} studies; choose one with --name: {', '.join(names[:10])}" if names else "no study"
        raise UsageError(f"{place} has {has}")
    return str(names[0])


def results_of(sweep: Sweep, study: optuna.Study) -> SweepResults:
    """The trials of a study, and the effects of its parameters."""
    every = study.get_trials(deepcopy=False)
    kept = counted(every)
    trials = tuple(_trial(each) for each in kept)
    return SweepResults(sweep, trials, _effects(sweep, trials, kept), len(every) - len(kept))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share a rank. None with too few values, or if one side is constant.

    The result of scipy.stats.spearmanr, whose import would take longer than the rest of a report.
    """
    if len(first) < FEWEST_FOR_CORRELATION or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    if not all(map(math.isfinite, (*first, *second))):
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in values]


def _trial(trial: optuna.trial.FrozenTrial) -> SweepTrial:
    attributes, duration = trial.user_attrs, trial.duration
    state = _STATES[trial.state.name]
    value = trial.value if state == "complete" else None
    if state == "pruned" and trial.last_step is not None:
        value = trial.intermediate_values[trial.last_step]
    return SweepTrial(
        number=trial.number,
        state=state,
        values=dict(attributes.get(VALUES, {})),
        value=value if value is not None and math.isfinite(value) else None,
        iterations=attributes.get(COUNT),
        seconds=None if duration is None else duration.total_seconds(),
        reason=attributes.get(REASON),
        folder=attributes.get(FOLDER),
    )


def _effects(
    sweep: Sweep, trials: Sequence[SweepTrial], frozen: Sequence[optuna.trial.FrozenTrial]
) -> tuple[Effect, ...]:
    complete = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
    shares = _importances(sweep, [each for each in frozen if each.state.name == "COMPLETE"])
    effects = [
        Effect(each, shares.get(each.name), _correlation(each, complete), len(complete)) for each in sweep.searched
    ]
    return tuple(sorted(effects, key=lambda each: -(each.importance or 0.0)))


def _correlation(parameter: Parameter, complete: Sequence[SweepTrial]) -> float | None:
    values = [trial.values.get(parameter.name) for trial in complete]
    if not all(isinstance(each, (int, float)) for each in values):
        return None
    return spearman([float(each or 0) for each in values], [trial.value or 0.0 for trial in complete])


def _importances(sweep: Sweep, complete: Sequence[optuna.trial.FrozenTrial]) -> dict[str, float]:
    """Shares by name; empty if the trials are too few or alike."""
    values = {trial.value for trial in complete}
    if len(complete) < FEWEST_FOR_IMPORTANCE or len(values) < 2:
        return {}
    package = import_optuna()
    evaluator = package.importance.PedAnovaImportanceEvaluator
    known = inspect.signature(evaluator.__init__).parameters
    key = "target_quantile" if "target_quantile" in known else "baseline_quantile"  # its name before Optuna 4.7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = package.create_study(direction=sweep.metric.goal)
        study.add_trials([_alone(trial) for trial in complete])
        found = package.importance.get_param_importances(study, evaluator=evaluator(**{key: BEST_SHARE}))
    if not any(found.values()):
        return {}
    return {name: float(share) for name, share in found.items()}


def _alone(trial: optuna.trial.FrozenTrial) -> Any:
    return import_optuna().create_trial(params=trial.params, distributions=trial.distributions, value=trial.value)


Stop: TypeAlias = Literal["trials", "budget", "target", "interrupted", "failing"]
_State: TypeAlias = Literal["complete", "pruned", "failed", "interrupted"]

POLL_S: Final = 0.2
ASK_S: Final = 3.0
"""Seconds between requests for a trial while there is none: another process may give one back."""
FIRST_FAILURES: Final = 5
"""A run that begins with this many failures, and nothing else, is stopped."""


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How one trial of this process ended.

    Attributes:
        value: the metric's value; None without one.
        seconds: its duration.
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
        folder: the sweep's folder.
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
                    self._repeat_abandoned()
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
        with contextlib.ExitStack() as stack:  # also on Ctrl-C: the trial was taken, and nobody else would run it
            stack.callback(self._study.give_back, trial, "it could not be started")
            program = TrialProgram(self._sweep, self._folder, trial.number, values, devices)
            stack.pop_all()
        self._study.note(trial, FOLDER, program.folder.name)
        compared = list(iterations_to_compare(self._sweep))
        self._running.append(_Running(trial, program, values, slot, time.monotonic(), compared))

    def _look(self) -> None:
        """Check every trial once, then wait a little."""
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
            if not program.has_ended:  # otherwise it already has its value, and ending it saves nothing
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

    def _repeat_abandoned(self) -> None:
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
