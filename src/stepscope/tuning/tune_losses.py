"""Whether a program that was changed still computes the same losses.

Both sides run in turn from the same seeds, so that a change that only reorders sums leaves the losses all but equal.
Three things stand behind what is allowed, the first that lets a change pass counts:

1. The tolerance of what was changed (`TOLERANCES`), relative to the loss.
2. Twice the largest difference between runs of the unchanged program, which is more than the tolerance where the
   program itself is not repeatable.
3. For what draws other random numbers (workers that augment, a compiled dropout): the largest difference that another
   seed makes in the unchanged program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final, Literal

from stepscope.tuning.tune_knobs import Losses

TOLERANCES: Final[dict[Losses, float]] = {"reordered": 1e-4, "compiled": 1e-3, "tf32": 5e-3, "half": 2e-2}
"""Largest relative difference of a loss. Sums in another order differ by some 1e-7 in FP32, and training makes such
differences larger step by step. TF32 keeps 11 bits of each factor (5e-4), bf16 8 bits (4e-3)."""
NATURAL: Final = 2.0
_SMALL_LOSS: Final = 0.1
"""A loss below this share of the run's mean is compared as if it were that large: small losses end in noise."""


@dataclass(frozen=True, slots=True)
class LossCheck:
    """What a comparison of losses came to.

    Attributes:
        equal: whether they are as equal as is allowed; None where there were none to compare.
        largest: the largest relative difference; None where there were none to compare, or one is no number.
        allowed: the largest that is allowed.
        basis: what `allowed` is: the tolerance, the spread of the unchanged program's runs, or another seed's.
        compared: losses of a run.
        sentence: what is wrong, for people; "" where nothing is.
    """

    equal: bool | None
    largest: float | None = None
    allowed: float = 0.0
    basis: Literal["tolerance", "runs", "seed"] = "tolerance"
    compared: int = 0
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the study and reports."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LossCheck:
        """The reverse of `to_json`."""
        return cls(**content)


def compare_losses(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    tolerance: float,
    seeded: Sequence[float] = (),
) -> LossCheck:
    """Compare the losses of an unchanged and a changed program.

    Args:
        before, after: for each run, the losses of its backward passes in order.
        tolerance: largest relative difference that is allowed in any case.
        seeded: losses of the unchanged program with another seed, for what draws other random numbers.
    """
    first, second = [run for run in before if run], [run for run in after if run]
    if not first and not second:
        return LossCheck(None, sentence="no backward pass was seen, so no losses could be compared")
    if not first or not second:
        return LossCheck(False, sentence="only one of the programs made backward passes")
    count = min(map(len, [*first, *second]))
    broken = next((step for step in range(count) if _is_broken(first, second, step)), None)
    if broken is not None:
        return LossCheck(False, None, tolerance, compared=count, sentence=f"loss {broken + 1} is no number any more")
    scale = _scale(first, count)
    largest = max(_difference(one, _mean(first, count), scale) for one in second)
    runs = NATURAL * max((_difference(one, other, scale) for one in first for other in first), default=0.0)
    seeds = _difference(seeded, _mean(first, count), scale) if seeded else 0.0
    if largest <= tolerance:
        return LossCheck(True, largest, tolerance, "tolerance", count)
    if largest <= runs:
        return LossCheck(True, largest, runs, "runs", count)
    if largest <= seeds:
        return LossCheck(True, largest, seeds, "seed", count)
    allowed = max(tolerance, runs, seeds)
    basis: Literal["tolerance", "runs", "seed"] = "tolerance"
    if allowed > tolerance:
        basis = "runs" if runs >= seeds else "seed"
    return LossCheck(False, largest, allowed, basis, count, "the losses differ")


def _is_broken(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], step: int) -> bool:
    """Whether a loss of the changed program is no number where the other's is one."""
    return all(math.isfinite(run[step]) for run in before) and not all(math.isfinite(run[step]) for run in after)


def _mean(runs: Sequence[Sequence[float]], count: int) -> list[float]:
    return [fmean(run[step] for run in runs) for step in range(count)]


def _scale(runs: Sequence[Sequence[float]], count: int) -> list[float]:
    """What the difference of each loss is divided by."""
    sizes = [abs(loss) for loss in _mean(runs, count)]
    finite = [size for size in sizes if math.isfinite(size)]
    least = _SMALL_LOSS * fmean(finite) if finite else 0.0
    return [max(size, least) for size in sizes]


def _difference(run: Sequence[float], other: Sequence[float], scale: Sequence[float]) -> float:
    """The largest, of the losses that both have; what is no number on both sides does not differ."""
    found = 0.0
    for one, two, size in zip(run, other, scale, strict=False):
        if math.isfinite(one) and math.isfinite(two) and size > 0:
            found = max(found, abs(one - two) / size)
    return found
