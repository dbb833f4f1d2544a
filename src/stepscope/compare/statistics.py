"""Whether one program's steps take longer than another's: means with intervals, and what the data could have shown.

Steps that follow each other resemble each other, so a hundred steps tell less than a hundred independent ones. From
the correlation `r` of neighbouring steps (corrected for its bias in short series, Marriott and Pope 1954) the steps
of one run count as `n (1 - r) / (1 + r)` independent ones (Bartlett 1946), and Student's t gives the interval of
their mean. Where runs were repeated, what differs from run to run counts as well: the runs' means are then the
sample. The change is compared as the logarithm of the means' ratio, with Welch's degrees of freedom. Where there are
enough of them, blocks of consecutive steps (or the runs) are resampled as well (scipy.stats.bootstrap, bias-corrected
and accelerated, widened as Hesterberg 2015 advises for small samples); the interval given spans both, so that it is
never narrower than either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

Verdict: TypeAlias = Literal["faster", "slower", "no difference shown"]
Numbers: TypeAlias = npt.NDArray[np.float64]

POWER: Final = 0.8
"""The chance with which a difference as large as `smallest_detectable` would have been shown."""
FEWEST_BLOCKS: Final = 20
"""Blocks of steps, or runs, a side from which on they are resampled; fewer repeat themselves too often."""
MOST_BLOCKS: Final = 200
BLOCK_LENGTH: Final = 2.0
"""Length of a block, in steps that together tell as much as one independent step."""
SHORT_SERIES: Final = 10
"""Steps below which their correlation cannot be told; it is then taken to be higher than it looks."""
FEW_STEPS: Final = 20
_STANDING_OUT: Final = 3.0
_NOTABLE_CORRELATION: Final = 0.3
_HIGHEST_CORRELATION: Final = 0.99


@dataclass(frozen=True, slots=True)
class SampleComparison:
    """Two programs' step times beside each other. Times are nanoseconds a step.

    Attributes:
        before_ns, after_ns: the mean step: of the steps of a run, and of the runs' means; None without steps.
        before_low_ns, before_high_ns, after_low_ns, after_high_ns: the mean's interval; None where there is none.
        change: after_ns / before_ns - 1: 0.1 is 10 % slower; None where it is not defined.
        change_low, change_high: its interval; None where there is none.
        verdict: "faster" or "slower" if the interval of the change leaves out 0.
        smallest_detectable: the smallest difference, as a share of before_ns, that such data show four times out of
            five: exp((1 + t(0.8) / t(0.975)) h) - 1, where h is half the interval's width on the logarithmic scale and
            t Student's quantiles with its degrees of freedom (for another confidence, its quantile); None without an
            interval.
        before_runs, after_runs: runs with steps.
        before_steps, after_steps: of all of them.
        confidence: of the intervals, 0 to 1.
        caveats: what makes these figures less certain than they look, a sentence each.
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

    def is_slower_by(self, least: float) -> bool:
        """Whether it is shown to be slower, and the estimate is at least this share of `before_ns`."""
        return self.verdict == "slower" and self.change is not None and self.change >= least


@dataclass(frozen=True, slots=True)
class _Side:
    """One program's steps.

    Attributes:
        runs: the steps of each.
        means: of each run.
        independent: for each run, how many independent steps its own tell as much as.
        error: standard error of `mean`, in nanoseconds.
        freedom: its degrees of freedom.
        units: what is resampled: the runs' means, or those of blocks of the only run.
    """

    runs: tuple[Numbers, ...]
    means: Numbers
    independent: tuple[float, ...]
    error: float
    freedom: float
    units: Numbers

    @property
    def mean(self) -> float:
        return float(self.means.mean())

    @property
    def steps(self) -> int:
        return sum(map(len, self.runs))


