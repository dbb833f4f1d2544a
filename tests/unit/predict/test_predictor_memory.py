"""What is learned of memory traffic from timings made by hand: the host's floors and the share of the bandwidth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from scripts.predictor.memory import fit_host, measured_device, product_shares, smallest_launch_ns, sustained_share
from scripts.predictor.timings import VectorTimings, public_device, vector_operations, wave_ratio

FLOOR_NS = {"add": 30_000.0, "mulu": 36_000.0}
BANDWIDTH = 0.7 * 732e9


@pytest.fixture
def timings() -> VectorTimings:
    """A P100 that moves 0.7 of its peak; half of the host's floor passes before the kernel."""
    rows = np.tile(np.geomspace(1, 30_000, 400).round(), 2)
    operator = np.repeat(["add", "mulu"], 400)
    operations = vector_operations(operator, rows, np.full(800, 1024.0))
    floor = np.array([FLOOR_NS[name] for name in operator.tolist()])
    latency = np.maximum(floor, floor / 2 + 2_000 + operations.bytes / BANDWIDTH * 1e9)
    return VectorTimings(np.full(800, "P100"), operator, latency, operations)


def test_the_hosts_floors_are_told_from_tiny_operations(timings: VectorTimings) -> None:
    host = fit_host(timings, ["P100"])

    assert host.floors == {"P100": 30_000.0}
    assert host.relative == {"add": 1.0, "mulu": 1.2}
    assert host.before == pytest.approx(0.5, abs=1e-6)


def test_a_latency_is_the_host_or_what_of_it_comes_before_the_kernel(timings: VectorTimings) -> None:
    host = fit_host(timings, ["P100"])
    names = np.array(["add", "add"])

    assert host.latency(np.array([1_000.0, 100_000.0]), names, 30_000.0).tolist() == pytest.approx([30_000, 115_000])
    kernels = host.kernel(np.array([30_000.0, 115_000.0]), names, 30_000.0)
    assert np.isnan(kernels[0])
    assert kernels[1] == pytest.approx(100_000)


def test_the_share_of_the_bandwidth_is_the_slope(timings: VectorTimings) -> None:
    assert sustained_share(timings, "P100") == pytest.approx(0.7)


def test_a_measured_device_knows_one_copy_and_the_host_one_launch(timings: VectorTimings) -> None:
    host = fit_host(timings, ["P100"])

    assert smallest_launch_ns(timings, "P100") == 30_000.0
    assert measured_device(timings, "P100", host).sustained_bandwidth_bytes_s == pytest.approx(BANDWIDTH)


def test_what_timings_told_of_a_device_is_no_public_figure() -> None:
    device = public_device("P100")

    assert device.sustained_bandwidth_bytes_s is None
    assert device.sustained_flops_s == {}


def test_waves_of_copies_go_by_bandwidth_and_those_of_arithmetic_by_clock_and_units() -> None:
    source, target = public_device("V100"), public_device("A100-40")
    copy = vector_operations(np.array(["mulu"]), np.array([1.0]), np.array([1e6]))
    memory = 1 - 0.5 * (1 / 8) / (19.5e12 / 1555e9)

    expected = (900 / 1555) ** memory * (1380 * 80 / (1410 * 108)) ** (1 - memory)
    assert wave_ratio(copy, source, target).tolist() == pytest.approx([expected])


def test_a_generation_that_is_held_out_is_not_learned_from_another_of_its_gpus(tmp_path: Path) -> None:
    # Each moves 2 x 20,000 x 20,000 + 2 x 2 x 20,000 bytes: in 1 ms 800 GB/s.
    product = {"dtype": "bfloat16", "m": 1, "n": 20_000, "k": 20_000, "latency_ms": 1.0}
    rows = [product | {"gpu": gpu} for gpu in ("A100-SXM-80", "L40S")]
    pl.DataFrame(rows).write_parquet(tmp_path / "gemm_low_precision.parquet")

    assert product_shares(tmp_path) == pytest.approx({"Ampere": 800.08 / 2039, "Ada Lovelace": 800.08 / 864})
    # The A100 with 40 GB is held out with its generation, which the one with 80 GB is of.
    assert product_shares(tmp_path, unseen={"Ampere"}) == pytest.approx({"Ada Lovelace": 800.08 / 864})
