"""Times of what moves memory: the floor and the traffic, rows that leave the cache, and how wide the band is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from scripts.predictor.model_arrays import arrays_of
from stepscope.analysis.roofline import roofline_calls
from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.memory_times import MemoryModel, bandwidth_of, memory_times, shipped_model
from stepscope.predict.operations import Operations
from stepscope.readers import open_trace

TERABYTE = DevicePeaks(
    name="one terabyte per second",
    matches="-",
    capability="7.0",
    multiprocessors=80,
    clock_mhz=1500,
    memory_bytes=None,
    bandwidth_bytes_s=1_200_000_000_000,
    cache_bytes=6 * 2**20,
    flops_s={"fp32": 15e12},
    architecture="Volta",
    sustained_bandwidth_bytes_s=1e12,
)
MODEL = MemoryModel(
    generations=("Volta",),
    shares=np.array([0.75]),
    older=0.5,
    newer=0.625,
    # traffic as it is, blocks of e^9 cycles, the whole input read again once a sixth of the cache is full
    rows=np.array([[1.0, 9.0, -3.0, -3.0, 0.0, 1.0, -1.8, 0.0]] * 3),
    bands=np.broadcast_to(np.array([0.8, 1.25]), (3, 4, 4, 2)).copy(),
    largest=np.array([[1e9, np.inf], [1e9, 1024.0], [1e9, 4096.0], [1e9, 4096.0]]),
)


def one(
    kind: str,
    traffic: float,
    *,
    name: str = "",
    number_type: str = "fp32",
    rows: float = 1.0,
    columns: float = 1.0,
    is_backward: bool = False,
) -> Operations:
    return Operations(
        name=np.array([name or kind]),
        kind=np.array([kind]),
        number_type=np.array([number_type]),
        flops=np.zeros(1),
        bytes=np.array([traffic]),
        batch=np.ones(1),
        rows=np.array([rows]),
        columns=np.array([columns]),
        inner=np.ones(1),
        is_backward=np.array([is_backward]),
    )


def test_nothing_takes_no_time() -> None:
    times = memory_times(one("elementwise", 1e6).select(np.array([], np.int64)), TERABYTE)

    assert times.ns.tolist() == []
    assert times.basis.tolist() == []


def test_elementwise_work_takes_a_kernels_floor_and_its_traffic_at_the_sustained_bandwidth() -> None:
    times = memory_times(one("elementwise", 500e6), TERABYTE, MODEL)

    assert times.ns.tolist() == [502_000.0]
    assert times.low_ns.tolist() == [0.8 * 502_000.0]
    assert times.high_ns.tolist() == [1.25 * 502_000.0]
    assert times.basis.tolist() == ["learned"]


@pytest.mark.parametrize(("launch_ns", "ns"), [(1_300.0, 2_300.0), (6_000.0, 3_000.0)])
def test_a_devices_own_kernels_are_as_short_as_measured_unless_the_host_was(launch_ns: float, ns: float) -> None:
    times = memory_times(one("elementwise", 1e6), replace(TERABYTE, launch_ns=launch_ns), MODEL)

    assert times.ns.tolist() == [ns]


@pytest.mark.parametrize(
    ("architecture", "known", "bandwidth"),
    [("Volta", "generation", 0.9e12), ("Pascal", "other", 0.6e12), ("CDNA 3", "other", 0.75e12)],
)
def test_where_nobody_measured_the_generations_share_of_the_peak_counts(
    architecture: str, known: str, bandwidth: float
) -> None:
    device = replace(TERABYTE, sustained_bandwidth_bytes_s=None, architecture=architecture)

    assert bandwidth_of(device, MODEL) == (known, bandwidth)


@pytest.mark.parametrize(
    ("operation", "width"),
    [
        (one("elementwise", 1e6), 1.0),
        (one("elementwise", 1e6, number_type="bf16"), 1.5),
        (one("elementwise", 1e6, is_backward=True), 1.5),
        (one("copy", 1e6), 1.5),
        (one("reduction", 1e6), 3.0),
        (one("embedding", 1e6), 3.0),
    ],
)
def test_the_band_is_wider_where_the_timings_hold_nothing_alike(operation: Operations, width: float) -> None:
    times = memory_times(operation, TERABYTE, MODEL)

    assert (times.high_ns / times.ns).tolist() == pytest.approx([1.25 * width])
    assert (times.ns / times.low_ns).tolist() == pytest.approx([1.25 * width])


@pytest.mark.parametrize(
    ("operation", "width"),
    [
        (one("elementwise", 2e9, columns=5e8), 1.0),
        (one("elementwise", 2.1e9), 1.5),
        (one("elementwise", 2.1e9, number_type="bf16"), 2.25),
        (one("softmax", 400e6, rows=12_000.0, columns=8192.0), 1.0),
        # The vocabulary of a language model.
        (one("softmax", 400e6, rows=1_000.0, columns=50_257.0), 1.5),
        (one("normalisation", 400e6, rows=5_000.0, columns=10_000.0), 1.5),
    ],
)
def test_the_band_is_wider_for_what_is_far_larger_than_the_timings(operation: Operations, width: float) -> None:
    times = memory_times(operation, TERABYTE, MODEL)

    assert (times.high_ns / times.ns).tolist() == pytest.approx([1.25 * width])
    assert (times.ns / times.low_ns).tolist() == pytest.approx([1.25 * width])


def test_the_shipped_model_knows_how_large_the_timings_are() -> None:
    assert shipped_model().largest.tolist() == [
        [752_714_448.0, np.inf],
        [127_062_936.0, 1023.0],
        [501_809_632.0, 4094.0],
        [492_940_800.0, 4100.0],
    ]


@pytest.mark.parametrize("bandwidth", [None, 1.3e12])
@pytest.mark.parametrize(("vendor", "wider"), [("NVIDIA", 1.0), ("AMD", 1.5)])
def test_of_a_generation_that_was_not_learned_nothing_is_learned_though_its_bandwidth_is_known(
    bandwidth: float | None, vendor: str, wider: float
) -> None:
    device = replace(TERABYTE, architecture="new", vendor=vendor, sustained_bandwidth_bytes_s=bandwidth)

    times = memory_times(one("elementwise", 1e6), device, MODEL)

    assert times.basis.tolist() == ["roofline"]
    assert (times.high_ns / times.ns).tolist() == pytest.approx([1.25 * wider])


@pytest.mark.parametrize(("columns", "turns"), [(3137.0, 6), (5185.0, 4)])
def test_softmax_of_unaligned_rows_takes_a_turn_of_whole_vectors_and_one_for_each_number_of_the_rest(
    columns: float, turns: int
) -> None:
    rows = one("softmax", 4e5 * columns, number_type="bf16", rows=1e5, columns=columns)
    blocks = 2048 / (256 if columns < 4096 else 512) * 80

    assert memory_times(rows, TERABYTE).ns[0] == pytest.approx(1e5 / blocks * turns * 6_000 / 1.5 + 2_000)


def test_unknown_traffic_has_no_time() -> None:
    times = memory_times(one("elementwise", float("nan")), TERABYTE)

    assert np.isnan([times.ns, times.low_ns, times.high_ns]).all()
    assert times.basis.tolist() == ["unknown"]


def test_rows_that_outgrow_the_cache_are_read_again() -> None:
    # 80 multiprocessors hold 16 blocks of 128 threads each: 1280 rows, of 1 MB or 21 MB together.
    short = memory_times(one("normalisation", 1e9, rows=1e9 / 8 / 200, columns=200), TERABYTE, MODEL)
    long = memory_times(one("normalisation", 1e9, rows=1e9 / 8 / 4096, columns=4096), TERABYTE, MODEL)
    blocks = np.exp(9) / 1.5 * np.array([1e9 / 8 / 200, 1e9 / 8 / 4096]) / 1280

    assert long.ns[0] == pytest.approx(np.hypot(2e6, blocks[1]), rel=0.01)
    assert short.ns[0] == pytest.approx(np.hypot(1.2e6, blocks[0]), rel=0.05)


def test_batch_normalisation_passes_over_its_input_twice() -> None:
    forward = one("normalisation", 200e6, name="cudnn_batch_norm", rows=64, columns=4e5)
    backward = one("normalisation", 300e6, name="cudnn_batch_norm_backward", rows=64, columns=4e5, is_backward=True)

    assert memory_times(forward, TERABYTE, MODEL).ns.tolist() == [302_000.0]
    assert memory_times(backward, TERABYTE, MODEL).ns.tolist() == pytest.approx([502_000.0])


def test_rows_on_a_device_of_unknown_units_are_traffic_alone() -> None:
    device = replace(TERABYTE, multiprocessors=None)

    assert memory_times(one("softmax", 1e9, rows=31250, columns=4000), device, MODEL).ns.tolist() == [1_002_000.0]


def test_the_model_is_the_same_after_it_was_kept() -> None:
    again = MemoryModel.from_arrays(arrays_of(MODEL))

    assert (again.generations, again.older, again.newer) == (("Volta",), 0.5, 0.625)
    assert again.shares.tolist() == [0.75]
    assert again.rows.tolist() == MODEL.rows.tolist()
    assert again.bands.tolist() == MODEL.bands.tolist()


def test_the_shipped_model_says_what_a_v100_took() -> None:
    """Adding 51,380,224 bytes to as many took 189 us in the public trace v100_resnet50_workers0."""
    device = replace(named_device("V100-SXM2-32GB"), sustained_bandwidth_bytes_s=None)
    times = memory_times(one("elementwise", 3.0 * 51_380_224), device, shipped_model())

    assert times.low_ns[0] < 189_000 < times.high_ns[0]
    assert times.ns[0] == pytest.approx(189_000, rel=0.03)


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "device"),
    [("v100_resnet50_workers0", "V100-SXM2-32GB"), ("a100_ddp_rank3of8", "A100-SXM4-40GB"), ("h100_owlv2", "H100-SXM")],
)
def test_long_elementwise_kernels_of_recordings_take_what_their_traffic_tells(
    traces_folder: Path, name: str, device: str
) -> None:
    """None of these recordings was learned from, and of the H100 no timing."""
    calls = roofline_calls(open_trace(traces_folder / "kineto" / f"{name}.json.gz")).filter(
        (pl.col("work_kind") == "elementwise") & (pl.col("works") == 1) & (pl.col("bytes") > 50e6)
    )
    operations = Operations.joined([one("elementwise", float(traffic)) for traffic in calls["bytes"].to_list()])

    times = memory_times(operations, replace(named_device(device), sustained_bandwidth_bytes_s=None))

    ratio = times.ns / calls["device_ns"].to_numpy()
    assert float(np.median(ratio)) == pytest.approx(1, abs=0.06)
    assert np.mean((ratio > 0.7) & (ratio < 1.35)) > 0.9


def test_what_reads_one_number_at_a_time_takes_a_clock_of_a_multiprocessor_for_each() -> None:
    """Twice the bytes a number take no longer; contiguous numbers are limited by the memory alone."""
    numbers = 1e8
    device = named_device("A100-SXM4-80GB")
    by_hand = numbers / (108 * 1.41)
    strided, contiguous = (
        one_operation("copy", rows=rows, columns=numbers / rows, moved=4 * numbers) for rows in (numbers, 1.0)
    )

    assert memory_times(strided, device).ns[0] == pytest.approx(by_hand, rel=0.01)
    assert memory_times(contiguous, device).ns[0] < 0.5 * by_hand


def test_rows_of_16_bits_that_are_no_multiple_of_16_bytes_are_slower() -> None:
    device = named_device("H100-SXM")
    odd, even = (
        memory_times(one_operation("softmax", 3e5, columns, 4 * 3e5 * columns, "bf16"), device).ns[0]
        for columns in (3137.0, 3136.0)
    )

    assert odd > 1.3 * even


def one_operation(kind: str, rows: float, columns: float, moved: float, number_type: str = "bf16") -> Operations:
    ones, number = np.ones(1), np.array([rows])
    return Operations(
        np.array([kind]), np.array([kind]), np.array([number_type]), np.zeros(1), np.array([moved]), ones,
        number, np.array([columns]), ones, np.zeros(1, np.bool_),
    )  # fmt: skip