def joint_confidence(confidence: float, comparisons: int) -> float:
    """Of each of several intervals, so that all of them together hold with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / max(comparisons, 1)


def compare_samples(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> SampleComparison:
    """Compare two programs by the times of their steps; the same arguments give the same answer.

    Args:
        before, after: for each run (each process, each trace) the nanoseconds of its consecutive steps. Runs without
            steps are passed over.
        confidence: of the intervals, between 0 and 1.
        resamples: of the bootstrap.

    Returns:
        With fewer than two steps on a side there is no interval and no difference is shown; a caveat says so.

    Raises:
        ValueError: a step time that is negative or no number, or a confidence out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence must lie between 0 and 1, not at {confidence}")
    sides = _sides(_runs(before), _runs(after))
    generator = np.random.default_rng(seed)
    intervals = [_mean_interval(side, confidence, resamples, generator) for side in sides]
    change = _change(sides)
    interval = None if change is None else _change_interval(sides, change, confidence, resamples, generator)
    low, high = (None, None) if interval is None else (float(np.expm1(interval[0])), float(np.expm1(interval[1])))
    means = [side.mean if side.steps else None for side in sides]
    return SampleComparison(
        before_ns=means[0],
        before_low_ns=intervals[0][0],
        before_high_ns=intervals[0][1],
        after_ns=means[1],
        after_low_ns=intervals[1][0],
        after_high_ns=intervals[1][1],
        change=change,
        change_low=low,
        change_high=high,
        verdict=_verdict(low, high),
        smallest_detectable=None if interval is None else _smallest_detectable(sides, interval, confidence),
        before_runs=len(sides[0].runs),
        after_runs=len(sides[1].runs),
        before_steps=sides[0].steps,
        after_steps=sides[1].steps,
        confidence=confidence,
        caveats=_caveats(*sides),
    )


def _runs(given: Sequence[Sequence[float]]) -> tuple[Numbers, ...]:
    runs = tuple(np.asarray(run, np.float64) for run in given if len(run))
    if any(not np.isfinite(run).all() or (run < 0).any() for run in runs):
        raise ValueError("a step's time is a number of nanoseconds, not negative and not infinite")
    return runs


def _sides(before: tuple[Numbers, ...], after: tuple[Numbers, ...]) -> tuple[_Side, _Side]:
    """Both sides; where only one was run several times, the other is taken to differ as much from run to run."""
    spreads = [_spread_of_runs(runs) for runs in (before, after)]
    first = _side(before, spreads[1], len(after))
    return first, _side(after, spreads[0], len(before))


def _spread_of_runs(runs: tuple[Numbers, ...]) -> float | None:
    """Standard deviation of the runs' means over their mean; None where there are not several."""
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
    """Of neighbouring steps, 0 to below 1, corrected for looking too small in a short series."""
    count = len(steps)
    apart = steps - steps.mean()
    square = float(apart @ apart)
    if count < 3 or square <= 0:
        return 0.0
    found = float(apart[1:] @ apart[:-1]) / square
    caution = 0.25 / count**0.5 if count < SHORT_SERIES else 0.0
    return min(max(found + (1 + 3 * found) / count + caution, 0.0), _HIGHEST_CORRELATION)


def _independent_steps(steps: Numbers) -> float:
    """How many independent steps these tell as much as: at least 2, at most all."""
    correlation = _correlation(steps)
    return max(len(steps) * (1 - correlation) / (1 + correlation), min(len(steps), 2.0))


def _variance_of_mean(steps: Numbers, independent: float) -> float:
    """Of a run's mean, from its steps; 0 of a single step, which cannot tell."""
    if len(steps) < 2:
        return 0.0
    # Steps that resemble each other also look less scattered than they are.
    shrunk = max(1 - 1 / independent, 0.3)
    return float(steps.var()) / shrunk / independent


def _blocks(steps: Numbers, independent: float) -> Numbers:
    """Means of consecutive blocks, long enough to be all but independent of each other."""
    length = BLOCK_LENGTH * len(steps) / independent if independent < len(steps) else 1.0
    count = min(int(len(steps) / length), MOST_BLOCKS)
    return np.array([part.mean() for part in np.array_split(steps, max(count, 1))])


def _mean_interval(
    side: _Side, confidence: float, resamples: int, generator: np.random.Generator
) -> tuple[float, float] | tuple[None, None]:
    if side.steps < 2:
        return None, None
    reach = _quantile(confidence, side.freedom) * side.error
    low, high = side.mean - reach, side.mean + reach
    found = _bootstrap((side.units,), np.mean, confidence, resamples, generator)
    if found is not None:
        low, high = min(low, found[0]), max(high, found[1])
    return max(low, 0.0), high


