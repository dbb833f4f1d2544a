"""Ranges of steps: the bands of their works together, as wide as steps on devices that were left out needed.

Published timings left out, GPU by GPU, tell how wide: conformal prediction (Vovk, Gammerman and Shafer, 2005) in units
of each band (`scripts/predictor/ranges.py`, docs/prediction-model.md).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.predict.operations import Numbers
from stepscope.trace.nesting import Rows

Labels = npt.NDArray[np.str_]

HELD: Final = 0.8
"""Share of steps that ranges are meant to hold."""
GUESSED: Final = "datasheet"
"""The kind of all that a datasheet alone tells."""
HOST: Final = "host"
STEP: Final = "step"
PRODUCTS: Final = ("matrix", "convolution", "attention")
COMMON: Final = 0.5
"""Common share of the error variance of different PRODUCTS of one kind on a device; other kinds share all of it.

It is 0.21 for products of all shapes on GPUs that were held out, 0.78 for element-wise work, 0.79 for softmax and 0.30
for normalisation (benchmarks/error_correlation.py). Products of one model are more alike than those of all shapes.
"""


@lru_cache(maxsize=1)
def widths() -> Mapping[str, float]:
    """Width of each kind's bands in a step's range, and STEP's of all of them, in logarithms of the bands' factors.

    HOST's is the logarithm of a factor.
    """
    text = (files("stepscope") / "data" / "ranges.csv").read_text(encoding="utf-8")
    return {row["of"]: float(row["width"]) for row in csv.DictReader(text.splitlines())}


def step_band(
    expected: Numbers,
    low: Numbers,
    high: Numbers,
    kinds: Labels,
    calls: npt.NDArray[np.int64],
    rows: Rows,
    known: Mapping[str, float] | None = None,
) -> tuple[Numbers, Numbers]:
    """As `joint_band`, of bands as wide as HELD of the steps need.

    Args:
        known: replaces the widths that come with the package.
    """
    known = known or widths()
    power = np.array([known.get(kind, np.nan) * (1.0 if kind == GUESSED else known[STEP]) for kind in kinds.tolist()])
    with np.errstate(divide="ignore", invalid="ignore"):
        below, above = half_widths(expected, low, high, kinds == GUESSED)
        least, most = expected * np.exp(-below * power), expected * np.exp(above * power)
    chosen = np.isfinite(most) & (expected > 0)
    return joint_band(expected, np.where(chosen, least, low), np.where(chosen, most, high), kinds, calls, rows)


def with_host(
    ns: Numbers | float, device_ns: Numbers | float, low: Numbers | float, high: Numbers | float
) -> tuple[Numbers, Numbers]:
    """Ends of steps' ranges, with what the host takes less or more of the time without device work another time.

    Args:
        ns, device_ns: expected length of steps, and time in which the device works in them.
        low, high: ends of their ranges by what is uncertain of the device.
    """
    idle, width = np.maximum(np.asarray(ns) - device_ns, 0.0), widths()[HOST]
    below = np.hypot(np.maximum(ns - np.asarray(low), 0.0), np.expm1(-width) * idle)
    above = np.hypot(np.maximum(np.asarray(high) - ns, 0.0), np.expm1(width) * idle)
    return ns - below, ns + above


def half_widths(
    expected: Numbers, low: Numbers, high: Numbers, is_guessed: npt.NDArray[np.bool_]
) -> tuple[Numbers, Numbers]:
    """Logarithms of a band's factors down and up; of what was learned their mean, since sums err as much either way."""
    below, above = np.log(expected / low), np.log(high / expected)
    middle = np.sqrt(below * above)
    return np.where(is_guessed, below, middle), np.where(is_guessed, above, middle)


def joint_band(
    expected: Numbers, low: Numbers, high: Numbers, kinds: Labels, calls: npt.NDArray[np.int64], rows: Rows
) -> tuple[Numbers, Numbers]:
    """Narrow the band of each work so that all works together at an end are as rare as one of them at its own.

    Works of one call (the same operator on the same shapes) have one error, and so have works of one kind outside of
    PRODUCTS, such as all that a datasheet tells. Errors of different products of a kind share a part of their variance,
    COMMON; the rest is independent, as are errors of different kinds. With d the sum of a call's distances to its end,
    every band is shortened to D / (sum of d) of its length, where D^2 is the sum over kinds of
    COMMON * (sum of d)^2 + (1 - COMMON) * (sum of d^2).

    Args:
        expected, low, high: nanoseconds of each work; shape (n,).
        kinds, calls: kind of each work, and the index of its distinct call; shape (n,).
        rows: the works that count.
    """
    below, above = expected - low, high - expected
    shares = [_narrowing(distances[rows], kinds[rows], calls[rows]) for distances in (below, above)]
    return expected - below * shares[0], expected + above * shares[1]


def _narrowing(distances: Numbers, kinds: Labels, calls: npt.NDArray[np.int64]) -> float:
    """Length of the joint band as a share of the sum of all; 1 for a single call."""
    total = float(distances.sum())
    if total <= 0:
        return 1.0
    squared = 0.0
    for kind in np.unique(kinds).tolist():
        chosen = kinds == kind
        _, number = np.unique(calls[chosen], return_inverse=True)
        sums = np.bincount(number.ravel(), distances[chosen])
        common = COMMON if kind in PRODUCTS else 1.0
        squared += common * float(sums.sum()) ** 2 + (1 - common) * float((sums**2).sum())
    return float(np.sqrt(squared)) / total
