"""What matrix products take by the tiles that a library chooses, and the rates that a device sustains for them.

docs/prediction-model.md has the formulas; `scripts/predictor/tiles.py` fits their constants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.operations import BYTES, Numbers, Operations

BEST_SHARE: Final = {"vector": 0.85, "tensor": 0.92}
"""Share of the peak that large products reach on devices with enough power, by unit."""
WARM_S: Final = {"vector": 1.5e-3, "tensor": 0.5e-3}
"""Time until half of the power-limited loss from the peak rate has set in, seconds."""
FLOPS_PER_JOULE: Final = ((8.0, 53e9), (8.5, 132e9), (8.8, 88e9), (100.0, 189e9))
"""FP32 operations per joule at full clock by process, up to a compute capability: 16 and 12 nm from the long products
of the P4 and T4; N7 takes 0.4 and 10 nm class (8N) 0.6 of the power of 16 nm, N5 class (4N) 0.7 of N7's, according
to their makers.
"""
CACHE_BYTES_PER_CLOCK: Final = 8.0
"""Last-level cache bandwidth per multiprocessor, where that exceeds the memory's: on the L40S."""
ISSUE_SHARE: Final = 0.9
"""Share of the FP32 peak that products can reach at most where a multiprocessor has 128 lanes (from 8.6 on): each
scheduler issues one instruction a cycle, and a tenth of a product's are loads and additions to pointers.
"""
_LANES_128: Final = 8.6
USUAL_BANDWIDTH_SHARE: Final = 0.85  # sustained share of the peak bandwidth where it was not measured
TENSOR_TYPES: Final = ("tf32", "fp16", "bf16", "fp8", "int8")


def unit_of(device: DevicePeaks, kind: str) -> str | None:
    """Units, "vector" or "tensor", that multiply numbers of this type; None where unknown."""
    capability = capability_of(device)
    if device.vendor != "NVIDIA" or kind not in device.flops_s or capability is None or not device.multiprocessors:
        return None
    if kind in TENSOR_TYPES and capability >= 7:
        return "tensor"
    return "vector" if kind in ("fp64", "fp32", "fp16") else None


def capability_of(device: DevicePeaks) -> float | None:
    """Compute capability as a number; None if it is not one, since users may write anything."""
    text = device.capability or ""
    return float(text) if re.fullmatch(r"[0-9]{1,2}\.[0-9]", text) else None


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates for one device and number type."""

    peak: float  # operations per second at the boost clock
    carried: float  # share of the peak that the device's power sustains, above 0
    warm_s: float  # time until half of the loss from the peak has set in
    bandwidth: float
    cache_bandwidth: float  # bandwidth, cache_bandwidth: sustained bytes per second of memory and last-level cache
    cache_bytes: float  # size of the last-level cache
    number_bytes: float  # bytes of an operand's number
    is_sustained: bool  # whether a sustained rate was measured

    def arithmetic_s(self, flops: Numbers) -> Numbers:
        """Seconds of the arithmetic alone; long arithmetic slows down to the rate that power allows."""
        long = flops / (self.peak * self.carried)
        share = self.carried + (1 - self.carried) * self.warm_s / (long + self.warm_s)
        return flops / (self.peak * share)

    def traffic_s(self, bytes_: Numbers, weights: Numbers) -> Numbers:
        """Seconds of the traffic alone.

        Weights come from memory unless they are small compared with the cache; the rest from the last-level cache if it
        fits.
        """
        size = max(self.cache_bytes, 1.0)
        return self._moved_s(weights, 1 - 12 * weights / size) + self._moved_s(
            bytes_ - weights, 5.5 - 5 * bytes_ / size
        )

    def _moved_s(self, bytes_: Numbers, cached: Numbers) -> Numbers:
        """Seconds to move bytes; `cached` is the share (clipped to 0 to 1) that comes from the cache."""
        share = np.clip(cached, 0.0, 1.0)
        return bytes_ * (share / self.cache_bandwidth + (1 - share) / self.bandwidth)


def rates_of(device: DevicePeaks, kind: str) -> Rates:
    unit = unit_of(device, kind)
    assert unit is not None
    peak = device.flops_s[kind]
    sustained = sustained_rate(device, kind, unit)
    if kind == "fp32" and (capability_of(device) or 0.0) >= _LANES_128:
        peak = min(peak, max(peak * ISSUE_SHARE, (sustained or 0.0) / BEST_SHARE[unit]))
    if sustained:
        carried = sustained / peak / BEST_SHARE[unit]
    else:
        carried = _carried_by_power(device, peak) if unit == "vector" else 1.0
    bandwidth = device.sustained_bandwidth_bytes_s or device.bandwidth_bytes_s * USUAL_BANDWIDTH_SHARE
    clock = (device.clock_mhz or 0) * 1e6
    return Rates(
        peak=peak,
        carried=min(carried, 1.0),
        warm_s=WARM_S[unit],
        bandwidth=bandwidth,
        cache_bandwidth=max(bandwidth, CACHE_BYTES_PER_CLOCK * (device.multiprocessors or 0) * clock),
        cache_bytes=float(device.cache_bytes or 0),
        number_bytes=float(BYTES[kind]),
        is_sustained=bool(sustained),
    )


def sustained_rate(device: DevicePeaks, kind: str, unit: str) -> float | None:
    """Measured operations per second; tensor cores may use the measured share of another number type."""
    kinds = (kind, "bf16", "fp16") if unit == "tensor" else (kind,)
    for other in kinds:
        if other in device.sustained_flops_s and other in device.flops_s:
            return device.sustained_flops_s[other] / device.flops_s[other] * device.flops_s[kind]
    return None


def _carried_by_power(device: DevicePeaks, peak: float) -> float:
    """Share of the FP32 peak that the device's power allows; 1 where its power is unknown."""
    if not device.power_w:
        return 1.0
    per_joule = next(rate for newest, rate in FLOPS_PER_JOULE if (capability_of(device) or 0.0) < newest)
    return device.power_w * per_joule / peak