def _change(sides: tuple[_Side, _Side]) -> float | None:
    before, after = sides
    if not (before.steps and after.steps) or before.mean <= 0 or after.mean <= 0:
        return None
    return after.mean / before.mean - 1


def _change_interval(
    sides: tuple[_Side, _Side], change: float, confidence: float, resamples: int, generator: np.random.Generator
) -> tuple[float, float] | None:
    """Of the logarithm of the means' ratio."""
    if min(side.steps for side in sides) < 2:
        return None
    error, freedom = _error_of_change(sides)
    reach = _quantile(confidence, freedom) * error
    middle = float(np.log1p(change))
    low, high = middle - reach, middle + reach
    units = (sides[0].units, sides[1].units)
    found = _bootstrap(units, _logarithm_of_ratio, confidence, resamples, generator)
    return (low, high) if found is None else (min(low, found[0]), max(high, found[1]))


def _error_of_change(sides: tuple[_Side, _Side]) -> tuple[float, float]:
    """Standard error of the logarithm of the means' ratio, and its degrees of freedom (Welch and Satterthwaite)."""
    parts = [(side.error / side.mean) ** 2 for side in sides]
    total = sum(parts)
    if not total:
        return 0.0, min(side.freedom for side in sides)
    divisor = sum(part**2 / side.freedom for part, side in zip(parts, sides, strict=True))
    freedom = total**2 / divisor
    runs = [len(side.runs) for side in sides]
    if min(runs) == 1 and max(runs) > 1:  # both errors were taken from the same runs
        freedom = min(freedom, max(runs) - 1.0)
    return total**0.5, freedom


def _logarithm_of_ratio(before: Numbers, after: Numbers, axis: int = -1) -> Any:
    return np.log(after.mean(axis=axis) / before.mean(axis=axis))


def _bootstrap(
    samples: tuple[Numbers, ...],
    statistic: Callable[..., Any],
    confidence: float,
    resamples: int,
    generator: np.random.Generator,
) -> tuple[float, float] | None:
    """Interval by resampling, widened for small samples; None where too few or all the same."""
    fewest = min(map(len, samples))
    if fewest < FEWEST_BLOCKS or resamples < 1 or any(np.ptp(sample) <= 0 for sample in samples):
        return None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of degenerate data, whose interval is passed over below
        found = stats.bootstrap(
            samples,
            statistic,
            confidence_level=confidence,
            n_resamples=resamples,
            batch=1000,
            vectorized=True,
            method="BCa",
            random_state=generator,
        ).confidence_interval
    middle = float(statistic(*samples))
    widened = _quantile(confidence, fewest - 1) / _quantile(confidence, None) * (fewest / (fewest - 1)) ** 0.5
    low, high = (middle + (float(end) - middle) * widened for end in (found.low, found.high))
    return (low, high) if np.isfinite([low, high]).all() else None


def _quantile(confidence: float, freedom: float | None) -> float:
    """How many standard errors an interval reaches to each side; `freedom` None is the normal distribution."""
    return _one_sided((1 + confidence) / 2, freedom)


def _one_sided(share: float, freedom: float | None) -> float:
    return float(stats.norm.ppf(share) if freedom is None else stats.t.ppf(share, freedom))


def _verdict(low: float | None, high: float | None) -> Verdict:
    if low is not None and low > 0:
        return "slower"
    if high is not None and high < 0:
        return "faster"
    return "no difference shown"


def _smallest_detectable(sides: tuple[_Side, _Side], interval: tuple[float, float], confidence: float) -> float:
    _, freedom = _error_of_change(sides)
    half = (interval[1] - interval[0]) / 2
    return float(np.expm1(min(half * (1 + _one_sided(POWER, freedom) / _quantile(confidence, freedom)), 700.0)))


