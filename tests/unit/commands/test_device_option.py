"""--device names the device of a trace that names none."""

from __future__ import annotations

import pytest

from stepscope.analysis.roofline import device_peaks
from stepscope.commands.shared.reading import with_device
from stepscope.errors import UsageError
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.unit.recording import Recording


def trace_of(*devices: Device) -> Trace:
    recording = Recording(Metadata(devices=devices))
    recording.launched(0, 10, 100, "gemm", 1)
    return recording.trace()


@pytest.mark.parametrize("devices", [(), (Device("0"),)], ids=["not described", "without a name"])
def test_a_device_without_a_name_gets_the_figures_of_the_named_one(devices: tuple[Device, ...]) -> None:
    trace = with_device(trace_of(*devices), "mi300x")

    [device] = trace.metadata.devices
    assert (device.device, device.name, device.compute_capability, device.multiprocessors) == (
        "0",
        "MI300X",
        "9.4",
        304,
    )
    peaks = device_peaks(trace, "0")
    assert peaks is not None
    assert peaks.flops_s["bf16"] == 1307.4e12


def test_without_the_option_nothing_changes() -> None:
    trace = trace_of()
    assert with_device(trace, None) is trace


def test_what_the_trace_says_is_not_overruled() -> None:
    named = trace_of(Device("0", "NVIDIA A100-SXM4-80GB"))

    assert with_device(named, "A100-SXM4-80GB").metadata.devices == named.metadata.devices
    with pytest.raises(UsageError, match="NVIDIA A100-SXM4-80GB"):
        with_device(named, "MI300X")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="not in the table"):
        with_device(trace_of(), "Abacus 9000")
