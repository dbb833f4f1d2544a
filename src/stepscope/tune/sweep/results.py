"""What a sweep found: its trials, and how much each parameter matters for the metric.

Importance is PED-ANOVA's (Watanabe, Bansal and Hutter, "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance
in Arbitrary Subspaces", IJCAI 2023) as Optuna computes it: how differently a parameter is spread over the best quarter
of the complete trials and over all of them. It needs no model of the metric. Correlation is Spearman's, of ranks: its
sign says whether a larger value goes with a larger metric.
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
"""Of the complete trials, those that importance compares with all of them."""
FEWEST_FOR_IMPORTANCE: Final = 8
"""Complete trials, below which the best quarter is a single trial and its spread says nothing."""
FEWEST_FOR_CORRELATION: Final = 3


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """One trial.

    Attributes:
        values: of every parameter, constants among them; empty where the trial waits.
        value: of the metric; of a pruned trial the last one; None where there is none.
        iterations: how many values of the metric it gave; None where unknown.
        folder: its name in the sweep's folder; None where it has none.
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
    """How a parameter goes with the metric, over the complete trials.

    Attributes:
        importance: its share of all parameters', 0 to 1; None where there are too few trials.
        correlation: Spearman's, -1 to 1; None where its values have no order or did not vary.
        trials: how many complete trials these are of.
    """

    parameter: Parameter
    importance: float | None
    correlation: float | None
    trials: int


@dataclass(frozen=True, slots=True)
class SweepResults:
    """A sweep and its trials so far, in their order; abandoned ones, which were repeated, are left out.

    Attributes:
        effects: of the parameters that are searched, the most important first.
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
    """What a study has.

    Args:
        place: the database.
        name: of the study; None where the database has only one.

    Raises:
        UsageError: stepscope sweep made no study there.
    """
    if name is None:
        name = only_study(place)
    study = open_study(place, name, create=False)
    content = study.user_attrs.get(SWEEP)
    if content is None:
        raise UsageError(f"stepscope sweep did not make the study {name} in {place}")
    return results_of(kept_sweep(content, f"{name} in {place}"), study)


def only_study(place: str | Path) -> str:
    """The name of the only study of a database. Raises UsageError where it has none, or several."""
    names = sorted(import_optuna().get_all_study_names(open_storage(place)))
    if len(names) != 1:
        has = f"{len(names)} studies; say which with --name: {', '.join(names[:10])}" if names else "no study"
        raise UsageError(f"{place} has {has}")
    return str(names[0])


def results_of(sweep: Sweep, study: optuna.Study) -> SweepResults:
    """The trials of a study, and what they say about the parameters."""
    every = study.get_trials(deepcopy=False)
    kept = counted(every)
    trials = tuple(_trial(each) for each in kept)
    return SweepResults(sweep, trials, _effects(sweep, trials, kept), len(every) - len(kept))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of the ranks, equal values sharing theirs; None where too few, or where one side does not vary.

    What scipy.stats.spearmanr gives, whose import would take longer than all else in a report.
    """
    if len(first) < FEWEST_FOR_CORRELATION or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    if not all(map(math.isfinite, (*first, *second))):
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each value among them, from 1; of equal ones the mean of their places."""
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
    """Shares by name; empty where the trials are too few or alike."""
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
