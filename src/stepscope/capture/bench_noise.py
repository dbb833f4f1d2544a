"""How much steps differ from each other, and runs from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Final

from stepscope.capture.bench import BenchRun

_FEWEST_RUNS: Final = 3
_UNLIKELY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Noise:
    """Of one command; standard deviations as shares of the mean step.

    Attributes:
        within: of the steps of a run.
        between: of the means of the runs; None with only one run.
        runs_differ: whether the runs' means scatter more than the halves of each run let expect (an F test).
    """

    within: float
    between: float | None
    runs_differ: bool


def noise_of(runs: Sequence[BenchRun]) -> Noise | None:
    """Of a command's runs, by their steady steps; None where there are not two steps in a run."""
    steady = [run.steady_ns for run in runs if len(run.steady_ns) > 1]
    if not steady:
        return None
    means = [fmean(steps) for steps in steady]
    mean = fmean(means)
    if not mean:
        return None
    within = fmean([stdev(steps) for steps in steady]) / mean
    between = stdev(means) / mean if len(means) > 1 else None
    return Noise(within, between, len(means) >= _FEWEST_RUNS and _runs_differ(steady, means))


def _runs_differ(steady: Sequence[Sequence[int]], means: Sequence[float]) -> bool:
    """Compares the scatter of the runs' means with what the halves of each run predict for it.

    The difference between a run's halves has four times the variance of its mean, also where neighbouring steps
    resemble each other, as long as they do not over half a run.
    """
    apart = [fmean(steps[: len(steps) // 2]) - fmean(steps[len(steps) // 2 :]) for steps in steady]
    explained = fmean([each**2 for each in apart]) / 4
    from scipy.stats import f

    scatter = variance(means)
    if not explained:
        return scatter > 0
    return float(f.sf(scatter / explained, len(means) - 1, len(means))) < _UNLIKELY
