"""What a product in FP32 takes with each tile that cuBLAS may choose, and which it probably chooses.

A kernel lays tiles over the result; each multiprocessor works through its share of them. Their time follows from the
work of whole tiles, from how many multiprocessors have any, and from the operands that blocks read again when the
last-level cache does not keep them. docs/prediction-model.md has the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_rates import Rates, capability_of
from stepscope.predict.matrix_shapes import number_bytes
from stepscope.predict.operations import Numbers, Operations

CHOSEN: Final = ((128, 128), (128, 64), (64, 128), (64, 64), (32, 128), (128, 32), (64, 32), (32, 32))
"""Tiles of the timed kernels, by columns and rows of the result."""
_SHAPES: Final = ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (32, 32))
_SPLITS: Final = (1, 2, 3, 4, 6, 8, 10)
"""Into how many parts the inner dimension of a single product may be cut."""
_SECTOR: Final = 8
"""Numbers in FP32 that memory gives at a time: lines of whole ones are read with nothing beside them."""
CONSTANTS: Final = 2 * len(_SHAPES) + 9


@dataclass(frozen=True, slots=True)
class TileLaw:
    """What was learned of tiles.

    Attributes:
        constants: of `tile_seconds`, shape (CONSTANTS,).
        choices: the logarithm of how probable each of CHOSEN is, up to a common summand.
    """

    constants: Numbers
    choices: tuple[BoostedTrees, ...]

    def seconds(self, operations: Operations, device: DevicePeaks, rates: Rates) -> Numbers:
        """The geometric mean over all tiles, as probable as each is, at the best way to cut the inner dimension."""
        features = choice_features(operations, device, rates)
        scores = np.stack([trees.predict(features) for trees in self.choices])
        weights = np.exp(scores - scores.max(axis=0))
        weights /= weights.sum(axis=0)
        total = np.zeros(len(operations))
        for tile, weight in zip(CHOSEN, weights, strict=True):
            total += weight * np.log(best_seconds(self.constants, operations, device, rates, tile))
        return np.asarray(np.exp(total))

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays to keep in an npz file."""
        arrays: dict[str, npt.NDArray[Any]] = {"tiles.constants": self.constants}
        for place, trees in enumerate(self.choices):
            arrays |= trees.to_arrays(f"tiles.{place}.")
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> TileLaw:
        """Those that `to_arrays` gave."""
        choices = (BoostedTrees.from_arrays(arrays, f"tiles.{place}.") for place in range(len(CHOSEN)))
        return cls(arrays["tiles.constants"], tuple(choices))


def best_seconds(
    constants: Numbers, operations: Operations, device: DevicePeaks, rates: Rates, tile: tuple[int, int]
) -> Numbers:
    """Seconds with a tile; the inner dimension of a single product is cut as is best."""
    splits = best_splits(constants, operations, device, rates, tile)
    return tile_seconds(constants, operations, device, rates, tile, splits)


def best_splits(
    constants: Numbers, operations: Operations, device: DevicePeaks, rates: Rates, tile: tuple[int, int]
) -> Numbers:
    """Into how many parts the inner dimension of a single product is best cut; 1 for batches."""
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
    """Seconds of a kernel with tiles of `tile` columns and rows, the inner dimension cut into so many parts."""
    units = float(device.multiprocessors or 1)
    kind = _SHAPES.index((max(tile), min(tile)))
    efficiency = 1 / (1 + np.exp(-constants[kind]))
    fewest = np.exp(constants[len(_SHAPES) + kind])
    start, ragged, edge, sharp, again_single, again_batch, power, joint, even = constants[2 * len(_SHAPES) :].tolist()

    single = operations.batch == 1
    tiles = operations.batch * np.ceil(operations.columns / tile[0]) * np.ceil(operations.rows / tile[1]) * splits
    inner = operations.inner / splits
    work = 2 * tiles * inner * tile[0] * tile[1]
    one = work / tiles / (rates.peak / units)
    share = tiles / units
    # A last wave that is not full takes less than a whole one: blocks of several waves run side by side.
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
    """What cuBLAS may choose a tile by, shape (n, 15), all finite."""
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
