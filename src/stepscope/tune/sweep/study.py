"""The trials of a sweep in a database that several processes share: taking, reporting and repeating them.

If the process that took a trial is gone, another one marks the trial as abandoned and queues one with the same
values. Interrupted trials are repeated in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stepscope.errors import UsageError
from stepscope.files import converted
from stepscope.tune.study import OWNER, SILENT_S, SharedStudy, held, import_optuna, open_study, quietly
from stepscope.tune.sweep.file import EarlyEnd, Metric, Sweep

if TYPE_CHECKING:
    import optuna


ABANDONED: Final = "abandoned"
"""Mark of a trial that was interrupted or whose process died: it is ignored, and another one repeats it."""
_LARGEST_GRID: Final = 100_000
_LAST_ITERATION: Final = 10**9
_MOST_BANDS: Final = 100


def make_sampler(sweep: Sweep, begun: int) -> optuna.samplers.BaseSampler:
    """Make the sampler that chooses the values of the next trial.

    Args:
        begun: trials of the study so far. A seed determines the whole study, so what one trial draws depends on it and
            on the trial's number, however often the sweep was stopped meanwhile.

    Raises:
        UsageError: a grid's values cannot be enumerated, or are too many.
    """
    package = import_optuna()
    seed = None if sweep.seed is None else (sweep.seed * 1_000_003 + begun) % 2**32
    match sweep.method:
        case "grid":
            return make_grid(sweep)  # type: ignore[no-any-return]
        case "random":
            return package.samplers.RandomSampler(seed=seed)  # type: ignore[no-any-return]
        case _:
            return package.samplers.TPESampler(seed=seed, constant_liar=True)  # type: ignore[no-any-return]


def make_grid(sweep: Sweep) -> Any:
    """Make a sampler of every combination of values, each once, in an order that a seed changes.

    Raises UsageError if a parameter's values cannot be enumerated, or there are too many combinations.
    """
    package = import_optuna()
    values = {parameter.name: parameter.grid() for parameter in sweep.searched}
    size = math.prod(map(len, values.values()))
    if size > _LARGEST_GRID:
        raise UsageError(f"parameters: the grid has {size:,} combinations; at most {_LARGEST_GRID:,} can be tried")

    class Grid(package.samplers.GridSampler):  # type: ignore[misc, name-defined]
        """Optuna's grid sampler for trials that are asked for one by one: it takes an unused combination."""

        def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            if "grid_id" in trial.system_attrs:
                return
            left = self.left(study)
            storage = study._storage
            storage.set_trial_system_attr(trial._trial_id, "search_space", self._search_space)
            storage.set_trial_system_attr(trial._trial_id, "grid_id", left[0] if left else 0)

        def after_trial(
            self,
            study: optuna.Study,
            trial: optuna.trial.FrozenTrial,
            state: optuna.trial.TrialState,
            values: Sequence[float] | None,
        ) -> None:
            """Optuna's version ends the loop of `study.optimize`, which is not used here."""

        def left(self, study: optuna.Study) -> list[int]:
            """The numbers of the combinations that no trial has begun."""
            trials = [trial for trial in study.get_trials(deepcopy=False) if ABANDONED not in trial.user_attrs]
            taken = {trial.system_attrs.get("grid_id") for trial in trials}
            return [number for number in range(len(self._all_grids)) if number not in taken]

    return Grid(values, seed=sweep.seed or 0)


def make_pruner(sweep: Sweep) -> optuna.pruners.BasePruner:
    package = import_optuna()
    early = sweep.early
    if sweep.method == "hyperband":
        return package.pruners.HyperbandPruner(  # type: ignore[no-any-return]
            min_resource=_first(early),
            max_resource="auto" if early is None or early.max_iter is None else early.max_iter,
            reduction_factor=3 if early is None else max(2, round(early.eta)),
        )
    if early is None:
        return package.pruners.NopPruner()  # type: ignore[no-any-return]
    eta = early.eta

    class Bands(package.pruners.BasePruner):  # type: ignore[misc, name-defined]
        """W&B's Hyperband: at certain iterations, only the best 1/eta of all trials so far continues."""

        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            at = trial.last_step
            if at is None:
                return False
            others = study.get_trials(deepcopy=False)
            values = [
                each.intermediate_values[at]
                for each in others
                if at in each.intermediate_values and ABANDONED not in each.user_attrs
            ]
            return is_behind(trial.intermediate_values[at], values, eta, sweep.metric)

    return Bands()


