"""How long matrix products take: the roofline, divided by a share of it that boosted trees learned from timings.

time = start + base / utilization, the base being the longer of arithmetic at the rate that power allows and of traffic
at the bandwidth; the utilization, above 0 and at most 1, follows from features without a unit: how a product's tiles
fill the multiprocessors, how it stands to ridge and cache, and its alignment. Products in FP32 are besides predicted
by the tiles that cuBLAS probably chooses (`matrix_tiles`), and the geometric mean of both counts.
docs/prediction-model.md has the formulas; `scripts/predictor/matrix.py` fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_rates import Rates, capability_of, rates_of, unit_of
from stepscope.predict.matrix_shapes import shape_features, weight_bytes
from stepscope.predict.matrix_tiles import TileLaw
from stepscope.predict.operations import Numbers, Operations
from stepscope.predict.roofline_times import OperationTimes, roofline_times
from stepscope.predict.shipped import shipped_arrays

START_NS: Final = 1_500.0
"""From a kernel's start to its first arithmetic and from the last to its end: the shortest products of the timings take
1.7 to 2.5 us."""
UNITS: Final = ("vector", "tensor")
"""What multiplies: the vector units of FP32, or the tensor cores of the shorter number types."""
SIZES_NS: Final = (10_000.0, 50_000.0, 1_000_000.0)
"""Where the band changes."""
NOT_LEARNED: Final = 1.5
"""How much wider the band is either way for each thing that no timing had: the number type, the generation, a
dimension's length, or batches on tensor cores."""
LIKE: Final = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp64": "fp32",
    "tf32": "bf16",
    "int8": "fp8",
}
"""Of each number type, the one in the timings that it is most like."""
NUMBER_BYTES: Final = {"tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
"""Of the types that tensor cores multiply."""
LEARNED_TYPES: Final = {"vector": ("fp32",), "tensor": ("bf16", "fp16", "fp8")}
"""Of the timings, by unit; tensor cores multiply fp16 at the rate of bf16."""
SHORT_HIGH: Final = 2.0
"""Up to which factor the band of products below the first size reaches at least: the timings repeated one product with
its operands in the cache; 515 such products of a public H100 trace took 1.1 to 1.6 times as long."""
UNALIGNED: Final = 2.0
"""Over the learned time, what products on tensor cores take whose lines are no multiple of 16 bytes: 1.3 to 2.7 in
public H100 and A100 traces, where other kernels serve them; the timings have none."""
SLOWER_TYPES: Final = {"tf32": 1.4}
"""Over the time learned of bf16, what 1,400 products of a public A100 trace took."""
TILES_SHARE: Final = 0.5
"""What the law of tiles counts beside the trees, in the logarithm."""
_ALIGNED_BYTES: Final = 16
_RANGES: Final = ("shortest", "longest", "capabilities")


@dataclass(frozen=True, slots=True)
class MatrixModel:
    """What was learned.

    Attributes:
        trees: the logarithm of the utilization, by UNITS.
        tiles: what products in FP32 take with the tiles that cuBLAS chooses; None for the trees alone.
        shortest, longest: dimensions (batch, rows, columns, inner) in the timings, shape (4,), by UNITS.
        capabilities: the least and the greatest compute capability in the timings, by UNITS.
        bands: measured over predicted time that nine of ten products of GPUs not learned from lay between, shape
            (2, sizes, 2), by the number types of the timings; the first where a sustained rate is known.
    """

    trees: Mapping[str, BoostedTrees]
    shortest: Mapping[str, Numbers]
    longest: Mapping[str, Numbers]
    capabilities: Mapping[str, Numbers]
    bands: Mapping[str, Numbers]
    tiles: TileLaw | None = None

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays to keep in an npz file."""
        arrays: dict[str, npt.NDArray[Any]] = {f"bands.{kind}": band for kind, band in self.bands.items()}
        for unit, trees in self.trees.items():
            arrays |= trees.to_arrays(f"{unit}.")
            arrays |= {f"{unit}.{name}": getattr(self, name)[unit] for name in _RANGES}
        return arrays | (self.tiles.to_arrays() if self.tiles else {})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> MatrixModel:
        """Those that `to_arrays` gave."""
        trees = {unit: BoostedTrees.from_arrays(arrays, f"{unit}.") for unit in UNITS}
        shortest, longest, capabilities = ({unit: arrays[f"{unit}.{name}"] for unit in UNITS} for name in _RANGES)
        bands = {kind: arrays[f"bands.{kind}"] for kind in sorted(set(LIKE.values()))}
        tiles = TileLaw.from_arrays(arrays) if "tiles.constants" in arrays else None
        return cls(trees, shortest, longest, capabilities, bands, tiles)


@lru_cache(maxsize=1)
def shipped_model() -> MatrixModel:
    """The one that comes with the package."""
    return MatrixModel.from_arrays(shipped_arrays("matrix_times"))


def matrix_times(operations: Operations, device: DevicePeaks, model: MatrixModel | None = None) -> OperationTimes:
    """Predict products batch x (rows x inner) x (inner x columns).

    Args:
        operations: with flops, bytes and dimensions; where a dimension is unknown, the roofline answers.
        device: its sustained rates count where someone measured them. Of devices other than NVIDIA's no product was
            timed: the roofline answers.
        model: instead of the one that comes with the package.
    """
    times = roofline_times(operations, device)
    model = model or shipped_model()
    for unit, kind in _units(operations, device):
        mine = (operations.number_type == kind) & np.isfinite(times.ns) & _has_dimensions(operations)
        if mine.any():
            times = times.replaced(mine, _learned_times(operations.select(mine), device, kind, unit, model))
    return times


def _units(operations: Operations, device: DevicePeaks) -> list[tuple[str, str]]:
    """Each number type of the products that the device has timings' units for."""
    kinds = np.unique(operations.number_type).tolist()
    found = [(unit_of(device, kind), kind) for kind in kinds]
    return [(unit, kind) for unit, kind in found if unit is not None]


def _has_dimensions(operations: Operations) -> npt.NDArray[np.bool_]:
    dimensions = np.stack([operations.batch, operations.rows, operations.columns, operations.inner])
    known = (np.isfinite(dimensions) & (dimensions >= 1)).all(axis=0)
    return np.asarray(known & (operations.flops > 0) & (operations.bytes > 0))


def _learned_times(
    operations: Operations, device: DevicePeaks, kind: str, unit: str, model: MatrixModel
) -> OperationTimes:
    rates = rates_of(device, kind)
    tiles = model.tiles if unit == "vector" else None
    aligned_ns = kernels_ns(model.trees[unit], tiles, operations, device, rates, unit)
    unaligned = _is_unaligned(operations, kind, unit)
    slower = np.where(unaligned, UNALIGNED, 1.0) * SLOWER_TYPES.get(kind, 1.0)
    ns = START_NS + (aligned_ns - START_NS) * slower
    band = model.bands[LIKE[kind]][0 if rates.is_sustained else 1]
    low, high = band[np.searchsorted(SIZES_NS, ns)].T
    high = np.where(ns < SIZES_NS[0], np.maximum(high, SHORT_HIGH), high)
    wider = _widening(operations, device, kind, unit, model) * np.where(unaligned, NOT_LEARNED, 1.0)
    basis = np.full(len(operations), "learned")
    return OperationTimes(ns, ns * low / wider, ns * high * wider, basis)


def kernels_ns(
    trees: BoostedTrees, tiles: TileLaw | None, operations: Operations, device: DevicePeaks, rates: Rates, unit: str
) -> Numbers:
    """Nanoseconds by the trees; with a law of tiles the geometric mean of both, which err in other ways."""
    base, features = base_and_features(operations, device, rates, unit)
    by_trees = START_NS + base * 1e9 / np.minimum(np.exp(trees.predict(features)), 1.0)
    if tiles is None:
        return by_trees
    by_tiles = np.maximum(tiles.seconds(operations, device, rates) * 1e9, START_NS)
    return np.asarray(by_trees ** (1 - TILES_SHARE) * by_tiles**TILES_SHARE)


def base_and_features(operations: Operations, device: DevicePeaks, rates: Rates, unit: str) -> tuple[Numbers, Numbers]:
    """Seconds that an ideal product would take at these rates, shape (n,), and the features, shape (n, width)."""
    arithmetic = rates.arithmetic_s(operations.flops)
    traffic = rates.traffic_s(operations.bytes, weight_bytes(operations))
    base = np.maximum(arithmetic, traffic)
    features = shape_features(operations, device, rates, unit)
    return base, features


def _is_unaligned(operations: Operations, kind: str, unit: str) -> npt.NDArray[np.bool_]:
    """Whether tensor cores cannot be fed whole lines, which are as long as the columns and the inner dimension."""
    if unit != "tensor":
        return np.zeros(len(operations), np.bool_)
    lengths = np.stack([operations.columns, operations.inner])
    return np.asarray((lengths * NUMBER_BYTES[kind] % _ALIGNED_BYTES != 0).any(axis=0))


def _widening(operations: Operations, device: DevicePeaks, kind: str, unit: str, model: MatrixModel) -> Numbers:
    """How much wider the band is for all that the timings did not have; shape (n,)."""
    capability = capability_of(device) or 0.0
    oldest, newest = model.capabilities[unit].tolist()
    of_device = (kind not in LEARNED_TYPES[unit]) + (not oldest <= capability <= newest)
    dimensions = np.stack([operations.batch, operations.rows, operations.columns, operations.inner], axis=1)
    # A dimension half as long or twice as long as those that were timed is still like them.
    outside = (dimensions < model.shortest[unit] / 2) | (dimensions > model.longest[unit] * 2)
    return np.asarray(NOT_LEARNED ** (of_device + outside.any(axis=1).astype(np.float64)))
