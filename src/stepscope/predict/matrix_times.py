"""How long matrix products take: the roofline, divided by a utilization that boosted trees learned from timings.

time = start + base / utilization, the base being the longer of arithmetic at the rate that power allows and traffic at
the bandwidth; the utilization, above 0 and at most 1, follows from dimensionless features: how a product's tiles fill
the multiprocessors, how it relates to ridge and cache, and its alignment. Products in FP32, and single ones on tensor
cores, are also predicted by the tiles that the library probably chooses, and the result is the geometric mean of both.
docs/prediction-model.md has the formulas; `scripts/predictor/matrix.py` fits them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees, shipped_arrays
from stepscope.predict.operations import BYTES, WIDEST, Numbers, Operations, OperationTimes, roofline_times

BEST_SHARE: Final = {"vector": 0.85, "tensor": 0.92}
"""Share of the peak that large products reach on devices with enough power, by unit."""
AMD_SHARE: Final = {"vector": 0.77, "tensor": 0.63}
"""Share of AMD's peaks that large products sustain where nobody measured them: the mean of what the device table and
its sources have, FP32 of the MI210 and MI325X, bf16 of the MI250X to MI355X."""
WARM_S: Final = {"vector": 1.5e-3, "tensor": 0.5e-3}
"""Time until half of the power-limited loss from the peak rate has set in, seconds."""
FLOPS_PER_JOULE: Final = ((8.0, 53e9), (8.5, 132e9), (8.8, 88e9), (100.0, 189e9))
"""FP32 operations per joule at full clock by process, up to a compute capability: 16 and 12 nm from the long products
of the P4 and T4; N7 takes 0.4 and 10 nm class (8N) 0.6 of the power of 16 nm, N5 class (4N) 0.7 of N7's, according
to their makers.
"""
CACHE_BYTES_PER_CLOCK: Final = 8.0
"""Last-level cache bandwidth per multiprocessor, where that exceeds the memory's: on the L40S."""
AMD_SLOWER: Final = 1.12
"""Factor on the law of tiles where arithmetic limits: the median of four public MI300X traces, whose products are not
square as those of the published rates are (`benchmarks/unmeasured_makers.py` prints what is left of it).
"""
ISSUE_SHARE: Final = 0.9
"""Share of the FP32 peak that products can reach at most where a multiprocessor has 128 lanes (from 8.6 on): each
scheduler issues one instruction a cycle, and a tenth of a product's are loads and additions to pointers.
"""
_LANES_128: Final = 8.6
USUAL_BANDWIDTH_SHARE: Final = 0.85  # sustained share of the peak bandwidth where it was not measured
_TENSOR_TYPES: Final = ("tf32", "fp16", "bf16", "fp8", "int8")


def unit_of(device: DevicePeaks, kind: str) -> str | None:
    """Units, "vector" or "tensor", that multiply numbers of this type; None where unknown."""
    capability = capability_of(device)
    if device.vendor != "NVIDIA" or kind not in device.flops_s or capability is None or not device.multiprocessors:
        return None
    if kind in _TENSOR_TYPES and capability >= 7:
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
    sustained = _sustained(device, kind, unit)
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


def _sustained(device: DevicePeaks, kind: str, unit: str) -> float | None:
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


TILES: Final = {
    "vector": ((128, 128), (128, 64), (64, 64), (128, 32), (32, 32)),
    "tensor": ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32)),
}
"""Tiles of the result, each computed by one thread block, from the names of cuBLAS kernels."""
_COUNTED: Final = ((128, 128), (64, 64))
_STREAMED: Final = {"vector": (128, 64), "tensor": (128, 128)}
_BLOCKS: Final = 2  # blocks that a multiprocessor runs at a time
_LAUNCH_S: Final = 2e-6


def shape_features(operations: Operations, device: DevicePeaks, rates: Rates, unit: str) -> Numbers:
    """Features of products on a device, shape (n, width), all finite; the width depends on the unit alone."""
    units = float(device.multiprocessors or 1)
    batch, rows, columns, inner = (
        np.maximum(getattr(operations, name), 1.0) for name in ("batch", "rows", "columns", "inner")
    )
    arithmetic, traffic = operations.flops / rates.peak, operations.bytes / rates.bandwidth
    found = [
        np.log(arithmetic / traffic),
        np.log(np.maximum(arithmetic, traffic) / _LAUNCH_S),
        np.log(operations.bytes / max(rates.cache_bytes, 1.0)),
    ]
    for tile in TILES[unit]:
        filled, padded, tiles = _tiling(batch, rows, columns, tile, units)
        found += [filled, padded]
        if tile in _COUNTED:
            found.append(np.log(tiles / units))
    number = number_bytes(operations)
    for tall, wide in ((rows, columns), (columns, rows)):
        streamed = _streamed(batch, tall, wide, _STREAMED[unit], units * _BLOCKS)
        moved = np.maximum(streamed * inner * number, operations.bytes)
        found.append(np.log(moved / rates.bandwidth / arithmetic))
    # Tensor-core products were timed at few, round lengths, from which trees would recognise the GPU.
    if unit == "tensor":
        found.append(np.minimum(number, 4.0))
        return np.stack(found, axis=1)
    found += [np.log2(rows), np.log2(columns), np.log2(inner), np.log2(batch)]
    found += [_alignment(rows), _alignment(columns), _alignment(inner), np.log2(rows / columns)]
    found += [(batch > 1).astype(np.float64), np.full(len(batch), capability_of(device) or 0.0)]
    return np.stack(found, axis=1)