def number_bytes(operations: Operations) -> Numbers:
    """Bytes per number, from the traffic."""
    batch, rows, columns, inner = operations.batch, operations.rows, operations.columns, operations.inner
    # A weight shared by the whole batch counts once, so this is a little low for batches.
    return np.asarray(operations.bytes / (batch * (rows * columns + rows * inner + inner * columns)))


def weight_bytes(operations: Operations) -> Numbers:
    """Bytes of the second matrix if there is one: a layer's weight, which is no longer in the cache."""
    weight = operations.inner * operations.columns * number_bytes(operations)
    return np.where(operations.batch == 1, weight, 0.0)


CHOSEN: Final = ((128, 128), (128, 64), (64, 128), (64, 64), (32, 128), (128, 32), (64, 32), (32, 32))
"""Tiles of the timed kernels, by columns and rows of the result."""
_SHAPES: Final = ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (32, 32))
_SPLITS: Final = (1, 2, 3, 4, 6, 8, 10)  # split-K factors: parts of a single product's inner dimension
_SECTOR: Final = 8  # FP32 numbers per memory sector: rows of whole sectors are read without waste
START: Final = 2 * len(_SHAPES)  # place of the logarithm of a kernel's start in microseconds
CONSTANTS: Final = START + 9


@dataclass(frozen=True, slots=True)
class TileLaw:
    """Learned model of the tiles that cuBLAS chooses and of their times."""

    constants: Numbers  # of `tile_seconds`, shape (CONSTANTS,)
    choices: tuple[BoostedTrees, ...]  # log-probability of each of CHOSEN, up to a common term

    def seconds(self, operations: Operations, device: DevicePeaks, rates: Rates) -> Numbers:
        """Geometric mean over all tiles, weighted by probability, each with its best split of the inner dimension."""
        features = choice_features(operations, device, rates)
        scores = np.stack([trees.predict(features) for trees in self.choices])
        weights = np.exp(scores - scores.max(axis=0))
        weights /= weights.cumsum(axis=0)[-1]  # in order, so that the last digit is the same for one product or many
        total = np.zeros(len(operations))
        for tile, weight in zip(CHOSEN, weights, strict=True):
            total += weight * np.log(best_seconds(self.constants, operations, device, rates, tile))
        return np.asarray(np.exp(total))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> TileLaw:
        choices = (BoostedTrees.from_arrays(arrays, f"tiles.{place}.") for place in range(len(CHOSEN)))
        return cls(arrays["tiles.constants"], tuple(choices))


