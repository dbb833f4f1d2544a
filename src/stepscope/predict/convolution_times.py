"""How long convolutions take: the roofline over a utilization learned from their shape in FP32.

The utilization may exceed one: algorithms such as Winograd's need fewer operations than the count says. Which algorithm
cuDNN chooses is unknown beforehand, and that is most of the error (docs/prediction-model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees, shipped_arrays
from stepscope.predict.matrix_times import matrix_times, rates_of, unit_of
from stepscope.predict.operations import BYTES, Numbers, Operations, OperationTimes, by_type, roofline_times

CONVOLUTION_KINDS: Final = ("convolution",)
NOT_LEARNED: Final = 1.5  # factor on the band for gradients, generations and shapes without timings
MOST_ROWS: Final = 8192.0  # rows of the largest matrix product in the timings; longer ones take proportionally longer
SHORT_TYPES: Final = ("fp16", "bf16", "fp8", "int8")
SHORT_FACTOR: Final = 2.0
SHORT_WIDER: Final = 5.0
"""Factor on the time of the equivalent product, and on its band, for convolutions in 16 bits or less, which have no
timings: in public H100 and MI300X traces they took 2 to 20 times as long, for layouts and small sizes.
"""
SEARCHED: Final = 0.4
"""Share of the predicted time that cudnn.benchmark's fastest algorithm took in a public V100 trace; the timings have
the choice of cuDNN's heuristics.
"""
LEARNED_GENERATIONS: Final = ("Pascal", "Volta", "Turing")
MOST_UTILIZATION: Final = 2.25
"""Saving of Winograd's algorithm with 2 x 2 tiles for 3 x 3 weights (Lavin and Gray, 2015)."""
_USES: Final = (8.0, 10.0)
"""Range of rows of the product in which each input number is used, for 3 x 3 weights."""
_TILE: Final = (128, 64)  # output points and channels of a typical thread block


@dataclass(frozen=True, slots=True)
class ConvolutionModel:
    """Fitted constants."""

    trees: BoostedTrees  # logarithm of the measured time over the roofline, from `features`
    lowest: Numbers
    highest: Numbers  # lowest, highest: of each feature in the timings, shape (features,)
    band: Numbers  # factors that hold nine of ten timings of held-out GPUs, shape (2,)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> ConvolutionModel:
        lowest, highest = arrays["range"]
        trees = BoostedTrees.from_arrays(arrays, "trees_")
        return cls(trees, lowest, highest, arrays["band"])


@lru_cache(maxsize=1)
def shipped_model() -> ConvolutionModel:
    return ConvolutionModel.from_arrays(shipped_arrays("convolution_times"))


def convolution_times(
    operations: Operations, device: DevicePeaks, model: ConvolutionModel | None = None
) -> OperationTimes:
    """Predict convolutions from the dimensions of the equivalent matrix product.

    Convolutions of 3 x 3 weights in FP32 use the fitted model. Others take the time of that product, in a wider band.
    """
    learned = np.zeros(len(operations), np.bool_)
    if unit_of(device, "fp32") is not None:
        given = features(operations, device)
        learned = _is_like_timed(operations) & np.isfinite(given).all(axis=1)
    times = roofline_times(operations, device)
    if not learned.all():
        times = times.replaced(~learned, _product_times(operations.select(~learned), device))
    if learned.any():
        chosen = _learned_times(operations.select(learned), given[learned], device, model or shipped_model())
        times = times.replaced(learned, chosen)
    return times


