"""How long matrix products take: the roofline, divided by a utilization that boosted trees learned from timings.

time = start + base / utilization, the base being the longer of arithmetic at the rate that power allows and traffic at
the bandwidth; the utilization, above 0 and at most 1, follows from dimensionless features: how a product's tiles fill
the multiprocessors, how it relates to ridge and cache, and its alignment. Products in FP32, and single ones on tensor
cores, are also predicted by the tiles that the library probably chooses, and the result is the geometric mean of both.
docs/prediction-model.md has the formulas; `scripts/predictor/matrix.py` fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees, shipped_arrays
from stepscope.predict.matrix_laws import (
    BEST_SHARE,
    CHOSEN,
    START,
    TENSOR_TYPES,
    USUAL_BANDWIDTH_SHARE,
    WARM_S,
    Law,
    Rates,
    TensorLaw,
    TileLaw,
    best_seconds,
    capability_of,
    number_bytes,
    rates_of,
    sustained_rate,
    unit_of,
    weight_bytes,
)
from stepscope.predict.operations import BYTES, WIDEST, Numbers, Operations, OperationTimes, roofline_times

AMD_SHARE: Final = {"vector": 0.77, "tensor": 0.63}
"""Share of AMD's peaks that large products sustain where nobody measured them: the mean of what the device table and
its sources have, FP32 of the MI210 and MI325X, bf16 of the MI250X to MI355X."""
AMD_SLOWER: Final = 1.12
"""Factor on the law of tiles where arithmetic limits: the median of four public MI300X traces, whose products are not
square as those of the published rates are (`benchmarks/unmeasured_makers.py` prints what is left of it).
"""
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
    constants[START] = np.log(START_NS / 1e3)  # the timings' start has part of their host
    for kind in np.unique(operations.number_type).tolist():
        chosen = operations.number_type == kind
        of_kind, rates = operations.select(chosen), _amd_rates(device, kind)
        seconds = np.min([best_seconds(constants, of_kind, device, rates, tile) for tile in CHOSEN], axis=0)
        by_arithmetic = of_kind.flops / rates.peak > of_kind.bytes / rates.bandwidth
        ns[chosen] = START_NS + (seconds * 1e9 - START_NS) * np.where(by_arithmetic, AMD_SLOWER, 1.0)
    return OperationTimes(ns, ns / WIDEST, ns * WIDEST, np.full(len(ns), "roofline"))


def _amd_rates(device: DevicePeaks, kind: str) -> Rates:
    unit = "tensor" if kind in TENSOR_TYPES else "vector"
    sustained = sustained_rate(device, kind, unit) or device.flops_s[kind] * AMD_SHARE[unit]
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
