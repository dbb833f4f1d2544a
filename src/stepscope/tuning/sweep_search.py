"""How a sweep's next values are chosen, and which trials are ended early: Optuna's samplers and pruners for a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from stepscope.errors import UsageError
from stepscope.tuning.storage import import_optuna
from stepscope.tuning.sweep_file import EarlyEnd, Metric, Sweep

if TYPE_CHECKING:
    import optuna

ABANDONED: Final = "abandoned"
"""On a trial whose process died, or which was interrupted: it counts for nothing, another one repeats it."""
_LARGEST_GRID: Final = 100_000
_LAST_ITERATION: Final = 10**9
_MOST_BANDS: Final = 100


def make_sampler(sweep: Sweep, begun: int) -> optuna.samplers.BaseSampler:
    """What chooses the values of the next trial.

    Args:
        begun: trials of the study so far. A seed stands for one course of the whole study, so what one trial draws
            depends on it and on the trial's place, however often the sweep was stopped meanwhile.

    Raises:
        UsageError: a grid's values cannot be counted up, or are too many.
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
    """Every combination of values, each once, in an order that a seed changes.

    Raises:
        UsageError: a parameter's values cannot be counted up, or there are too many combinations.
    """
    package = import_optuna()
    values = {parameter.name: parameter.grid() for parameter in sweep.searched}
    size = math.prod(map(len, values.values()))
    if size > _LARGEST_GRID:
        raise UsageError(f"parameters: the grid has {size:,} combinations; at most {_LARGEST_GRID:,} can be tried")

    class Grid(package.samplers.GridSampler):  # type: ignore[misc, name-defined]
        """Optuna's, for trials that are asked for one by one: it takes what nobody has begun."""

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
            """Optuna's ends a loop of its own here, which there is none of."""

        def left(self, study: optuna.Study) -> list[int]:
            """The numbers of the combinations that no trial has begun."""
            trials = [trial for trial in study.get_trials(deepcopy=False) if ABANDONED not in trial.user_attrs]
            taken = {trial.system_attrs.get("grid_id") for trial in trials}
            return [number for number in range(len(self._all_grids)) if number not in taken]

    return Grid(values, seed=sweep.seed or 0)


def make_pruner(sweep: Sweep) -> optuna.pruners.BasePruner:
    """What says whether a trial is to be ended."""
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
        """W&B's Hyperband: at certain iterations, only the best 1/eta of all trials so far goes on."""

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
    """Whether a trial is worse than the best 1/eta of all values at the same iteration, its own among them.

    As W&B's sweeps compare: with the value at the place `int(count / eta)`, the best being at 0.
    """
    if math.isnan(value):
        return True
    known = sorted((each for each in values if not math.isnan(each)), reverse=metric.is_maximized)
    if not known:
        return False
    return metric.better(known[min(int(len(known) / eta), len(known) - 1)], value)


def iterations_to_compare(sweep: Sweep) -> Iterator[int]:
    """The iterations at which trials are compared, ascending; none where no trial is ended early."""
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
    """The first iteration at which trials are compared."""
    if early is None:
        return 1
    if early.min_iter is not None:
        return early.min_iter
    assert early.max_iter is not None
    assert early.s is not None
    return max(1, int(early.max_iter / early.eta**early.s))