def _product_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    with np.errstate(invalid="ignore"):
        parts = np.maximum(operations.rows / MOST_ROWS, 1.0)
    rows = operations.rows / parts
    # Kernels unfold the input on the fly, so each number is read as often as it is used, if from the cache.
    numbers = rows * operations.inner + operations.inner * operations.columns + rows * operations.columns
    size = by_type(operations.number_type, BYTES, 4.0)
    part = replace(
        operations,
        flops=operations.flops / parts,
        rows=rows,
        bytes=np.where(np.isnan(numbers), operations.bytes, numbers * size * np.maximum(operations.batch, 1)),
    )
    alike = matrix_times(part, device)
    is_short = np.isin(operations.number_type, SHORT_TYPES)
    parts = np.where(np.isnan(parts), 1.0, parts) * np.where(is_short, SHORT_FACTOR, 1.0)
    wider = np.where(is_short, SHORT_WIDER, np.where(alike.basis == "learned", NOT_LEARNED, 1.0))
    basis = np.where(is_short & (alike.basis == "learned"), "roofline", alike.basis)
    return OperationTimes(alike.ns * parts, alike.low_ns * parts / wider, alike.high_ns * parts * wider, basis)


def _is_like_timed(operations: Operations) -> npt.NDArray[np.bool_]:
    """Whether weights are 3 x 3 with stride one, as in the timings: other shapes have fewer algorithms to choose from.

    Each number of the input is then used in nine rows of the product; gradients are recognised by the sum's length.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        read = operations.bytes - 4 * operations.columns * (operations.rows + operations.inner)
        uses = 4 * operations.rows * operations.inner / read
        fits = operations.is_backward | ((uses > _USES[0]) & (uses < _USES[1]))
        fits &= (operations.inner % 9 == 0) & (operations.flops > 0)
    return np.asarray(fits & (operations.number_type == "fp32"))


def _learned_times(
    operations: Operations, given: Numbers, device: DevicePeaks, model: ConvolutionModel
) -> OperationTimes:
    inside = np.clip(given, model.lowest, model.highest)
    ns = base_ns(operations, device) * np.maximum(np.exp(model.trees.predict(inside)), 1 / MOST_UTILIZATION)
    outside = (np.abs(inside - given) > 1e-9).any(axis=1) | (device.architecture not in LEARNED_GENERATIONS)
    wider = np.where(outside | operations.is_backward, NOT_LEARNED, 1.0)
    basis = np.full(len(operations), "learned")
    low = min(float(model.band[0]), SEARCHED)
    return OperationTimes(ns, ns * low / wider, ns * model.band[1] * wider, basis)


def features(operations: Operations, device: DevicePeaks) -> Numbers:
    """Compute the trees' features, shape (n, 9); not-a-number where the device or shape is unknown.

    Logarithms of output points, channels and the sum's length; of blocks per multiprocessor, and how full the last wave
    is; of arithmetic over traffic time and of traffic over the cache; how full the last block of channels is; and the
    logarithm of the nanoseconds of one product's arithmetic.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        blocks = np.ceil(operations.rows / _TILE[0]) * np.ceil(operations.columns / _TILE[1])
        waves = blocks / (device.multiprocessors or np.nan)
        products = np.maximum(operations.batch, 1)
        arithmetic = _arithmetic_ns(operations.flops / products, device)
        traffic = _traffic_ns(operations.bytes / products, device)
        given = [
            np.log2(operations.rows),
            np.log2(operations.columns),
            np.log2(operations.inner),
            np.log2(waves),
            np.where(waves < 32, waves / np.ceil(waves), 1.0),
            np.log(arithmetic / traffic),
            np.log2(operations.bytes / products / (device.cache_bytes or np.nan)),
            operations.columns / (np.ceil(operations.columns / _TILE[1]) * _TILE[1]),
            np.log2(arithmetic),
        ]
    return np.stack(given, axis=1)


def base_ns(operations: Operations, device: DevicePeaks) -> Numbers:
    """Roofline nanoseconds at the rate that the device's power sustains over a convolution's length."""
    return np.asarray(np.maximum(_arithmetic_ns(operations.flops, device), _traffic_ns(operations.bytes, device)))


def _arithmetic_ns(flops: Numbers, device: DevicePeaks) -> Numbers:
    return rates_of(device, "fp32").arithmetic_s(flops) * 1e9


def _traffic_ns(moved: Numbers, device: DevicePeaks) -> Numbers:
    return moved / device.bandwidth_bytes_s * 1e9
