"""How far predictions are off on GPUs that were held out: what the validations of each kind of operation return."""

from __future__ import annotations

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
