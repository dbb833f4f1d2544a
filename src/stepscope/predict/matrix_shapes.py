"""What the shape of a matrix product means for a device: features without a unit, for the trees to judge by."""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.devices import DevicePeaks
from stepscope.predict.matrix_rates import Rates, capability_of
from stepscope.predict.operations import Numbers, Operations

TILES: Final = {
    "vector": ((128, 128), (128, 64), (64, 64), (128, 32), (32, 32)),
    "tensor": ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32)),
}
"""Parts of the result that one block of threads computes, as the names of cuBLAS' kernels tell."""
_COUNTED: Final = ((128, 128), (64, 64))
_STREAMED: Final = {"vector": (128, 64), "tensor": (128, 128)}
_BLOCKS: Final = 2
"""Blocks that a multiprocessor works on at a time."""
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
    # The products on tensor cores were timed at few lengths, all of them round: trees would know the GPU by them.
    if unit == "tensor":
        found.append(np.minimum(number, 4.0))
        return np.stack(found, axis=1)
    found += [np.log2(rows), np.log2(columns), np.log2(inner), np.log2(batch)]
    found += [_alignment(rows), _alignment(columns), _alignment(inner), np.log2(rows / columns)]
    found += [(batch > 1).astype(np.float64), np.full(len(batch), capability_of(device) or 0.0)]
    return np.stack(found, axis=1)


def number_bytes(operations: Operations) -> Numbers:
    """Bytes of one number, as the traffic tells."""
    batch, rows, columns, inner = operations.batch, operations.rows, operations.columns, operations.inner
    # A weight that the whole batch shares counts once, so this is a little low for batches.
    return np.asarray(operations.bytes / (batch * (rows * columns + rows * inner + inner * columns)))


def weight_bytes(operations: Operations) -> Numbers:
    """Bytes of the second matrix where there is one: a layer's weight, which was long not used."""
    weight = operations.inner * operations.columns * number_bytes(operations)
    return np.where(operations.batch == 1, weight, 0.0)


def _tiling(
    batch: Numbers, rows: Numbers, columns: Numbers, tile: tuple[int, int], units: float
) -> tuple[Numbers, Numbers, Numbers]:
    """With the better way to lay tiles: the share of all waves' work that is the product's, that of the tiles' alone,
    and the number of tiles."""
    one, other = (_laid(batch, rows, columns, tall, wide, units) for tall, wide in (tile, tile[::-1]))
    better = one[0] >= other[0]
    filled, padded, tiles = (np.where(better, mine, turned) for mine, turned in zip(one, other, strict=True))
    return filled, padded, tiles


def _laid(
    batch: Numbers, rows: Numbers, columns: Numbers, tall: int, wide: int, units: float
) -> tuple[Numbers, Numbers, Numbers]:
    tiles = batch * np.ceil(rows / tall) * np.ceil(columns / wide)
    work = batch * rows * columns
    return work / (np.ceil(tiles / units) * units * tall * wide), work / (tiles * tall * wide), tiles


def _streamed(batch: Numbers, tall: Numbers, wide: Numbers, tile: tuple[int, int], at_once: float) -> Numbers:
    """Numbers that are read for each step along the inner dimension when blocks start along `tall` first."""
    along, across = np.ceil(tall / tile[0]), np.ceil(wide / tile[1])
    lines = np.minimum(along, at_once) * tile[0] + np.minimum(across, np.ceil(at_once / along)) * tile[1]
    products = np.clip(at_once / (along * across), 1, batch)
    waves = np.maximum(1, batch * along * across / at_once)
    return np.asarray(waves * lines * products)


def _alignment(length: Numbers) -> Numbers:
    """How often 2 divides a length, at most 7 times."""
    whole = np.minimum(length, 2.0**53).astype(np.int64)
    return np.minimum(np.log2((whole & -whole).astype(np.float64)), 7.0)