def _caveats(before: _Side, after: _Side) -> tuple[str, ...]:
    found = []
    for name, side in (("before", before), ("after", after)):
        found += _caveats_of(name, side)
    fewest = min(before.steps, after.steps)
    runs = (len(before.runs), len(after.runs))
    if 2 <= fewest < FEW_STEPS and max(runs) == 1:
        found.append(f"Few steps: {before.steps} before and {after.steps} after. The interval is wide for that reason.")
    if fewest and max(runs) == 1:
        found.append(
            "One run a side: what changed between the two runs by chance, such as a machine that got slower, "
            "cannot be told from what the change did."
        )
    elif fewest and min(runs) == 1:
        found.append("One side was run once; it is taken to differ as much from run to run as the other.")
    elif 2 <= min(runs) <= 3:
        found.append(f"Few runs: {runs[0]} before and {runs[1]} after. More runs make the interval narrower.")
    return tuple(found)


def _caveats_of(name: str, side: _Side) -> list[str]:
    if side.steps < 2:
        return [f"{'Only one step' if side.steps else 'No step'} {name}: at least two are needed to tell a difference."]
    found = []
    steps = np.concatenate(side.runs)
    middle = float(np.median(steps))
    standing_out = int((steps > _STANDING_OUT * middle).sum())
    if standing_out and middle > 0:
        what = "One step" if standing_out == 1 else f"{standing_out} steps"
        takes = "takes" if standing_out == 1 else "take"
        found.append(
            f"{what} {name} {takes} more than {_STANDING_OUT:.0f} times the median, the longest "
            f"{float(steps.max()) / middle:.1f} times; the mean counts {'it' if standing_out == 1 else 'them'} as well."
        )
    independent = sum(side.independent)
    if side.steps >= SHORT_SERIES and _alike(side) > _NOTABLE_CORRELATION:
        found.append(
            f"Neighbouring steps {name} resemble each other: {side.steps} steps tell as much as "
            f"{independent:.0f} independent ones."
        )
    return found


def _alike(side: _Side) -> float:
    """The correlation of neighbouring steps, the mean of the runs'."""
    return float(np.mean([_correlation(run) for run in side.runs]))


NAME: Final = "MSER-5"
_BATCH: Final = 5
_FEWEST_BATCHES: Final = 10
"""Fewer steps than make this many batches of five are looked at in smaller batches."""
_FEWEST_TO_JUDGE: Final = 10
"""So many steps must be left to tell whether they still change."""
_UNLIKELY: Final = 0.01
_NOTICEABLE: Final = 0.02
"""A change from the first to the second half of the rest that is smaller than this share is none."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What the rule says of the steps of one run.

    Attributes:
        dropped: how many steps at the beginning do not count.
        batch: steps of which the rule looked at the means; 5, or fewer where there are fewer than 50 steps.
        steady: False where the steps that are left still became faster or slower; no more than half was to be dropped.
    """

    dropped: int
    batch: int
    steady: bool


def warm_up(step_ns: Sequence[float]) -> WarmUp:
    """How many of a run's consecutive steps to drop as its warm-up; none of fewer than four.

    Args:
        step_ns: times of the steps, the first that was timed first.
    """
    count = len(step_ns)
    batch = max(1, min(_BATCH, count // _FEWEST_BATCHES))
    if count < 4:
        return WarmUp(0, batch, True)
    import numpy

    batches = count // batch
    means = numpy.asarray(step_ns[: batches * batch], float).reshape(batches, batch).mean(axis=1)
    errors = [_error(means[first:]) for first in range(batches // 2 + 1)]
    dropped = int(numpy.argmin(errors)) * batch  # of equal ones the first, so that steps without spread all count
    return WarmUp(dropped, batch, _is_steady(step_ns[dropped:]))


def _error(values: object) -> float:
    """The square of the standard error of the mean, as the rule has it."""
    import numpy

    array = numpy.asarray(values)
    return float(((array - array.mean()) ** 2).sum() / len(array) ** 2)


def _is_steady(step_ns: Sequence[float]) -> bool:
    """Whether the halves of the rest are alike, by the Mann-Whitney test and by their medians."""
    if len(step_ns) < _FEWEST_TO_JUDGE:
        return True
    import numpy
    from scipy.stats import mannwhitneyu

    half = len(step_ns) // 2
    first, second = step_ns[:half], step_ns[half:]
    change = abs(float(numpy.median(second) / numpy.median(first)) - 1) if min(step_ns) > 0 else 0.0
    return change < _NOTICEABLE or float(mannwhitneyu(first, second).pvalue) >= _UNLIKELY
