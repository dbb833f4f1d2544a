"""How the timings of matrix products are read, and what a held-out GPU tells of the band."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

pytest.importorskip("sklearn")

from scripts.predictor.matrix import _band, _for_trees, _same, timed_ns
from scripts.predictor.matrix_timings import VECTOR_GPUS, tensor_timings, vector_timings
from stepscope.predict.matrix_laws import CHOSEN

TINY = {"B": 1, "M": 4, "N": 8, "K": 16, "latency_ms": 0.05, "kernel": "gemv", "grid_z": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Each GPU timed a tiny product and a larger one in both ways; one timed low precision."""
    rows = []
    for gpu in VECTOR_GPUS:
        for operator, batch in (("bmm", 3), ("linear", 1)):
            rows.append(TINY | {"op": operator, "gpu": gpu})
            larger = TINY | {"B": batch, "M": 128, "N": 256, "K": 512, "latency_ms": 1.0, "op": operator, "gpu": gpu}
            rows.append(larger | {"kernel": "volta_sgemm_32x128_nn", "grid_z": 3})
    pl.DataFrame(rows).write_parquet(tmp_path / "matmul_fp32.parquet")
    low = {"gpu": "H200-SXM", "m": 16, "n": 32, "k": 64, "latency_ms": 0.003}
    types = [low | {"dtype": "bfloat16"}, low | {"dtype": "fp8"}, low | {"dtype": "nvfp4"}]
    pl.DataFrame(types).write_parquet(tmp_path / "gemm_low_precision.parquet")
    return tmp_path


def test_n_is_the_inner_dimension_of_the_products_in_fp32(folder: Path) -> None:
    timings = vector_timings(folder)[0]
    operations = timings.operations

    assert timings.operator.tolist() == ["bmm", "bmm", "linear", "linear"]
    assert operations.inner.tolist() == [8, 256, 8, 256]
    assert operations.columns.tolist() == [16, 512, 16, 512]
    assert operations.flops.tolist()[1] == 2 * 3 * 128 * 256 * 512
    # The weight of a linear layer is read once, that of bmm for each product.
    assert operations.bytes[1] == 4 * 3 * (128 * 256 + 256 * 512 + 128 * 512)
    assert operations.bytes[3] == 4 * (128 * 256 + 256 * 512 + 128 * 512)


def test_what_tiny_products_take_is_the_least_of_the_host(folder: Path) -> None:
    assert vector_timings(folder)[0].host_ns.tolist() == [50_000.0] * 4


def test_the_kernels_name_tells_its_tile_and_the_grid_how_a_layer_was_cut(folder: Path) -> None:
    """The grid of a batch counts its products."""
    timings = vector_timings(folder)[0]
    assert timings.tile.tolist() == [-1, CHOSEN.index((32, 128))] * 2
    assert timings.splits.tolist() == [1, 1, 1, 3]


def test_a_short_kernel_does_not_show_beside_the_host() -> None:
    """Of 40 us of host 22 pass before the kernel starts."""
    shown = timed_ns(np.array([1e3, 18e3, 20e3, 1e6]), np.full(4, 40e3))
    assert shown.tolist() == pytest.approx([40e3, 40e3, 42e3, 1_022e3])


def test_trees_learn_from_what_clearly_shows(folder: Path) -> None:
    """Two of the four timings take no longer than the host: 50 us, of which 6 are the tiny kernel."""
    operations, kernels = _for_trees(vector_timings(folder)[0])
    assert kernels.tolist() == pytest.approx([956_000.0] * 2)
    assert operations.inner.tolist() == [256, 256]


def test_only_number_types_of_pytorch_are_learned(folder: Path) -> None:
    timings = tensor_timings(folder)
    assert [(one.gpu, one.kind, one.operations.inner.tolist()) for one in timings] == [
        ("H200-SXM", "bf16", [64.0]),
        ("H200-SXM", "fp8", [64.0]),
    ]


def test_the_same_products_of_two_gpus(folder: Path) -> None:
    first, second = vector_timings(folder)[:2]
    here, there = _same(first.select(np.array([1, 3])), second, np.array([True, True]))
    assert (here.tolist(), there.tolist()) == ([0, 1], [1, 3])


def test_the_band_holds_nine_of_ten_and_one() -> None:
    """Of products between 10 and 50 us; shorter ones borrow it, and of longer ones nothing is known."""
    ratios = np.linspace(1.1, 2.1, 1001)
    band = _band([(np.full(1001, 20_000.0), ratios), (np.full(99, 2e6), np.full(99, 9.0))])

    assert band.round(6).tolist() == [[1.0, 2.05], [1.0, 2.05], [1.0, 1.0], [1.0, 1.0]]


def test_fp8_timings_lose_the_quantisation_of_their_input(folder: Path) -> None:
    """20 us before products of 3 us, of which half of bf16's beyond the start are known, of 30 us and of 15 us."""
    few = {"gpu": "H200-SXM", "m": 16, "n": 32, "k": 64}
    rows = [
        few | {"dtype": "bfloat16", "latency_ms": 4.5e-3},
        few | {"dtype": "fp8", "latency_ms": 23e-3},
        few | {"dtype": "fp8", "n": 4096, "latency_ms": 50e-3},
        few | {"dtype": "fp8", "n": 512, "latency_ms": 35e-3},
    ]
    pl.DataFrame(rows).write_parquet(folder / "gemm_low_precision.parquet")
    tensor_timings.cache_clear()
    fp8 = tensor_timings(folder)[1]
    assert fp8.operations.columns.tolist() == [4096]
    assert fp8.latency_ns.tolist() == pytest.approx([30e3])
