"""What products take with each tile, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripts.predictor.model_arrays import arrays_of
from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_laws import (
    BLOCK_CONSTANTS,
    CHOSEN,
    CONSTANTS,
    STEP_CONSTANTS,
    Rates,
    TensorLaw,
    TileLaw,
    best_splits,
    choice_features,
    rates_of,
    tile_seconds,
)
from stepscope.predict.matrix_times import kernels_ns, shape_features
from stepscope.predict.operations import Operations

V100 = replace(named_device("V100-PCIe-32GB"), sustained_flops_s={"fp32": 14e12}, sustained_bandwidth_bytes_s=1e30)
"""80 multiprocessors of 14 TFLOP/s together; its memory never counts."""
NONE = np.full(CONSTANTS, 0.0)
NONE[12:] = (-50.0, -50.0, 0.0, 0.0, -50.0, -50.0, 0.0, 3.0, 0.0)
"""Tiles of half the peak, at least one block's time, no start, and a last wave that takes what it holds."""


H200 = replace(named_device("H200-SXM"), sustained_flops_s={"bf16": 0.92 * 989.4e12}, sustained_bandwidth_bytes_s=1e30)
"""132 multiprocessors at full rate; its memory never counts."""


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


def tensor_law(**constants: float) -> TensorLaw:
    """Blocks at half the peak and nothing beside; the constants replace that."""
    of_blocks = [np.log(constants.get(name, 1e-20)) for name in BLOCK_CONSTANTS]
    of_steps = [np.log(constants.get(name, 2.0 if name == "share" else 1e-20)) for name in STEP_CONSTANTS]
    return TensorLaw(np.array([of_blocks, of_blocks]), np.array(of_steps))


def on_tensor_cores(operations: Operations, law: TensorLaw, device: DevicePeaks = H200) -> float:
    return float(law.seconds(operations, device, rates_of(device, "bf16"))[0])


def test_many_blocks_on_tensor_cores_run_at_their_share_of_the_peak() -> None:
    assert on_tensor_cores(product(1, 8192, 8192, 4096), tensor_law()) == pytest.approx(
        2 * 2 * 8192 * 8192 * 4096 / 989.4e12
    )


def test_few_blocks_on_tensor_cores_are_cut_unless_that_costs_more() -> None:
    """One tile of 64 x 32 on one of 132 multiprocessors, in one part or in eight."""
    few, whole = product(1, 32, 64, 4096), 2 * 2 * 32 * 64 * 4096 / (989.4e12 / 132)
    assert on_tensor_cores(few, tensor_law()) == pytest.approx(whole / 8)
    assert on_tensor_cores(few, tensor_law(cut=1e3)) == pytest.approx(whole)


def test_each_wave_of_blocks_fills_and_ends() -> None:
    """1000 clocks a block, 100 blocks for each multiprocessor with the largest tiles."""
    wide, law = product(1, 128 * 132, 256 * 100, 32), tensor_law(fill=1.0, share=1e-20)
    assert on_tensor_cores(wide, law) == pytest.approx(100 * 1000 / 1830e6)


def test_hoppers_blocks_share_what_they_read() -> None:
    law, large = tensor_law(cache=1.0, share=1e-20), product(1, 8192, 8192, 4096)
    alone = on_tensor_cores(large, law, replace(H200, capability="8.0"))
    assert alone == pytest.approx(8192 * 8192 * 4096 * 2 * (1 / 128 + 1 / 256) / (16 * 132 * 1830e6))
    assert on_tensor_cores(large, law) == pytest.approx(alone / 2**0.5)


def test_batches_on_tensor_cores_are_the_trees_alone() -> None:
    rates, law = rates_of(H200, "bf16"), tensor_law(start=1e3)
    slower = []
    for operations in (product(2, 64, 64, 64), product(1, 64, 64, 64)):
        trees = always(0.0, shape_features(operations, H200, rates, "tensor").shape[1])
        alone, both = (kernels_ns(trees, one, operations, H200, rates, "tensor")[0] for one in (None, law))
        slower.append(both / alone)
    assert slower[0] == 1
    assert slower[1] > 10


def test_a_kept_law_of_tensor_cores_is_the_same() -> None:
    law, large = tensor_law(start=2.0), product(1, 512, 512, 512)
    assert on_tensor_cores(large, TensorLaw.from_arrays(arrays_of(law))) == on_tensor_cores(large, law)