def is_behind(value: float, values: Sequence[float], eta: float, metric: Metric) -> bool:
    """Whether a trial is worse than the best 1/eta of all values at the same iteration, including its own.

    As in W&B's sweeps, it is compared with the value at index `int(count / eta)`, the best being at 0.
    """
    if math.isnan(value):
        return True
    known = sorted((each for each in values if not math.isnan(each)), reverse=metric.is_maximized)
    if not known:
        return False
    return metric.better(known[min(int(len(known) / eta), len(known) - 1)], value)


def iterations_to_compare(sweep: Sweep) -> Iterator[int]:
    """Yield the iterations at which trials are compared, ascending; empty without early termination."""
    early = sweep.early
    if early is None and sweep.method != "hyperband":
        return
    eta = 3.0 if early is None else early.eta
    if early is not None and early.min_iter is None and sweep.method != "hyperband":
        assert early.max_iter is not None
        assert early.s is not None
        bands = {int(early.max_iter / eta**number) for number in range(1, early.s + 1)}
        yield from sorted(band for band in bands if band >= 1)
        return
    if sweep.method == "hyperband":
        eta = float(max(2, round(eta)))
    last = _LAST_ITERATION if early is None or early.max_iter is None else early.max_iter
    band, before = float(_first(early)), 0
    for _ in range(_MOST_BANDS):
        if band > last:
            return
        if int(band) > before:
            before = int(band)
            yield before
        band *= eta


def _first(early: EarlyEnd | None) -> int:
    if early is None:
        return 1
    if early.min_iter is not None:
        return early.min_iter
    assert early.max_iter is not None
    assert early.s is not None
    return max(1, int(early.max_iter / early.eta**early.s))


SWEEP: Final = "stepscope sweep"
VALUES: Final = "values"
REASON: Final = "reason"
FOLDER: Final = "folder"
COUNT: Final = "iterations"
_REPEATS: Final = "repeats"
MOST_REPEATS: Final = 3