def number_bytes(operations: Operations) -> Numbers:
    """Bytes per number, from the traffic."""
    batch, rows, columns, inner = operations.batch, operations.rows, operations.columns, operations.inner
    # A weight shared by the whole batch counts once, so this is a little low for batches.
    return np.asarray(operations.bytes / (batch * (rows * columns + rows * inner + inner * columns)))


def weight_bytes(operations: Operations) -> Numbers:
    """Bytes of the second matrix if there is one: a layer's weight, which is no longer in the cache."""
    weight = operations.inner * operations.columns * number_bytes(operations)
    return np.where(operations.batch == 1, weight, 0.0)


def _tiling(
    batch: Numbers, rows: Numbers, columns: Numbers, tile: tuple[int, int], units: float
) -> tuple[Numbers, Numbers, Numbers]:
    """Efficiency of all waves and of the tiles alone (useful work over work done), and the number of tiles.

    Tiles are oriented the better way.
    """
    one, other = (_laid(batch, rows, columns, tall, wide, units) for tall, wide in (tile, tile[::-1]))
    better = one[0] >= other[0]
    filled, padded, tiles = (np.where(better, chosen, turned) for chosen, turned in zip(one, other, strict=True))
    return filled, padded, tiles


def _laid(
    batch: Numbers, rows: Numbers, columns: Numbers, tall: int, wide: int, units: float
) -> tuple[Numbers, Numbers, Numbers]:
    tiles = batch * np.ceil(rows / tall) * np.ceil(columns / wide)
    work = batch * rows * columns
    return work / (np.ceil(tiles / units) * units * tall * wide), work / (tiles * tall * wide), tiles


def _streamed(batch: Numbers, tall: Numbers, wide: Numbers, tile: tuple[int, int], at_once: float) -> Numbers:
    """Numbers read per step along the inner dimension when blocks advance along `tall` first."""
    along, across = np.ceil(tall / tile[0]), np.ceil(wide / tile[1])
    lines = np.minimum(along, at_once) * tile[0] + np.minimum(across, np.ceil(at_once / along)) * tile[1]
    products = np.clip(at_once / (along * across), 1, batch)
    waves = np.maximum(1, batch * along * across / at_once)
    return np.asarray(waves * lines * products)


def _alignment(length: Numbers) -> Numbers:
    """Exponent of 2 in a length, at most 7."""
    whole = np.minimum(length, 2.0**53).astype(np.int64)
    return np.minimum(np.log2((whole & -whole).astype(np.float64)), 7.0)


CHOSEN: Final = ((128, 128), (128, 64), (64, 128), (64, 64), (32, 128), (128, 32), (64, 32), (32, 32))
"""Tiles of the timed kernels, by columns and rows of the result."""
_SHAPES: Final = ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (32, 32))
_SPLITS: Final = (1, 2, 3, 4, 6, 8, 10)  # split-K factors: parts of a single product's inner dimension
_SECTOR: Final = 8  # FP32 numbers per memory sector: rows of whole sectors are read without waste
_START: Final = 2 * len(_SHAPES)  # place of the logarithm of a kernel's start in microseconds
CONSTANTS: Final = _START + 9


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
    start, ragged, edge, sharp, again_single, again_batch, power, joint, even = constants[_START:].tolist()

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

