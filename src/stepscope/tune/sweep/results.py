"""The results of a sweep: its trials, and how much each parameter matters for the metric.

Importance is PED-ANOVA's (Watanabe, Bansal and Hutter, "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance
in Arbitrary Subspaces", IJCAI 2023) as Optuna computes it: how differently a parameter is distributed in the best
quarter of the complete trials and in all of them. It needs no model of the metric. Correlation is Spearman's, of ranks:
its sign says whether a larger value goes with a larger metric.
"""

from __future__ import annotations

import inspect
import math
import statistics
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.tune.study import import_optuna, open_storage, open_study
from stepscope.tune.sweep.file import Sweep
from stepscope.tune.sweep.parameters import Parameter
from stepscope.tune.sweep.study import COUNT, FOLDER, REASON, SWEEP, VALUES, counted, kept_sweep

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
        values: of every parameter, including constants; empty while the trial waits.
        value: of the metric; for a pruned trial the last one; None without one.
        iterations: how many values of the metric it gave; None if unknown.
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
        effects: of the searched parameters, the most important first.
        abandoned: how many trials were left unfinished and repeated.
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
        name: of the study; None if the database has only one.

    Raises:
        UsageError: there is no study of `stepscope sweep`.
    """
    if name is None:
        name = only_study(place)
    study = open_study(place, name, create=False)
    content = study.user_attrs.get(SWEEP)
    if content is None:
        raise UsageError(f"stepscope sweep did not make the study {name} in {place}")
    return results_of(kept_sweep(content, f"{name} in {place}"), study)


def only_study(place: str | Path) -> str:
    """The name of a database's only study. Raises UsageError if it has none, or several."""
    names = sorted(import_optuna().get_all_study_names(open_storage(place)))
    if len(names) != 1:
        has = f"{len(names)} studies; say which with --name: {', '.join(names[:10])}" if names else "no study"
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
