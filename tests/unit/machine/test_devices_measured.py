"""Measuring a device: the CPU that is here, and rows made of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.machine.devices import NUMBER_TYPES, devices_toml, named_device, read_devices
from stepscope.machine.measure_device import (
    DeviceMeasurements,
    Effort,
    Figure,
    measure_device,
    measured_lines,
    measured_row,
)


def measured(name: str = "NVIDIA Rocket", **changes: object) -> DeviceMeasurements:
    """A device of which everything was measured."""
    values: dict[str, object] = {
        "name": name,
        "vendor": "NVIDIA",
        "is_cpu": False,
        "compute_capability": "9.9",
        "multiprocessors": 10,
        "memory_bytes": 24_123_456_789,
        "cache_bytes": 6 << 20,
        "rates": {"fp32": Figure(10.12345e12, 10e12, 10.2e12, "products of 8192 x 8192 matrices")},
        "copies": {
            "copy on the device": Figure(500e9, 499e9, 501e9, "copies of 512 MiB"),
            "copy to the device": Figure(26e9, 26e9, 26e9, "copies of 512 MiB, page-locked on the host"),
            "copy from the device": Figure(25e9, 25e9, 25e9, "copies of 512 MiB, page-locked on the host"),
        },
        "kernel_ns": Figure(1500.0, 1490.0, 1510.0, "a graph of 500 additions to one number"),
        "skipped": {"fp8": "not there"},
        "torch_version": "2.13.0",
    }
    return DeviceMeasurements(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cpu() -> DeviceMeasurements:
    """The processor that runs the tests, measured with PyTorch as it is set here."""
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = measure_device("cpu", effort=Effort(runs=2, run_s=0.001, warm_s=0.0))
        assert torch.get_float32_matmul_precision() == "medium"  # the program's setting is left as it was
    finally:
        torch.set_float32_matmul_precision(before)
    return found


@pytest.mark.slow
def test_what_of_the_cpu_is_measured(cpu: DeviceMeasurements) -> None:
    assert cpu.is_cpu
    assert {"fp64", "fp32", "bf16"} <= set(cpu.rates) <= set(NUMBER_TYPES)
    assert cpu.skipped["tf32"] == "the device has no TF32"
    assert cpu.skipped["copy to the device"] == "the CPU is the host"
    assert list(cpu.copies) == ["copy on the device"]
    assert cpu.memory_bytes is not None
    assert cpu.memory_bytes > 1 << 28


def test_figures_are_in_their_units(cpu: DeviceMeasurements) -> None:
    # Between a very slow and a very fast processor, which may be busy.
    assert 1e7 < cpu.rates["fp32"].median < 1e14
    assert 1e8 < cpu.copies["copy on the device"].median < 1e13
    assert cpu.kernel_ns is not None
    assert 10 < cpu.kernel_ns.median < 1e7
    for figure in (*cpu.rates.values(), *cpu.copies.values(), cpu.kernel_ns):
        assert 0 < figure.low <= figure.median <= figure.high


@pytest.mark.slow
def test_what_was_measured_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("STEPSCOPE_CONFIG_DIR", str(tmp_path))
    file = tmp_path / "mine.toml"

    measure = ["devices", "measure", "--device", "cpu", "--quick", "--called", "my laptop", "--output", str(file)]
    assert main(measure) == 0

    printed = capsys.readouterr()
    steps = [*NUMBER_TYPES, "copy on the device", "copy to the device", "copy from the device", "small kernel"]
    assert printed.err.splitlines() == [
        *(f"stepscope: measuring {step}" for step in steps),
        f"stepscope: wrote {file}",
    ]
    comments = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("#")]
    assert [" ".join(line.split()) for line in printed.out.splitlines()] == comments
    assert main(["devices", "--add", str(file)]) == 0
    row = named_device("my laptop")
    assert row.flops_s == row.sustained_flops_s
    assert row.bandwidth_bytes_s == pytest.approx(row.sustained_bandwidth_bytes_s)
    assert row.launch_ns is not None


def test_a_device_that_no_maker_is_known_of() -> None:
    assert measured_row(measured()) == {
        "name": "NVIDIA Rocket",
        "driver_names": ["NVIDIA Rocket"],
        "vendor": "NVIDIA",
        "capability": "9.9",
        "multiprocessors": 10,
        "memory_gb": 24.123,
        "cache_mib": 6.0,
        "measured_tflop_s": {"fp32": 10.12},
        "measured_bandwidth_gb_s": 500.0,
        "host_link_gb_s": 25.0,
        "launch_us": 1.5,
        "measured_source": "stepscope devices measure, with torch 2.13.0",
    }


def test_what_was_not_measured_is_absent() -> None:
    row = measured_row(measured(rates={}, copies={}, kernel_ns=None, cache_bytes=None, multiprocessors=None))

    assert row.keys() == {
        "name", "driver_names", "vendor", "capability", "memory_gb", "measured_tflop_s", "measured_source"
    }  # fmt: skip


def test_a_known_device_keeps_its_makers_figures(tmp_path: Path) -> None:
    file = tmp_path / "l4.toml"
    file.write_bytes(devices_toml([measured_row(measured("NVIDIA L4"))]))

    [row] = read_devices(file)

    assert (row.name, row.architecture, row.power_w) == ("L4", "Ada Lovelace", 72)
    assert (row.flops_s["bf16"], row.flops_s["fp32"]) == (121e12, 30.3e12)
    assert row.sustained_flops_s == {"fp32": 10.12e12}
    assert (row.bandwidth_bytes_s, row.sustained_bandwidth_bytes_s) == (300 * 10**9, 500e9)
    assert row.host_link_bytes_s == 25e9
    assert row.source.startswith("https://")
    assert measured_row(measured("NVIDIA L4"), "my L4")["name"] == "my L4"


def test_the_lines() -> None:
    unsteady = {"int8": Figure(2e12, 1.5e12, 2.5e12, "products of 512 x 512 matrices")}

    assert list(measured_lines(measured(rates=unsteady))) == [
        "Measured on NVIDIA Rocket, with torch 2.13.0:",
        "  int8 products: 2.0 TOP/s, the middle half of the runs within 50%; products of 512 x 512 matrices",
        "  copy on the device: 500.0 GB/s, the middle half of the runs within 0%; copies of 512 MiB",
        "  copy to the device: 26.0 GB/s, the middle half of the runs within 0%; "
        "copies of 512 MiB, page-locked on the host",
        "  copy from the device: 25.0 GB/s, the middle half of the runs within 0%; "
        "copies of 512 MiB, page-locked on the host",
        "  small kernel: 1.5 us, the middle half of the runs within 1%; a graph of 500 additions to one number",
        "  The runs differ widely: other programs used the machine. Measure again when it is idle.",
        "  fp8: not measured: not there",
    ]


def test_without_torch_the_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)

    assert main(["devices", "measure"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("stepscope: measuring needs PyTorch, which cannot be imported here: ")
    assert error.endswith("; install stepscope into the environment of your training and run it there\n")
