"""How far predictions are off on GPUs that were held out: what the validations of each kind of operation return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The error of one method on what was held out.

    Attributes:
        kind: what was predicted, such as "matrix products, fp32".
        split: "gpu" or "family": what was held out at a time.
        held_out: the GPU's name in the timings, or the family's.
        method: how it was predicted, such as "learned" or "roofline".
        count: how many timings were predicted.
        mape: mean of |predicted - measured| / measured, as a share (0.1 is 10 %).
    """

    kind: str
    split: str
    held_out: str
    method: str
    count: int
    mape: float


def mean_error(predicted: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> float:
    """Mean of |predicted - measured| / measured, as a share; not-a-number where nothing was measured."""
    return float(np.mean(np.abs(predicted / measured - 1))) if len(measured) else float("nan")


def middle_ninety(groups: Sequence[npt.NDArray[np.float64]]) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of all values, each group counting as much as another."""
    values = np.concatenate(groups)
    weight = np.concatenate([np.full(len(group), 1 / max(len(group), 1)) for group in groups])
    order = np.argsort(values)
    share = np.cumsum(weight[order]) / weight.sum()
    low, high = (values[order][min(int(np.searchsorted(share, q)), len(values) - 1)] for q in (0.05, 0.95))
    return float(low), float(high)