START_NS: Final = 1_500.0
"""Time before a kernel's first arithmetic and after its last: the shortest timed products take 1.7 to 2.5 us."""
UNITS: Final = ("vector", "tensor")
"""Vector units for FP32, tensor cores for the shorter number types."""
SIZES_NS: Final = (10_000.0, 50_000.0, 1_000_000.0)  # durations at which the band changes
NOT_LEARNED: Final = 1.5
"""Factor on the band, either way, for each property without timings: number type, generation, a dimension's length, or
batches on tensor cores.
"""
LIKE: Final = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp64": "fp32",
    "tf32": "bf16",
    "int8": "fp8",
}
"""Most similar number type in the timings."""
LEARNED_TYPES: Final = {"vector": ("fp32",), "tensor": ("bf16", "fp16", "fp8")}
"""Number types in the timings, by unit; tensor cores multiply fp16 at the rate of bf16."""
SHORT_HIGH: Final = 2.0
"""Least upper factor of the band of products below the first size: the timings repeated one product with operands in
the cache; 515 such products of a public H100 trace took 1.1 to 1.6 times as long.
"""
UNALIGNED: Final = 2.0
"""Factor on tensor-core products with rows that are not a multiple of 16 bytes: 1.3 to 2.7 in public H100 and A100
traces, where other kernels run them; the timings have none.
"""
SLOWER_TYPES: Final = {"tf32": 1.4}
"""Factor on the time learned for bf16, from 1,400 products of a public A100 trace."""
TILES_SHARE: Final = 0.5  # weight of the law against the trees, in the logarithm
_ALIGNED_BYTES: Final = 16
MODEL_RANGES: Final = ("shortest", "longest")


@dataclass(frozen=True, slots=True)
class MatrixModel:
    """Fitted models of matrix products.

    Attributes:
        shortest, longest: dimensions (batch, rows, columns, inner) in the timings, shape (4,), by UNITS.
        bands: bounds of measured over predicted time for nine of ten products of held-out GPUs, shape
            (2, sizes, 2), by the number types of the timings; the first where a sustained rate is known.
        tiles: times of FP32 products with the tiles that cuBLAS chooses; None for the trees alone.
        tensor: times of single products on tensor cores; None for the trees alone.
    """

    trees: Mapping[str, BoostedTrees]  # logarithm of the utilization, by UNITS
    shortest: Mapping[str, Numbers]
    longest: Mapping[str, Numbers]
    bands: Mapping[str, Numbers]
    tiles: TileLaw | None = None
    tensor: TensorLaw | None = None

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> MatrixModel:
        trees = {unit: BoostedTrees.from_arrays(arrays, f"{unit}.") for unit in UNITS}
        shortest, longest = ({unit: arrays[f"{unit}.{name}"] for unit in UNITS} for name in MODEL_RANGES)
        bands = {kind: arrays[f"bands.{kind}"] for kind in sorted(set(LIKE.values()))}
        tiles = TileLaw.from_arrays(arrays) if "tiles.constants" in arrays else None
        tensor = TensorLaw.from_arrays(arrays) if "tensor.blocks" in arrays else None
        return cls(trees, shortest, longest, bands, tiles, tensor)


@lru_cache(maxsize=1)
def shipped_model() -> MatrixModel:
    return MatrixModel.from_arrays(shipped_arrays("matrix_times"))


def matrix_times(operations: Operations, device: DevicePeaks, model: MatrixModel | None = None) -> OperationTimes:
    """Predict products batch x (rows x inner) x (inner x columns).

    Args:
        operations: with flops, bytes and dimensions; products with an unknown dimension use the roofline.
        device: with sustained rates if measured. Products were timed on NVIDIA devices only; AMD's use the law of
            tiles at the rates that were published, others the roofline.
        model: replaces the model that comes with the package.
    """
    times = roofline_times(operations, device)
    model = model or shipped_model()
    if device.vendor == "AMD" and device.multiprocessors and model.tiles:
        chosen = np.isfinite(times.ns) & _has_dimensions(operations)
        if chosen.any():
            times = times.replaced(chosen, _amd_times(operations.select(chosen), device, model.tiles))
    for unit, kind in _units(operations, device):
        chosen = (operations.number_type == kind) & np.isfinite(times.ns) & _has_dimensions(operations)
        if chosen.any():
            times = times.replaced(chosen, _learned_times(operations.select(chosen), device, kind, unit, model))
    return times


def _amd_times(operations: Operations, device: DevicePeaks, law: TileLaw) -> OperationTimes:
    """Times by the tile law of NVIDIA's devices, at the rate that AMD's sustain, with the best tile."""
    ns = np.empty(len(operations))
    constants = law.constants.copy()
    constants[_START] = np.log(START_NS / 1e3)  # the timings' start has part of their host
    for kind in np.unique(operations.number_type).tolist():
        chosen = operations.number_type == kind
        of_kind, rates = operations.select(chosen), _amd_rates(device, kind)
        seconds = np.min([best_seconds(constants, of_kind, device, rates, tile) for tile in CHOSEN], axis=0)
        by_arithmetic = of_kind.flops / rates.peak > of_kind.bytes / rates.bandwidth
        ns[chosen] = START_NS + (seconds * 1e9 - START_NS) * np.where(by_arithmetic, AMD_SLOWER, 1.0)
    return OperationTimes(ns, ns / WIDEST, ns * WIDEST, np.full(len(ns), "roofline"))


