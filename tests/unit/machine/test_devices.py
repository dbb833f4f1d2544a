"""The table of accelerators, and finding a trace's device in it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stepscope.machine.devices import (
    NUMBER_TYPES,
    DevicePeaks,
    device_table,
    find_device,
    named_device,
    with_measured_shares,
)
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
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA H20", "H20-96GB"),
        ("NVIDIA H20-3e", "H20-141GB"),
        ("NVIDIA H800", "H800-SXM"),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("NVIDIA A800 80GB PCIe", "A800-PCIe-80GB"),
        ("NVIDIA A800 40GB Active", None),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A100X", None),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40-48Q", None),
        ("NVIDIA L40G", None),
        ("NVIDIA T400", None),
        ("NVIDIA T4G", None),
        ("Quadro RTX 4000", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA RTX 4000 Ada Generation", None),
        ("NVIDIA RTX A4000", "RTX A4000"),
        ("NVIDIA RTX A4000 Laptop GPU", None),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4080", "RTX 4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5080", "RTX 5080"),
        ("Tesla P40", None),
        ("Tesla V100-FHHL-16GB", None),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIe"),
        ("GAUDI2", "Gaudi2"),
        ("HL-225", "Gaudi2"),
        ("GAUDI3", "Gaudi3"),
        ("HL-325L", "Gaudi3"),
        ("GAUDI", None),
        ("Intel(R) Data Center GPU Max 1550", "Max 1550 (one of two stacks)"),
        ("Intel(R) Data Center GPU Max 1100", None),
        ("TPU v5", "TPU v5p"),
        ("TPU v4", "TPU v4"),
        ("TPU7x", "TPU7x (one of two chiplets)"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU v5 lite", "TPU v5e"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI250X", "MI250X (one of two dies)"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("AMD Instinct MI300A", None),
        ("AMD Instinct MI350X", "MI350X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("AMD Instinct MI250X / MI250", None),
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
    assert found("", 85_018_279_936, "9.0", 132) is None  # an H100 or an H800
    assert found("", 99_953_934_336, "9.0", 132) is None  # an H100 NVL or a GH200 of 96 GB
    assert found("", 15_828_320_256, "7.5", 40) == "T4"
    assert found("", 85_018_279_936, "8.0", 108) is None  # two A100s of 80 GB differ in bandwidth
    assert found("", 85_018_279_936, "9.0", 133) is None
    assert found("", None, "9.0", 132) is None


def test_a_name_that_tells_another_model_is_believed() -> None:
    assert found("NVIDIA A800 40GB Active", 42_505_273_344, "8.0", 108) is None  # it has what an A100 has
    assert found("NVIDIA H800 PCIe", 85_018_279_936, "9.0", 114) is None


def test_the_memory_tells_two_cards_of_one_name_apart() -> None:
    assert found("NVIDIA GeForce RTX 3080", 10_502_144_000) == "RTX 3080"
    assert found("NVIDIA GeForce RTX 3080", 12_622_168_064) is None  # that of 12 GB has more units and bandwidth
    assert found("NVIDIA H20", 102_000_000_000) == "H20-96GB"


def test_no_two_rows_share_a_name() -> None:
    """Neither names and aliases, nor a name of one row with the driver's names of another."""
    for row in device_table():
        for name in (row.name, row.name.split(" (")[0], *row.aliases, f"{row.vendor} {row.name}"):
            assert named_device(name) == row, name
            assert found(name) == row.name, name


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
    assert len(names) == len(set(names)) == 68
    for row in device_table():
        assert row.vendor in ("NVIDIA", "AMD", "Intel", "Google", "AWS")
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


def test_shares_come_from_the_same_chip_and_the_nearest_power() -> None:
    mi350, mi355 = with_measured_shares(named_device("MI350X")), named_device("MI355X")
    assert mi350.sustained_flops_s["bf16"] / mi350.flops_s["bf16"] == pytest.approx(1565 / 2516.6)
    assert with_measured_shares(mi355).sustained_flops_s == mi355.sustained_flops_s
    pcie = with_measured_shares(named_device("A100-PCIe-40GB"))
    assert pcie.sustained_flops_s["fp32"] == named_device("A100-PCIe-40GB").sustained_flops_s["fp32"]
    assert pcie.sustained_flops_s["bf16"] / pcie.flops_s["bf16"] == pytest.approx(252.9 / 312)  # not the SXM's 271.2
    assert (
        with_measured_shares(replace(mi350, name="mine", architecture="", sustained_flops_s={})).sustained_flops_s == {}
    )