class SweepStudy(SharedStudy):
    """The study of a sweep.

    Args:
        place: the database, as in `stepscope.tune.study`.
        folder: the sweep's, with the lock of the processes that share it.

    Raises:
        UsageError: it cannot be opened, or was begun with other parameters or for another metric.
    """

    def __init__(self, sweep: Sweep, place: str | Path, folder: Path) -> None:
        self.sweep = sweep
        self._lock = folder / "sweep.lock"
        self._is_locked_by_all = "://" not in str(
            place
        )  # processes that share a database on another machine may not have this lock
        self._grid = make_grid(sweep) if sweep.method == "grid" else None
        sampler, pruner = make_sampler(sweep, 0), make_pruner(sweep)
        with held(self._lock), quietly():
            study = open_study(place, sweep.name, direction=sweep.metric.goal, sampler=sampler, pruner=pruner)
            super().__init__(study)
            self.earlier_command = self._agree()

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def begin(self) -> optuna.Trial | None:
        """Take the next trial, first those to be repeated; None if the requested number has begun."""
        with held(self._lock), quietly():
            trials = self.trials()
            if not self._may_begin(trials):
                return None
            if self.sweep.seed is not None:
                self.study.sampler = make_sampler(self.sweep, len(trials)) if self._grid is None else self._grid
            distributions = {each.name: each.optuna_distribution() for each in self.sweep.searched}
            trial: optuna.Trial = self.study.ask(fixed_distributions=distributions)
            self.take(trial)
            trial.set_user_attr(VALUES, self.values_of(trial.params))
            return trial

    def values_of(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Every parameter's value for the program, in the file's order."""
        return {
            each.name: each.values[0] if each.is_constant else each.value_of(drawn[each.name])
            for each in self.sweep.parameters
        }

    def is_behind(self, trial: optuna.Trial, iteration: int, value: float) -> bool:
        """Report an intermediate value; return whether to end the trial because of it."""
        with quietly():
            trial.report(value, iteration)
            return bool(trial.should_prune())
        return False

    def complete(self, trial: optuna.Trial, value: float, iterations: int) -> None:
        """Complete the trial with the value that `iterations` values led to."""
        with quietly():
            if iterations not in self.trials()[trial.number].intermediate_values:
                trial.report(value, iterations)
            trial.set_user_attr(COUNT, iterations)
            self.study.tell(trial, value, skip_if_finished=True)

    def prune(self, trial: optuna.Trial, iterations: int) -> None:
        self.note(trial, COUNT, iterations)
        self.end(trial, "PRUNED")

    def fail(self, trial: optuna.Trial, reason: str) -> None:
        self.note(trial, REASON, reason[:1000])
        self.end(trial, "FAIL")

    def give_back(self, trial: optuna.Trial, reason: str) -> None:
        """Mark the trial as interrupted: the next process that looks repeats it."""
        with held(self._lock), quietly():
            self._abandon(self.trials()[trial.number], reason, counts=False)

    def take_from_the_dead(self) -> list[int]:
        """Have the trials of dead processes repeated; return their numbers."""
        with held(self._lock), quietly():
            found = [trial for trial in self.trials() if trial.state.name == "RUNNING" and self.is_lost(trial)]
            for trial in found:
                self._abandon(trial, "the process that ran it is gone", counts=True)
            return [trial.number for trial in found]

    def has_reached_target(self) -> bool:
        """Whether a trial's value is as good as the metric's target."""
        target = self.sweep.metric.target
        if target is None:
            return False
        values = [trial.value for trial in self.trials() if trial.state.name == "COMPLETE"]
        return any(value is not None and not self.sweep.metric.better(target, value) for value in values)

    def _may_begin(self, trials: list[optuna.trial.FrozenTrial]) -> bool:
        if any(trial.state.name == "WAITING" for trial in trials):
            return True
        if self.sweep.trials is not None and len(counted(trials)) >= self.sweep.trials:
            return False
        return self._grid is None or bool(self._grid.left(self.study))

    def _agree(self) -> str:
        """Store the sweep in the study, or check that it is the same; return the previous command if it differs.

        Raises UsageError if it is another sweep.
        """
        known = self.study.user_attrs.get(SWEEP)
        if known is None:
            if self.trials():
                raise UsageError(f"stepscope sweep did not create the study {self.sweep.name}; choose another name")
            self.study.set_user_attr(SWEEP, msgspec.to_builtins(self.sweep))
            return ""
        before = kept_sweep(known, self.sweep.name)
        change = _difference(before, self.sweep)
        if change:
            raise UsageError(
                f"the study {self.sweep.name} was begun {change}; use another --folder or name for a new one"
            )
        self.study.set_user_attr(SWEEP, msgspec.to_builtins(self.sweep))
        return before.command.shown if before.command != self.sweep.command else ""

    def _abandon(self, trial: optuna.trial.FrozenTrial, reason: str, *, counts: bool) -> None:
        """Queue a trial with the same values, then mark this one: in this order a kill in between loses nothing."""
        package = import_optuna()
        waiting, failed = package.trial.TrialState.WAITING, package.trial.TrialState.FAIL
        repeats = int(trial.user_attrs.get("deaths", 0)) + counts
        storage = self.study._storage
        if repeats > MOST_REPEATS:
            storage.set_trial_user_attr(trial._trial_id, REASON, f"{reason}; it was repeated {MOST_REPEATS} times")
            storage.set_trial_state_values(trial._trial_id, state=failed)
            return
        is_queued = any(each.user_attrs.get(_REPEATS) == trial.number for each in self.trials())
        if VALUES in trial.user_attrs and not is_queued:
            names = ("grid_id", "search_space")
            kept = {name: trial.system_attrs[name] for name in names if name in trial.system_attrs}
            self.study.add_trial(
                package.create_trial(
                    state=waiting,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs={_REPEATS: trial.number, "deaths": repeats},
                    system_attrs=kept,
                )
            )
        storage.set_trial_user_attr(trial._trial_id, ABANDONED, reason)
        storage.set_trial_state_values(trial._trial_id, state=failed)

    def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the process that took the trial is gone; it may have died before it stored its name."""
        if isinstance(trial.user_attrs.get(OWNER), dict):
            return super().is_lost(trial)
        begun = trial.datetime_start  # without a common lock, its process may be taking it now
        return self._is_locked_by_all or begun is None or time.time() - begun.timestamp() > SILENT_S


def kept_sweep(content: Any, name: str) -> Sweep:
    """Load the sweep stored in a study. Raises UsageError if it cannot be read."""
    try:
        return converted(content, Sweep)
    except msgspec.ValidationError as error:
        raise UsageError(f"the study {name} was written by another version of stepscope: {error}") from error


def counted(trials: list[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in trials if ABANDONED not in trial.user_attrs]


def _difference(before: Sweep, now: Sweep) -> str:
    """Describe why the trials of the two cannot be compared; empty if they can."""
    if before.metric.name != now.metric.name or before.metric.goal != now.metric.goal:
        goal = f"to {before.metric.goal} {before.metric.name}"
        return f"{goal}, not to {now.metric.goal} {now.metric.name}"
    one, other = ({each.name: each for each in sweep.parameters} for sweep in (before, now))
    differ = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    if differ:
        return f"with another {', '.join(differ)}"
    if before.method != now.method and "grid" in (before.method, now.method):
        return f"by method {before.method}, not {now.method}"
    return ""
