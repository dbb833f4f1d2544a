"""The time of every piece of device work on another device."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.devices import named_device
from stepscope.errors import UsageError
from stepscope.predict.work_times import work_times
from stepscope.trace import Metadata, Trace
from stepscope.trace.model import Device
from tests.unit.recording import Recording

A100 = Device("0", "NVIDIA A100-SXM4-80GB")
HALF = '["c10::BFloat16", "c10::BFloat16"]'
FLOAT = '["float", "float"]'
LARGE = "[[8192, 8192], [8192, 8192]]"


def one_call(name: str, shapes: str, types: str, *, device: Device | None = A100, kernel: str = "kernel") -> Trace:
    recording = Recording(Metadata(devices=(device,) if device else ()))
    recording.operator(0, 100, name, input_shapes=shapes, input_types=types)
    recording.launched(10, 200, 500_000, kernel, 1)
    return recording.trace()


def test_empty() -> None:
    found = work_times(Trace.from_tables({}), named_device("L4"))

    assert len(found) == 0
    assert found.notes == ()


def test_the_same_device_takes_what_was_measured() -> None:
    found = work_times(one_call("aten::mm", LARGE, HALF), named_device("A100-SXM4-80GB"))

    assert found.basis.tolist() == ["same device"]
    assert found.ns.tolist() == found.low_ns.tolist() == found.high_ns.tolist() == [500_000.0]


def test_work_that_memory_limits_goes_by_bandwidth() -> None:
    """805,306,368 bytes: 2039 GB/s before, 300 GB/s after."""
    found = work_times(one_call("aten::add", LARGE, FLOAT), named_device("L4"))

    assert found.basis.tolist() == ["learned ratio"]
    assert 0.5 * 2039 / 300 < found.ns[0] / 500_000 < 2 * 2039 / 300
    assert found.low_ns[0] <= found.ns[0] <= found.high_ns[0]


def test_a_kernel_without_shapes_is_scaled_by_its_waves() -> None:
    recording = Recording(Metadata(devices=(A100,)))
    recording.launched(10, 200, 502_000, "triton_poi_fused_add_0", 1)

    found = work_times(recording.trace(), named_device("L4"))

    assert found.basis.tolist() == ["wave scaling"]
    assert found.ns[0] == pytest.approx(2_000 + 500_000 * 6.96, rel=0.05)


def test_a_number_type_that_the_target_lacks_is_unknown() -> None:
    found = work_times(one_call("aten::mm", LARGE, HALF), named_device("T4"))

    assert found.basis.tolist() == ["unknown"]
    assert np.isnan(found.ns).all()
    assert found.notes == ("T4 has no units for bf16, in which matrix products would run",)


def test_without_the_source_shapes_tell() -> None:
    found = work_times(one_call("aten::mm", LARGE, HALF, device=None), named_device("A100-SXM4-80GB"))

    assert found.basis.tolist() == ["shapes"]


def test_an_unknown_number_type_is_refused() -> None:
    with pytest.raises(UsageError, match="'fp4' is no number type to predict: fp32, tf32, fp16, bf16, fp8"):
        work_times(Trace.from_tables({}), named_device("L4"), precision="fp4")
