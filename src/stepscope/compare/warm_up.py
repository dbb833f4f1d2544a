"""Where the steps of a run become steady: MSER-5, the marginal standard error rule.

The rule (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69, 1997; found
the best of 44 by Hoad, Robinson and Davies, Journal of the Operational Research Society 61, 2010) leaves out as many
values at the beginning as make the standard error of the mean of the rest least, which is the sum of the squared
deviations over the square of their number: to leave out slow steps makes their spread smaller, to leave out steady ones
makes their number smaller. It works on means of five steps, and never leaves out more than half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
