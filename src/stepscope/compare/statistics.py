"""Statistics of step times: means, intervals, and the smallest change that the data can show.

Consecutive steps are correlated, so a hundred of them carry less information than a hundred independent ones. With the
lag-one correlation `r` (corrected for its bias in short series, Marriott and Pope 1954) `n` steps of a run count as
`n (1 - r) / (1 + r)` independent ones (Bartlett 1946), and Student's t gives the interval of their mean. With repeated
runs the run means are the sample, so that variation between runs counts too. The change is compared as the logarithm of
the ratio of means, with Welch's degrees of freedom. With enough data, blocks of consecutive steps (or the runs) are
also resampled (scipy.stats.bootstrap, bias-corrected and accelerated, widened for small samples after Hesterberg 2015);
the result is the union of both intervals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Verdict: TypeAlias = Literal["faster", "slower", "no difference shown", "too few steps", "contradictory"]
Numbers: TypeAlias = npt.NDArray[np.float64]
Interval: TypeAlias = tuple[float, float]

POWER: Final = 0.8  # probability of detecting a difference as large as `smallest_detectable`
FEWEST_BLOCKS: Final = 20  # blocks of steps, or runs, that each side needs for resampling
MOST_BLOCKS: Final = 200
BLOCK_LENGTH: Final = 2.0  # block length, in units of the number of steps worth one independent step
SHORT_SERIES: Final = 10
"""Below this many steps the correlation cannot be estimated; it is then assumed to be higher than measured."""
FEW_STEPS: Final = 20
_USELESS: Final = 1.0
"""Data that show no smaller difference than this share of a step tell nothing."""
_STANDING_OUT: Final = 3.0
_NOTABLE_CORRELATION: Final = 0.3
_HIGHEST_CORRELATION: Final = 0.99


@dataclass(frozen=True, slots=True)
class SampleComparison:
    """Comparison of two programs' step times, in nanoseconds per step; None where the data do not give one.

    Attributes:
        before_ns, after_ns: the mean step of a single run, or the mean of the run means.
        before_low_ns, before_high_ns, after_low_ns, after_high_ns: interval of the mean; None if it would reach 0.
        change: after_ns / before_ns - 1: 0.1 is 10 % slower.
        change_low, change_high: interval of the change.
        verdict: "faster" or "slower" if the interval of the change excludes 0; "too few steps" if even a step twice as
            long might not have been shown; "contradictory" if the recorded steps of the same runs say the opposite.
        smallest_detectable: the smallest difference, as a share of before_ns, that data like these show four times out
            of five: exp((1 + t(0.8) / t(0.975)) h) - 1, where h is half the interval's width on the logarithmic scale
            and t Student's quantiles with its degrees of freedom (for another confidence, its quantile).
        before_runs, after_runs: runs that have steps.
        before_steps, after_steps: steps of all runs.
        confidence: confidence of the intervals, 0 to 1.
        caveats: what makes these figures less certain than they look, one sentence each.
    """

    before_ns: float | None
    before_low_ns: float | None
    before_high_ns: float | None
    after_ns: float | None
    after_low_ns: float | None
    after_high_ns: float | None
    change: float | None
    change_low: float | None
    change_high: float | None
    verdict: Verdict
    smallest_detectable: float | None
    before_runs: int
    after_runs: int
    before_steps: int
    after_steps: int
    confidence: float
    caveats: tuple[str, ...]

    @property
    def is_shown(self) -> bool:
        return self.verdict in ("faster", "slower")

    def is_slower_by(self, least: float) -> bool:
        """Whether it is significantly slower and the estimate is at least this share of `before_ns`."""
        return self.verdict == "slower" and self.change is not None and self.change >= least


@dataclass(frozen=True, slots=True)
class _Side:
    runs: tuple[Numbers, ...]
    means: Numbers
    independent: tuple[float, ...]  # equivalent number of independent steps, for each run
    error: float
    freedom: float  # error, freedom: standard error of `mean` in nanoseconds, and its degrees of freedom
    units: Numbers  # units to resample: run means, or block means of a single run

    @property
    def mean(self) -> float:
        return float(self.means.mean())

    @property
    def steps(self) -> int:
        return sum(map(len, self.runs))


def joint_confidence(confidence: float, comparisons: int) -> float:
    """Confidence per interval such that all of them together hold with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / max(comparisons, 1)