def best_seconds(
    constants: Numbers, operations: Operations, device: DevicePeaks, rates: Rates, tile: tuple[int, int]
) -> Numbers:
    """Seconds with a tile and the best split of the inner dimension."""
    splits = best_splits(constants, operations, device, rates, tile)
    return tile_seconds(constants, operations, device, rates, tile, splits)


def best_splits(
    constants: Numbers, operations: Operations, device: DevicePeaks, rates: Rates, tile: tuple[int, int]
) -> Numbers:
    """Best number of parts for the inner dimension of a single product; 1 for batches."""
    best = np.ones(len(operations))
    least = tile_seconds(constants, operations, device, rates, tile, best)
    for splits in _SPLITS[1:]:
        cut = np.where(operations.batch == 1, float(splits), 1.0)
        seconds = tile_seconds(constants, operations, device, rates, tile, cut)
        best, least = np.where(seconds < least, cut, best), np.minimum(least, seconds)
    return best


def tile_seconds(
    constants: Numbers,
    operations: Operations,
    device: DevicePeaks,
    rates: Rates,
    tile: tuple[int, int],
    splits: Numbers,
) -> Numbers:
    """Seconds of a kernel with tiles of `tile` columns and rows, and the inner dimension split into `splits` parts."""
    units = float(device.multiprocessors or 1)
    kind = _SHAPES.index((max(tile), min(tile)))
    efficiency = 1 / (1 + np.exp(-constants[kind]))
    fewest = np.exp(constants[len(_SHAPES) + kind])
    start, ragged, edge, sharp, again_single, again_batch, power, joint, even = constants[START:].tolist()

    single = operations.batch == 1
    tiles = operations.batch * np.ceil(operations.columns / tile[0]) * np.ceil(operations.rows / tile[1]) * splits
    inner = operations.inner / splits
    work = 2 * tiles * inner * tile[0] * tile[1]
    one = work / tiles / (rates.peak / units)
    share = tiles / units
    # A partial last wave takes less than a whole one: blocks of several waves run side by side.
    turns = np.where(share < 1, 1.0, share + 0.5 * np.exp(ragged) * (np.ceil(share) - share)) / efficiency
    slowed = np.maximum(rates.arithmetic_s(work) / (work / rates.peak) * np.exp(power), 1)
    arithmetic = one * np.maximum(turns, fewest) * slowed

    beyond = np.log(operations.bytes / max(rates.cache_bytes, 1.0)) - edge
    again = np.where(single, np.exp(again_single), np.exp(again_batch)) / (1 + np.exp(-beyond * np.exp(sharp)))
    is_even = (operations.inner % _SECTOR == 0) & (operations.columns % _SECTOR == 0)
    again = again * np.where(is_even, np.exp(even), 1.0)
    number = number_bytes(operations)
    written = number * operations.batch * operations.rows * operations.columns
    reads = number * tiles * inner * (tile[0] + tile[1])
    traffic = (operations.bytes + reads * again + written * (splits - 1)) / rates.bandwidth
    sharpness = 1 + np.exp(joint)
    return np.asarray(np.exp(start) * 1e-6 + (arithmetic**sharpness + traffic**sharpness) ** (1 / sharpness))


def choice_features(operations: Operations, device: DevicePeaks, rates: Rates) -> Numbers:
    """Features of cuBLAS's choice of a tile, shape (n, 15), all finite."""
    units = float(device.multiprocessors or 1)
    batch, rows, columns, inner = (getattr(operations, name) for name in ("batch", "rows", "columns", "inner"))
    found = [np.log(batch), np.log(rows), np.log(inner), np.log(columns), (batch == 1).astype(np.float64)]
    found += [np.full(len(batch), capability_of(device) or 0.0), np.log(rows / columns)]
    for length in (128, 64, 32):
        found.append(np.log(batch * np.ceil(rows / length) * np.ceil(columns / length) / units))
    for length in (128, 64):
        found += [side / length / np.ceil(side / length) for side in (rows, columns)]
    found.append(np.log(operations.bytes / max(rates.cache_bytes, 1.0)))
    return np.stack(found, axis=1)


