"""How a kernel's time changes with the device, from its launch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope.analysis.roofline import device_peaks
from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.machine.occupancy import product_of
from stepscope.predict.operation_times import (
    LAUNCH_COLUMNS,
    resident_blocks,
    scaled_ns,
    sustained_ns,
    wave_factors,
)
from stepscope.readers import open_trace

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >"
PRODUCT = "ampere_sgemm_128x64_tn"


def device(name: str, **figures: Any) -> DevicePeaks:
    """A made-up device of round figures."""
    usual: dict[str, Any] = {
        "matches": name, "capability": "8.0", "multiprocessors": 100, "clock_mhz": 1000, "memory_bytes": 10**10,
        "bandwidth_bytes_s": 10**12, "cache_bytes": 10**7, "flops_s": {"fp32": 1e13, "bf16": 1e14}, "vendor": "NVIDIA",
        "sustained_bandwidth_bytes_s": 1e12, "sustained_flops_s": {"fp32": 1e13, "bf16": 1e14},
    }  # fmt: skip
    return DevicePeaks(name=name, **{**usual, **figures})


def kernel(name: str, grid: str | None = "100000,1,1", block: str | None = "256,1,1", **more: Any) -> pl.DataFrame:
    row = {"name": name, "grid": grid, "block": block, "registers": 32, "shared_memory_bytes": 0, **more}
    schema = {"name": pl.String, "grid": pl.String, "block": pl.String, "registers": pl.Int32}
    return pl.DataFrame([row], {**schema, "shared_memory_bytes": pl.Int64}).select(LAUNCH_COLUMNS)


def factors(kernels: pl.DataFrame, source: DevicePeaks, target: DevicePeaks, **more: Any) -> tuple[float, ...]:
    found = wave_factors(kernels, source, target, **more)
    return found.factor[0], found.low[0], found.high[0]


HALF_THE_BANDWIDTH = device("half", bandwidth_bytes_s=5 * 10**11, sustained_bandwidth_bytes_s=5e11)


def test_empty() -> None:
    found = wave_factors(kernel("any").clear(), device("a"), device("b"))

    assert len(found.factor) == len(found.low) == len(found.high) == 0


def test_element_wise_kernels_go_by_bandwidth() -> None:
    assert factors(kernel(ELEMENTWISE), device("a"), HALF_THE_BANDWIDTH) == pytest.approx((2.0, 2 / 1.5, 3.0))


def test_products_go_mostly_by_arithmetic_and_the_band_reaches_to_bandwidth() -> None:
    """Arithmetic as before, half the bandwidth: 2 to the power of 1/4."""
    found = factors(kernel(PRODUCT), device("a"), HALF_THE_BANDWIDTH)

    assert found == pytest.approx((2**0.25, 1 / 2.2, 2 * 2.2))


def test_what_nothing_tells_of_lies_in_the_middle() -> None:
    assert factors(kernel("my_kernel"), device("a"), HALF_THE_BANDWIDTH)[0] == pytest.approx(2**0.5)


def test_sustained_rates_count_before_peaks() -> None:
    target = device("b", sustained_bandwidth_bytes_s=2.5e11)

    assert factors(kernel(ELEMENTWISE), device("a"), target)[0] == pytest.approx(4.0)


def test_blocks_that_do_not_fill_the_larger_device_do_not_use_its_bandwidth() -> None:
    """400 blocks, 8 of 256 threads a multiprocessor: 800 at once before, 1600 after; the bandwidth doubles too."""
    larger = device("b", multiprocessors=200, sustained_bandwidth_bytes_s=2e12)

    assert factors(kernel(ELEMENTWISE, "400,1,1"), device("a"), larger)[0] == pytest.approx(1.0)
    assert factors(kernel(ELEMENTWISE, "1200,1,1"), device("a"), larger)[0] == pytest.approx(0.5 * 1600 / 1200)
    assert factors(kernel(ELEMENTWISE, "100000,1,1"), device("a"), larger)[0] == pytest.approx(0.5)


def test_a_launch_of_unknown_size_goes_by_rates_alone() -> None:
    assert factors(kernel(ELEMENTWISE, None, None), device("a"), HALF_THE_BANDWIDTH)[0] == pytest.approx(2.0)


def test_a_product_in_a_type_that_the_target_lacks_is_unknown() -> None:
    old = device("old", flops_s={"fp32": 1e13})

    assert np.isnan(factors(kernel("ampere_bf16_s16816gemm_bf16_128x128_tn"), device("a"), old)).all()


def test_tf32_products_run_in_32_bits_where_there_is_no_tf32() -> None:
    source = device("a", flops_s={"fp32": 1e13, "tf32": 8e13}, sustained_flops_s={"fp32": 1e13, "tf32": 8e13})
    kernels = kernel("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>")

    assert factors(kernels, source, device("b"))[0] == pytest.approx(8**0.75)
    assert factors(kernels, source, source)[0] == pytest.approx(1.0)


def test_another_number_type_changes_products_by_name() -> None:
    """Ten times the arithmetic to the power of 3/4; traffic may halve."""
    found = factors(kernel(PRODUCT), device("a"), device("b"), precision="bf16", traffic=(0.5, 1.0))

    assert found == pytest.approx((0.1**0.75, 0.1 / 2.2 / 2, 2.2))


@pytest.mark.parametrize(
    ("grid", "threads"),
    [("0,1,1", "256,1,1"), ("99999999999999999999,1,1", "1"), ("", ""), ("-4", "x"), ("1,1,1", "5000,5000,5000")],
)
def test_nonsense_launches_change_nothing(grid: str, threads: str) -> None:
    found = factors(kernel(ELEMENTWISE, grid, threads), device("a"), HALF_THE_BANDWIDTH)

    assert found[0] == pytest.approx(2.0)


def test_a_kernels_start_stays() -> None:
    measured = np.array([0.0, 500.0, 2_000.0, 12_000.0])

    assert scaled_ns(measured, np.full(4, 3.0)).tolist() == [0.0, 500.0, 2_000.0, 32_000.0]
    assert scaled_ns(measured, np.full(4, 0.1)).tolist() == [0.0, 500.0, 2_000.0, 3_000.0]


@pytest.mark.parametrize(
    ("name", "block", "registers", "shared", "blocks"),
    [
        ("A100-SXM4-80GB", "256,1,1", 27, 0, 8),  # threads: 2048
        ("A100-SXM4-80GB", "32,1,1", 16, 0, 32),  # blocks: 32
        ("A100-SXM4-80GB", "128,1,1", 254, 98_304, 1),  # shared memory: 164 KiB
        ("V100-SXM2-32GB", "64,1,1", 88, 3_328, 10),  # registers: 20 warps
        ("V100-SXM2-32GB", "512,1,1", 38, 26_768, 3),
        ("T4", "1024,1,1", 32, 0, 1),
        ("L4", "256,1,1", 32, 0, 6),
        ("H100-SXM", "384,1,1", 168, 231_424, 1),
    ],
)
def test_blocks_that_a_multiprocessor_holds(name: str, block: str, registers: int, shared: int, blocks: int) -> None:
    kernels = kernel("k", "1,1,1", block, registers=registers, shared_memory_bytes=shared)

    assert resident_blocks(kernels, named_device(name)).tolist() == [blocks]


def test_of_other_makers_nothing_is_known() -> None:
    assert np.isnan(resident_blocks(kernel("k"), named_device("MI300X"))).all()


def test_products_of_grids() -> None:
    assert product_of("[3916, 2, 1]") == product_of("3916,2,1") == 7832
    assert np.isnan(product_of(None))


@pytest.mark.traces
@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "h100_owlv2", "rtx2080ti_resnet", "a100_ddp_rank3of8"])
def test_occupancy_is_what_the_profiler_recorded(name: str, traces_folder: Path) -> None:
    """It records 0 for kernels that take more shared memory than the default."""
    trace = open_trace(traces_folder / "kineto" / f"{name}.json.gz")
    kernels = trace.device_work.filter(pl.col("grid").is_not_null() & (pl.col("occupancy") > 0))
    peaks = device_peaks(trace, "0")
    assert peaks is not None
    assert peaks.multiprocessors is not None
    warps = np.ceil([product_of(text) / 32 for text in kernels["block"].to_list()])
    blocks = np.array([product_of(text) for text in kernels["grid"].to_list()]) / peaks.multiprocessors
    held = np.minimum(resident_blocks(kernels, peaks), blocks) * warps / (32 if peaks.capability == "7.5" else 64)

    assert kernels.height > 1000
    assert np.abs(held - kernels["occupancy"].to_numpy()).max() <= 0.011


def test_long_steps_lose_clock() -> None:
    assert sustained_ns(1e6) == pytest.approx(1e6, rel=1e-4)
    assert sustained_ns(8e9) == pytest.approx(1.04 * 8e9)