def _amd_rates(device: DevicePeaks, kind: str) -> Rates:
    unit = "tensor" if kind in _TENSOR_TYPES else "vector"
    sustained = _sustained(device, kind, unit) or device.flops_s[kind] * AMD_SHARE[unit]
    bandwidth = device.sustained_bandwidth_bytes_s or device.bandwidth_bytes_s * USUAL_BANDWIDTH_SHARE
    cache, number = float(device.cache_bytes or 0), float(BYTES[kind])
    peak = sustained / BEST_SHARE[unit]
    return Rates(peak, 1.0, WARM_S[unit], bandwidth, bandwidth, cache, number, is_sustained=True)


def _units(operations: Operations, device: DevicePeaks) -> list[tuple[str, str]]:
    kinds = np.unique(operations.number_type).tolist()
    found = [(unit_of(device, kind), kind) for kind in kinds]
    return [(unit, kind) for unit, kind in found if unit is not None]


def _has_dimensions(operations: Operations) -> npt.NDArray[np.bool_]:
    dimensions = _dimensions(operations)
    known = (np.isfinite(dimensions) & (dimensions >= 1)).all(axis=1)
    return np.asarray(known & (operations.flops > 0) & (operations.bytes > 0))


def _dimensions(operations: Operations) -> Numbers:
    return np.stack([operations.batch, operations.rows, operations.columns, operations.inner], axis=1)


def _learned_times(
    operations: Operations, device: DevicePeaks, kind: str, unit: str, model: MatrixModel
) -> OperationTimes:
    rates = rates_of(device, kind)
    law = model.tiles if unit == "vector" else model.tensor
    aligned_ns = kernels_ns(model.trees[unit], law, operations, device, rates, unit)
    unaligned = _is_unaligned(operations, kind, unit)
    slower = np.where(unaligned, UNALIGNED, 1.0) * SLOWER_TYPES.get(kind, 1.0)
    ns = START_NS + (aligned_ns - START_NS) * slower
    band = model.bands[LIKE[kind]][0 if rates.is_sustained else 1]
    low, high = band[np.searchsorted(SIZES_NS, ns)].T
    high = np.where(ns < SIZES_NS[0], np.maximum(high, SHORT_HIGH), high)
    wider = _widening(operations, kind, unit, model) * np.where(unaligned, NOT_LEARNED, 1.0)
    basis = np.full(len(operations), "learned")
    return OperationTimes(ns, ns * low / wider, ns * high * wider, basis)


def kernels_ns(
    trees: BoostedTrees, law: Law | None, operations: Operations, device: DevicePeaks, rates: Rates, unit: str
) -> Numbers:
    """Nanoseconds from the trees; with a law the geometric mean of both, whose errors are independent.

    Tensor cores' batches are the trees' alone: none was timed, and the law counts each product's blocks one by one.
    """
    base, features = base_and_features(operations, device, rates, unit)
    ns = START_NS + base * 1e9 / np.minimum(np.exp(trees.predict(features)), 1.0)
    by_law = operations.batch == 1 if unit == "tensor" else np.ones(len(ns), np.bool_)
    if law is not None and by_law.any() and (unit == "vector" or device.clock_mhz):
        found = np.maximum(law.seconds(operations.select(by_law), device, rates) * 1e9, START_NS)
        ns[by_law] = ns[by_law] ** (1 - TILES_SHARE) * found**TILES_SHARE
    return np.asarray(ns)


def base_and_features(operations: Operations, device: DevicePeaks, rates: Rates, unit: str) -> tuple[Numbers, Numbers]:
    """Seconds of an ideal product at these rates, shape (n,), and the features, shape (n, width)."""
    traffic = rates.traffic_s(operations.bytes, weight_bytes(operations))
    base = np.maximum(rates.arithmetic_s(operations.flops), traffic)
    return base, shape_features(operations, device, rates, unit)


def _is_unaligned(operations: Operations, kind: str, unit: str) -> npt.NDArray[np.bool_]:
    """Whether rows are not a multiple of what tensor cores load, by the columns and the inner dimension."""
    if unit != "tensor":
        return np.zeros(len(operations), np.bool_)
    lengths = np.stack([operations.columns, operations.inner])
    return np.asarray((lengths * BYTES[kind] % _ALIGNED_BYTES != 0).any(axis=0))


def _widening(operations: Operations, kind: str, unit: str, model: MatrixModel) -> Numbers:
    """Factor on the band for what the timings lack, except a generation: held-out GPUs were mostly of unseen ones."""
    dimensions = _dimensions(operations)
    # A dimension within a factor of two of the timed ones still counts as timed.
    outside = (dimensions < model.shortest[unit] / 2) | (dimensions > model.longest[unit] * 2)
    lacks = outside.any(axis=1).astype(np.float64) + (kind not in LEARNED_TYPES[unit])
    return np.asarray(NOT_LEARNED**lacks)