_TENSOR_TILES: Final = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (128, 32))
_TENSOR_SPLITS: Final = (1, 2, 3, 4, 6, 8)
READERS: Final = ((9.0, 1.0), (10.0, 2.0), (12.0, 4.0), (100.0, 1.0))
"""Blocks that share what one of them reads from the cache, up to a compute capability: Hopper's clusters of two, and
clusters of two pairs of multiprocessors of Blackwell's large dies.
"""
BLOCK_CONSTANTS: Final = ("start", "ramp", "ragged", "fill", "result", "cut", "of_a_byte")
STEP_CONSTANTS: Final = ("share", "sides", "cache", "memory", "again", "joint")
_CACHE_CLOCK: Final = 16.0  # bytes per clock and multiprocessor: the unit of `cache`
_NUMBERS_CLOCK: Final = 32.0  # numbers of the result per clock and multiprocessor: the unit of `result`
_STEP: Final = 32.0  # an inner dimension counts in whole steps of so many


@dataclass(frozen=True, slots=True)
class TensorLaw:
    """Learned model of single products on tensor cores; the library takes the tile and split of the least time.

    Attributes:
        blocks: logarithms of BLOCK_CONSTANTS, shape (2, n): where warps fetch the operands themselves (mma), and where
            the device fills their shared memory (wgmma, tcgen05).
        steps: logarithms of STEP_CONSTANTS, shape (n,).
    """

    blocks: Numbers
    steps: Numbers

    def seconds(self, operations: Operations, device: DevicePeaks, rates: Rates) -> Numbers:
        """Seconds of products that are no batches, on a device with a known clock."""
        readers = next(count for newest, count in READERS if (capability_of(device) or 0.0) < newest)
        start, ramp, ragged, fill, result, cut, of_a_byte = np.exp(self.blocks[int(readers > 1)]).tolist()
        share, over_sides, cache, memory, again, joint = np.exp(self.steps).tolist()
        units, clock = float(device.multiprocessors or 1), float(device.clock_mhz or 1) * 1e6
        found = [(*tile, splits) for tile in _TENSOR_TILES for splits in _TENSOR_SPLITS]
        wide, tall, splits = np.array(found, np.float64).T[:, :, None]  # all that follows: candidates x products

        blocks = np.ceil(operations.columns / wide) * np.ceil(operations.rows / tall) * splits
        inner = np.ceil(operations.inner / splits / _STEP) * _STEP
        sides = rates.number_bytes * (wide + tall)
        slowed = rates.arithmetic_s(operations.flops) / (operations.flops / rates.peak)
        arithmetic = (2 * wide * tall * share + 2 * (wide + tall) * over_sides) / (rates.peak / units) * slowed
        fetched = sides * max(cache / (_CACHE_CLOCK * clock * readers**0.5), memory / (rates.bandwidth / units))
        around = (1e3 * fill + wide * tall / _NUMBERS_CLOCK * result) / clock
        around *= of_a_byte if rates.number_bytes == 1 else 1.0
        waves = blocks / units
        turns = np.where(waves < 1, 1.0, waves + ragged * (np.ceil(waves) - waves))

        traffic = rates.traffic_s(operations.bytes, weight_bytes(operations))
        reread = np.maximum(blocks * inner * sides - operations.bytes, 0.0)
        reread = again * reread * np.minimum(operations.bytes / max(rates.cache_bytes, 1.0), 1.0)
        parts = 8 * operations.rows * operations.columns * (splits - 1)  # FP32, written and read
        moved = traffic + reread / rates.bandwidth + parts / max(rates.cache_bandwidth, 3 * rates.bandwidth)

        both = (turns * (inner * np.maximum(arithmetic, fetched) + around)) ** (1 + joint) + moved ** (1 + joint)
        least = (both ** (1 / (1 + joint)) + np.where(splits > 1, cut * 1e-6, 0.0)).min(axis=0)
        ideal = np.maximum(traffic, operations.flops / rates.peak)
        return np.asarray(least + 1e-6 * start + 1 / (1 / ideal + 1e6 / ramp))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> TensorLaw:
        return cls(arrays["tensor.blocks"], arrays["tensor.steps"])


Law: TypeAlias = TileLaw | TensorLaw
