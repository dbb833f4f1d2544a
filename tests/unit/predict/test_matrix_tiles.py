"""What products in FP32 take with each tile, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripts.predictor.model_arrays import arrays_of
from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_times import (
    CHOSEN,
    CONSTANTS,
    Rates,
    TileLaw,
    best_splits,
    choice_features,
    rates_of,
    tile_seconds,
)
from stepscope.predict.operations import Operations

V100 = replace(named_device("V100-PCIe-32GB"), sustained_flops_s={"fp32": 14e12}, sustained_bandwidth_bytes_s=1e30)
"""80 multiprocessors of 14 TFLOP/s together; its memory never counts."""
NONE = np.full(CONSTANTS, 0.0)
NONE[12:] = (-50.0, -50.0, 0.0, 0.0, -50.0, -50.0, 0.0, 3.0, 0.0)
"""Tiles of half the peak, at least one block's time, no start, and a last wave that takes what it holds."""


def product(batch: float, rows: float, columns: float, inner: float) -> Operations:
    sizes = {"batch": batch, "rows": rows, "columns": columns, "inner": inner}
    arrays = {name: np.array([float(size)]) for name, size in sizes.items()}
    return Operations(
        name=np.array(["bmm"]),
        kind=np.array(["matrix"]),
        number_type=np.array(["fp32"]),
        flops=np.array([2.0 * batch * rows * columns * inner]),
        bytes=np.array([4.0 * batch * (rows * columns + rows * inner + inner * columns)]),
        is_backward=np.array([False]),
        **arrays,
    )


def seconds(operations: Operations, tile: tuple[int, int], splits: float = 1.0) -> float:
    return float(tile_seconds(NONE, operations, V100, fast(V100), tile, np.array([splits]))[0])


def fast(device: DevicePeaks) -> Rates:
    return rates_of(device, "fp32")


def test_tiles_are_whole_and_run_at_their_share_of_the_peak() -> None:
    """800 tiles of 64 x 64, ten for each multiprocessor, at half of 14 TFLOP/s; one row less changes nothing."""
    expected = 800 * 2 * 64 * 64 * 512 / 7e12
    assert seconds(product(800, 64, 64, 512), (64, 64)) == pytest.approx(expected)
    assert seconds(product(800, 63, 64, 512), (64, 64)) == pytest.approx(expected)


def test_what_does_not_fill_the_multiprocessors_takes_as_long_as_one_block() -> None:
    expected = 2 * 64 * 64 * 512 / (7e12 / 80)
    assert seconds(product(1, 64, 64, 512), (64, 64)) == pytest.approx(expected)
    assert seconds(product(80, 64, 64, 512), (64, 64)) == pytest.approx(expected)


def test_a_single_product_of_few_tiles_is_cut_and_a_batch_is_not() -> None:
    single, batch = product(1, 64, 64, 5120), product(2, 64, 64, 5120)
    assert best_splits(NONE, single, V100, fast(V100), (64, 64)).tolist() == [10.0]
    assert best_splits(NONE, batch, V100, fast(V100), (64, 64)).tolist() == [1.0]
    assert seconds(single, (64, 64), 10.0) == pytest.approx(seconds(single, (64, 64)) / 10)


def test_tiles_lie_along_columns_and_rows() -> None:
    """128 columns and 32 rows are one tile of 128 x 32 and four of 32 x 128."""
    wide = product(800, 32, 128, 512)
    assert seconds(wide, (32, 128)) == pytest.approx(4 * seconds(wide, (128, 32)))


def test_the_law_is_the_mean_of_the_probable_tiles() -> None:
    """Two tiles are equally probable, of which one takes four times as long; the others are never chosen."""
    wide = product(800, 32, 128, 512)
    width = choice_features(wide, V100, fast(V100)).shape[1]
    law = TileLaw(NONE, tuple(always(0.0 if tile in ((128, 32), (32, 128)) else -800.0, width) for tile in CHOSEN))

    assert law.seconds(wide, V100, fast(V100)).tolist() == [pytest.approx(2 * seconds(wide, (128, 32)))]
    assert TileLaw.from_arrays(arrays_of(law)).seconds(wide, V100, fast(V100)).tolist() == [
        pytest.approx(2 * seconds(wide, (128, 32)))
    ]


def always(score: float, width: int) -> BoostedTrees:
    whole, real = np.empty(0, np.int32), np.empty(0)
    return BoostedTrees(score, whole, np.empty(0, np.int16), real, whole, real, 0, width)