def compare_samples(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> SampleComparison:
    """Compare two programs by their step times; the same arguments give the same result.

    Args:
        before, after: for each run (process, trace) the nanoseconds of its consecutive steps. Empty runs are ignored.
        confidence: confidence of the intervals, between 0 and 1.
        resamples: number of bootstrap resamples.

    Returns:
        With fewer than two steps on a side there is no interval and the verdict is "too few steps".

    Raises:
        ValueError: a step time that is negative or not a number, or a confidence out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence must be between 0 and 1, not {confidence}")
    ours, theirs = sides = _sides(_runs(before), _runs(after))
    intervals = _Intervals(confidence, resamples, np.random.default_rng(seed))
    means = [intervals.of_mean(side) for side in sides]
    change = None
    if ours.steps and theirs.steps and ours.mean > 0 and theirs.mean > 0:
        change = theirs.mean / ours.mean - 1
    low, high, detectable = intervals.of_change(ours, theirs, change)
    return SampleComparison(
        before_ns=ours.mean if ours.steps else None,
        before_low_ns=means[0][0],
        before_high_ns=means[0][1],
        after_ns=theirs.mean if theirs.steps else None,
        after_low_ns=means[1][0],
        after_high_ns=means[1][1],
        change=change,
        change_low=low,
        change_high=high,
        verdict=_verdict(low or 0.0, high or 0.0, min(ours.steps, theirs.steps), detectable),
        smallest_detectable=detectable,
        before_runs=len(ours.runs),
        after_runs=len(theirs.runs),
        before_steps=ours.steps,
        after_steps=theirs.steps,
        confidence=confidence,
        caveats=_caveats(ours, theirs),
    )


def _runs(given: Sequence[Sequence[float]]) -> tuple[Numbers, ...]:
    runs = tuple(np.asarray(run, np.float64) for run in given if len(run))
    if any(not np.isfinite(run).all() or (run < 0).any() for run in runs):
        raise ValueError("a step time must be a finite number of nanoseconds that is not negative")
    return runs


def _sides(before: tuple[Numbers, ...], after: tuple[Numbers, ...]) -> tuple[_Side, _Side]:
    """Both sides; if only one was run several times, the other is assumed to vary as much between runs."""
    spreads = [_spread_of_runs(runs) for runs in (before, after)]
    return _side(before, spreads[1], len(after)), _side(after, spreads[0], len(before))


def _spread_of_runs(runs: tuple[Numbers, ...]) -> float | None:
    """Relative standard deviation of the run means; None for a single run."""
    means = np.array([run.mean() for run in runs])
    if len(means) < 2 or not means.mean():
        return None
    return float(means.std(ddof=1) / means.mean())


def _side(runs: tuple[Numbers, ...], other_spread: float | None, other_runs: int) -> _Side:
    means = np.array([run.mean() for run in runs])
    independent = tuple(_independent_steps(run) for run in runs)
    within = [_variance_of_mean(run, count) for run, count in zip(runs, independent, strict=True)]
    if not runs:
        return _Side(runs, means, independent, float("nan"), 0.0, means)
    variance = sum(within) / len(runs) ** 2
    if len(runs) > 1:
        between = float(means.var(ddof=1)) / len(runs)
        return _Side(runs, means, independent, max(variance, between) ** 0.5, len(runs) - 1.0, means)
    blocks = _blocks(runs[0], independent[0])
    if other_spread is not None:
        error = max(variance, (other_spread * float(means[0])) ** 2) ** 0.5
        return _Side(runs, means, independent, error, other_runs - 1.0, means)
    return _Side(runs, means, independent, variance**0.5, max(independent[0] - 1.0, 1.0), blocks)


def _correlation(steps: Numbers) -> float:
    """Lag-one correlation of the steps, 0 to below 1, corrected for its bias in a short series."""
    count = len(steps)
    apart = steps - steps.mean()
    square = float(apart @ apart)
    if count < 3 or square <= 0:
        return 0.0
    found = float(apart[1:] @ apart[:-1]) / square
    caution = 0.25 / count**0.5 if count < SHORT_SERIES else 0.0
    return min(max(found + (1 + 3 * found) / count + caution, 0.0), _HIGHEST_CORRELATION)


def _independent_steps(steps: Numbers) -> float:
    correlation = _correlation(steps)
    return max(len(steps) * (1 - correlation) / (1 + correlation), min(len(steps), 2.0))


def _variance_of_mean(steps: Numbers, independent: float) -> float:
    if len(steps) < 2:
        return 0.0
    # Correlation also makes the measured scatter too small.
    shrunk = max(1 - 1 / independent, 0.3)
    return float(steps.var()) / shrunk / independent


def _blocks(steps: Numbers, independent: float) -> Numbers:
    """Means of consecutive blocks long enough to be nearly independent."""
    length = BLOCK_LENGTH * len(steps) / independent if independent < len(steps) else 1.0
    count = min(int(len(steps) / length), MOST_BLOCKS)
    return np.array([part.mean() for part in np.array_split(steps, max(count, 1))])


@dataclass(frozen=True, slots=True)
class _Intervals:
    confidence: float
    resamples: int
    generator: np.random.Generator

    def of_mean(self, side: _Side) -> Interval | tuple[None, None]:
        if side.steps < 2:
            return None, None
        low, high = self._around(side.mean, side.error, side.freedom, (side.units,), np.mean)
        return (low, high) if low > 0 else (None, None)  # a step takes time: such an interval says nothing

    def of_change(
        self, before: _Side, after: _Side, change: float | None
    ) -> tuple[float, float, float] | tuple[None, None, None]:
        if change is None or min(before.steps, after.steps) < 2:
            return None, None, None
        error, freedom = _error_of_change((before, after))
        units = (before.units, after.units)
        low, high = self._around(float(np.log1p(change)), error, freedom, units, _logarithm_of_ratio)
        factor = 1 + float(_stats().t.ppf(POWER, freedom)) / self._quantile(freedom)
        detectable = float(np.expm1(min((high - low) / 2 * factor, 700.0)))
        return float(np.expm1(low)), float(np.expm1(high)), detectable

    def _quantile(self, freedom: float) -> float:
        """Number of standard errors between the middle and each end of an interval."""
        return float(_stats().t.ppf((1 + self.confidence) / 2, freedom))

    def _around(
        self, middle: float, error: float, freedom: float, units: tuple[Numbers, ...], statistic: Callable[..., Any]
    ) -> Interval:
        """Union of Student's interval and the bootstrap's, if there is one."""
        reach = self._quantile(freedom) * error
        found = self._bootstrap(units, statistic) or (middle, middle)
        return min(middle - reach, found[0]), max(middle + reach, found[1])

    def _bootstrap(self, samples: tuple[Numbers, ...], statistic: Callable[..., Any]) -> Interval | None:
        """Bootstrap interval, widened for small samples; None with too few samples or if all are equal."""
        fewest = min(map(len, samples))
        if fewest < FEWEST_BLOCKS or self.resamples < 1 or any(np.ptp(sample) <= 0 for sample in samples):
            return None
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # degenerate data, whose interval is dropped below
            found = (
                _stats()
                .bootstrap(
                    samples,
                    statistic,
                    confidence_level=self.confidence,
                    n_resamples=self.resamples,
                    batch=1000,
                    vectorized=True,
                    method="BCa",
                    random_state=self.generator,
                )
                .confidence_interval
            )
        middle = float(statistic(*samples))
        normal = float(_stats().norm.ppf((1 + self.confidence) / 2))
        widened = self._quantile(fewest - 1) / normal * (fewest / (fewest - 1)) ** 0.5
        low, high = (middle + (float(end) - middle) * widened for end in (found.low, found.high))
        return (low, high) if np.isfinite([low, high]).all() else None


def _logarithm_of_ratio(before: Numbers, after: Numbers, axis: int = -1) -> Any:
    return np.log(after.mean(axis=axis) / before.mean(axis=axis))


def _error_of_change(sides: tuple[_Side, _Side]) -> tuple[float, float]:
    """Standard error of the log-ratio of means, and its degrees of freedom (Welch and Satterthwaite)."""
    parts = [(side.error / side.mean) ** 2 for side in sides]
    total = sum(parts)
    if not total:
        return 0.0, min(side.freedom for side in sides)
    freedom = total**2 / sum(part**2 / side.freedom for part, side in zip(parts, sides, strict=True))
    runs = [len(side.runs) for side in sides]
    if min(runs) == 1 and max(runs) > 1:  # both errors come from the same runs
        freedom = min(freedom, max(runs) - 1.0)
    return total**0.5, freedom


def _verdict(low: float, high: float, fewest: int, detectable: float | None) -> Verdict:
    if low > 0:
        return "slower"
    if high < 0:
        return "faster"
    return "too few steps" if fewest < 2 or (detectable or 0.0) >= _USELESS else "no difference shown"


def _caveats(before: _Side, after: _Side) -> tuple[str, ...]:
    found = [*_caveats_of("before", before), *_caveats_of("after", after)]
    fewest = min(before.steps, after.steps)
    runs = (len(before.runs), len(after.runs))
    if 2 <= fewest < FEW_STEPS and max(runs) == 1:
        found.append(f"Few steps: {before.steps} before and {after.steps} after. The interval is therefore wide.")
    if fewest and max(runs) == 1:
        found.append(
            "One run per side: what changed between the two runs by chance, such as a machine that got slower, "
            "cannot be told from the effect of the change."
        )
    elif fewest and min(runs) == 1:
        found.append("One side was run once; it is assumed to vary as much from run to run as the other.")
    elif 2 <= min(runs) <= 3:
        found.append(f"Few runs: {runs[0]} before and {runs[1]} after. More runs narrow the interval.")
    return tuple(found)


def _caveats_of(name: str, side: _Side) -> list[str]:
    if side.steps < 2:
        return [f"{'Only one step' if side.steps else 'No step'} {name}: at least two are needed to show a difference."]
    found = []
    steps = np.concatenate(side.runs)
    middle = float(np.median(steps))
    standing_out = int((steps > _STANDING_OUT * middle).sum())
    if standing_out and middle > 0:
        many = (f"{standing_out} steps", "take", "them")
        what, takes, them = ("One step", "takes", "it") if standing_out == 1 else many
        found.append(
            f"{what} {name} {takes} more than {_STANDING_OUT:.0f} times the median, the longest "
            f"{float(steps.max()) / middle:.1f} times; the mean counts {them} as well."
        )
    correlation = float(np.mean([_correlation(run) for run in side.runs]))
    if side.steps >= SHORT_SERIES and correlation > _NOTABLE_CORRELATION:
        found.append(
            f"Neighbouring steps {name} resemble each other: {side.steps} steps are worth "
            f"{sum(side.independent):.0f} independent ones."
        )
    return found


NAME: Final = "MSER-5"
_BATCH: Final = 5
_FEWEST_BATCHES: Final = 10  # with fewer steps than ten batches of five, smaller batches are used
_FEWEST_TO_JUDGE: Final = 10  # remaining steps needed to judge whether they still change
_UNLIKELY: Final = 0.01
_NOTICEABLE: Final = 0.02
"""Largest relative change between the halves of the remaining steps for them to count as steady."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Result of MSER-5 for one run."""

    dropped: int  # number of steps to drop at the beginning
    batch: int  # steps per batch mean; 5, or fewer with less than 50 steps
    steady: bool  # False if the remaining steps still get faster or slower; at most half may be dropped


def warm_up(step_ns: Sequence[float]) -> WarmUp:
    """Find the warm-up of a run's consecutive steps; nothing is dropped from fewer than four."""
    count = len(step_ns)
    batch = max(1, min(_BATCH, count // _FEWEST_BATCHES))
    if count < 4:
        return WarmUp(0, batch, True)
    batches = count // batch
    means = np.asarray(step_ns[: batches * batch], float).reshape(batches, batch).mean(axis=1)
    rests = [means[first:] for first in range(batches // 2 + 1)]
    errors = [((rest - rest.mean()) ** 2).sum() / len(rest) ** 2 for rest in rests]  # squared errors of the means
    dropped = int(np.argmin(errors)) * batch  # the first minimum, so that all steps count if they do not scatter
    return WarmUp(dropped, batch, _is_steady(step_ns[dropped:]))


def _stats() -> Any:
    """scipy.stats, which only measured samples need: importing it takes longer than diagnosing a trace."""
    from scipy import stats

    return stats


def _is_steady(step_ns: Sequence[float]) -> bool:
    """Whether the halves are alike, by the Mann-Whitney test and by their medians."""
    if len(step_ns) < _FEWEST_TO_JUDGE:
        return True
    half = len(step_ns) // 2
    first, second = step_ns[:half], step_ns[half:]
    change = abs(float(np.median(second) / np.median(first)) - 1) if min(step_ns) > 0 else 0.0
    return change < _NOTICEABLE or float(_stats().mannwhitneyu(first, second).pvalue) >= _UNLIKELY
