"""The table of accelerators, and finding a trace's device in it."""

from __future__ import annotations

import re

import pytest

from stepscope.machine.devices import NUMBER_TYPES, DevicePeaks, device_table, find_device
from stepscope.trace.metadata import Device

GB = 10**9


def found(
    name: str | None = None,
    memory_bytes: int | None = None,
    capability: str | None = None,
    multiprocessors: int | None = None,
) -> str | None:
    row = find_device(Device("0", name, memory_bytes, capability, multiprocessors))
    return None if row is None else row.name


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla V100-DGXS-32GB", "V100-SXM2-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-PG509-200", "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 120GB", "GH200-96GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300-SXM"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", None),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU v5 lite", "TPU v5e"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI250X", "MI250X (one of two dies)"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Simulated Device 80GB", None),
        ("", None),
    ],
)
def test_names(name: str, row: str | None) -> None:
    assert found(name) == row


def test_a_device_without_a_telling_name_is_found_by_what_it_has() -> None:
    assert found(None, 206_141_652_992, "9.4", 304) == "MI300X"
    assert found("AMD Radeon Graphics", 68_702_699_520, "9.0", 104) == "MI210"
    assert found("", 42_505_273_344, "8.0", 108) == "A100-SXM4-40GB"
    assert found("", 85_018_279_936, "9.0", 132) == "H100-SXM"
    assert found("", 99_953_934_336, "9.0", 132) is None  # an H100 NVL or a GH200 of 96 GB
    assert found("", 15_828_320_256, "7.5", 40) == "T4"
    assert found("", 85_018_279_936, "8.0", 108) is None  # two A100s of 80 GB differ in bandwidth
    assert found("", 85_018_279_936, "9.0", 133) is None
    assert found("", None, "9.0", 132) is None


def test_figures() -> None:
    row = find_device(Device("0", "NVIDIA A100-SXM4-80GB"))

    assert row is not None
    assert (row.memory_bytes, row.bandwidth_bytes_s, row.cache_bytes) == (80 * GB, 2039 * GB, 40 * 2**20)
    assert row.flops_s["bf16"] == 312e12
    assert "fp8" not in row.flops_s
    assert row.best_share == pytest.approx(271.2 / 312)
    v100 = find_device(Device("0", "Tesla V100-SXM2-16GB"))
    assert v100 is not None
    assert v100.best_share == 0.85


def test_every_row_is_whole() -> None:
    names = [row.name for row in device_table()]
    assert len(names) == len(set(names)) == 49
    for row in device_table():
        assert row.vendor in ("NVIDIA", "AMD", "Intel", "Google")
        assert row.architecture
        assert all(one.startswith("https://") for one in (*row.source.split(), *row.measured_source.split()))
        assert row.source
        assert set(row.flops_s) | set(row.sustained_flops_s) <= set(NUMBER_TYPES)
        assert row.flops_s
        assert row.bandwidth_bytes_s >= 192 * GB
        assert row.memory_bytes is not None
        assert re.compile(row.matches)
        assert 0.5 < row.best_share <= 1
        # More bits never take less time.
        order = [row.flops_s[kind] for kind in ("fp64", "fp32", "tf32", "bf16", "fp8") if kind in row.flops_s]
        assert order == sorted(order)


def test_measured_figures_fit_the_peaks_and_name_their_source() -> None:
    for row in device_table():
        is_measured = bool(row.sustained_flops_s or row.sustained_bandwidth_bytes_s or row.launch_ns)
        assert bool(row.measured_source) == is_measured, row.name
        for kind, rate in row.sustained_flops_s.items():
            # Cards for games run above the clock that their makers count with.
            limit = 1.25 if "GeForce" in row.matches else 1.0
            assert rate <= row.flops_s.get(kind, rate) * limit, (row.name, kind)
        assert (row.sustained_bandwidth_bytes_s or 0) < row.bandwidth_bytes_s
        assert row.launch_ns is None or 500 < row.launch_ns < 5000


def test_links() -> None:
    assert device_row("V100-SXM2-16GB").host_link_bytes_s == 15.75e9
    assert device_row("A100-SXM4-80GB").peer_link_bytes_s == 300e9
    for row in device_table():
        assert (row.peer_link_bytes_s or 1e12) >= (row.host_link_bytes_s or 0), row.name


def device_row(name: str) -> DevicePeaks:
    """The row of exactly this name."""
    return next(row for row in device_table() if row.name == name)
