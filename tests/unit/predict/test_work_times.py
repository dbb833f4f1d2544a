"""The time of every piece of device work on another device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import named_device, with_measured_shares
from stepscope.predict.operation_times import operation_times
from stepscope.predict.operations import UNMEASURED
from stepscope.predict.trace_operations import operations_of_calls
from stepscope.predict.work_times import BASES, KNOWLEDGE, WorkTimes, work_times
from stepscope.readers import open_trace
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
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


SOFTMAX = ("aten::_softmax", "[[8192, 8192], [], []]", '["c10::BFloat16", "Scalar", "Scalar"]')


def test_a_guess_from_the_datasheet_is_called_so_and_is_as_wide_as_such_guesses_were_off() -> None:
    for target in ("Gaudi3", "TPU v5e", "Trainium2"):
        found = work_times(one_call("aten::mm", LARGE, HALF), named_device(target))

        assert found.basis.tolist() == ["datasheet"], target
        assert found.low_ns[0] <= found.ns[0] * UNMEASURED[""][0]
        assert found.high_ns[0] >= found.ns[0] * UNMEASURED[""][1]
    unknown = work_times(one_call("aten::mm", LARGE, HALF, device=None), named_device("MI300X"))
    assert unknown.basis.tolist() == ["datasheet"]
    assert unknown.high_ns[0] >= unknown.ns[0] * UNMEASURED["AMD"][1]


def test_between_makers_the_recorded_kernel_is_transferred() -> None:
    """By the bandwidths, since the name says that memory limits it; the range reaches to what both datasheets say."""
    trace = one_call(*SOFTMAX, kernel="softmax_warp_forward")
    found = work_times(trace, named_device("MI300X"))

    assert found.basis.tolist() == ["wave scaling"]
    assert KNOWLEDGE[found.basis[0]] == "transferred"
    assert 0.3 < found.ns[0] / 500_000 < 0.5  # 2,039 over 5,300 GB/s
    in_fp16 = work_times(one_call("aten::mm", LARGE, FLOAT), named_device("MI300X"), precision="bf16")
    assert in_fp16.basis.tolist() == ["datasheet"]  # other kernels would run


def test_of_one_maker_the_constant_cancels() -> None:
    mi210 = Device("0", "AMD Instinct MI210")
    found = work_times(one_call("aten::add", LARGE, FLOAT, device=mi210), named_device("MI300X"))

    assert found.basis.tolist() == ["roofline ratio"]
    assert 0.2 < found.ns[0] / 500_000 < 0.5


def test_what_a_device_cannot_run_is_named() -> None:
    launched = Recording(Metadata(devices=(A100,)))
    launched.launched(10, 200, 502_000, "triton_poi_fused_add_0", 1)
    on_tpu = work_times(launched.trace(), named_device("TPU v5e"))
    assert on_tpu.basis.tolist() == ["unknown"]
    assert "TPU v5e runs no CUDA or ROCm kernels" in on_tpu.notes[0]
    eight_bit = Recording(Metadata(devices=(Device("0", "NVIDIA H100 80GB HBM3"),)))
    eight_bit.launched(10, 200, 502_000, "nvjet_qqtst_128x128_e4m3_gemm", 1)
    on_a100 = work_times(eight_bit.trace(), named_device("A100-SXM4-80GB"))
    assert on_a100.basis.tolist() == ["unknown"]
    assert on_a100.notes == ("A100-SXM4-80GB has no units for fp8, in which matrix products would run",)


def test_every_basis_is_of_one_kind() -> None:
    assert tuple(KNOWLEDGE) == BASES


def test_an_unknown_number_type_is_refused() -> None:
    with pytest.raises(UsageError, match="'fp4' is not a number type to predict: fp32, tf32, fp16, bf16, fp8"):
        work_times(Trace.from_tables({}), named_device("L4"), precision="fp4")


L4, A100_TABLE = (with_measured_shares(named_device(name)) for name in ("L4", "A100-SXM4-80GB"))


def one_work(kind: str, duration_ns: int = 102_000, **more: Any) -> Trace:
    recording = Recording(Metadata(devices=(A100,)))
    recording.work(0, duration_ns, "work", kind=kind, **more)
    return recording.trace()


def times(found: WorkTimes) -> tuple[str, float, float, float]:
    return found.basis[0], found.ns[0], found.low_ns[0], found.high_ns[0]


def test_a_calls_time_goes_by_what_is_predicted_of_both_devices() -> None:
    """Measured and predicted on the source are the same, so the target's prediction is the answer."""
    trace = one_call("aten::add", LARGE, FLOAT)
    _, operations = operations_of_calls(trace)
    before, after = (float(operation_times(operations, device).ns[0]) for device in (A100_TABLE, L4))
    recording = Recording(Metadata(devices=(A100,)))
    recording.operator(0, 100, "aten::add", input_shapes=LARGE, input_types=FLOAT)
    recording.launched(10, 200, round(before), "kernel", 1)

    assert work_times(recording.trace(), L4).ns[0] == pytest.approx(after, rel=1e-4)


def test_what_a_call_took_longer_is_carried_for_the_most_part() -> None:
    """Ten times as long as predicted is far outside of the band, of which half stays with the source."""
    _, operations = operations_of_calls(one_call("aten::add", LARGE, FLOAT))
    before, after = (operation_times(operations, device) for device in (A100_TABLE, L4))
    recording = Recording(Metadata(devices=(A100,)))
    recording.operator(0, 100, "aten::add", input_shapes=LARGE, input_types=FLOAT)
    recording.launched(10, 200, round(10 * before.ns[0]), "kernel", 1)
    in_band = float((before.high_ns / before.ns)[0])

    assert work_times(recording.trace(), L4).ns[0] == pytest.approx(10 * after.ns[0] / in_band**0.5, rel=1e-4)


def test_devices_that_run_the_same_code_take_all_of_it() -> None:
    _, operations = operations_of_calls(one_call("aten::add", LARGE, FLOAT))
    other = with_measured_shares(named_device("A100-PCIe-40GB"))
    before, after = (operation_times(operations, device).ns[0] for device in (A100_TABLE, other))

    found = work_times(one_call("aten::add", LARGE, FLOAT), other)

    assert found.ns[0] == pytest.approx(500_000 * after / before)


def test_all_kernels_of_a_call_share_its_factor() -> None:
    recording = Recording(Metadata(devices=(A100,)))
    recording.operator(0, 100, "aten::mm", input_shapes=LARGE, input_types=HALF)
    recording.launched(10, 200, 4_000_000, "kernel", 1)
    recording.launched(20, 5_000_000, 1_000_000, "kernel", 2)

    found = work_times(recording.trace(), L4)

    assert found.basis.tolist() == ["learned ratio", "learned ratio"]
    assert found.ns[0] / found.ns[1] == pytest.approx(4)


def test_a_short_kernel_stays_short() -> None:
    """Predicted are 2 us on both devices; half of what it took less is carried."""
    recording = Recording(Metadata(devices=(Device("0", "Tesla T4"),)))
    recording.operator(0, 100, "aten::add", input_shapes="[[4], [4]]", input_types=FLOAT)
    recording.launched(10, 200, 1_500, "kernel", 1)

    assert work_times(recording.trace(), named_device("H100-SXM")).ns[0] == pytest.approx(2_000 * 0.75**0.5, rel=1e-3)


def test_copies_between_host_and_device_go_by_the_link() -> None:
    fast, slow = (replace(A100_TABLE, name=name, host_link_bytes_s=rate) for name, rate in (("f", 3e10), ("s", 1e10)))
    for kind in ("copy_in", "copy_out"):
        assert times(work_times(one_work(kind), slow, source=fast)) == ("bandwidth", 302_000, 102_000, 302_000)


def test_copies_over_an_unknown_link_are_taken_as_measured() -> None:
    target = replace(A100_TABLE, name="other", host_link_bytes_s=None)

    found = work_times(one_work("copy_in"), target)

    assert times(found) == ("unchanged", 102_000, 0, 102_000)
    assert found.notes == ("copies between host and device are kept as measured: a link's bandwidth is unknown",)


def test_copies_on_the_device_go_by_its_memory() -> None:
    half = replace(A100_TABLE, name="half", bandwidth_bytes_s=A100_TABLE.bandwidth_bytes_s / 2)
    half = replace(half, sustained_bandwidth_bytes_s=None)

    for kind in ("copy_on_device", "set"):
        assert times(work_times(one_work(kind), half, source=A100_TABLE)) == (
            "bandwidth",
            pytest.approx(202_000),
            pytest.approx(2_000 + 200_000 / 1.15),
            pytest.approx(2_000 + 200_000 * 1.15),
        )


def test_communication_goes_by_the_link_and_its_band_reaches_to_no_change() -> None:
    fast, slow = (replace(A100_TABLE, name=name, peer_link_bytes_s=rate) for name, rate in (("f", 4e10), ("s", 1e10)))

    assert times(work_times(one_work("communication"), slow, source=fast)) == ("link", 402_000, 102_000, 402_000)
    assert times(work_times(one_work("communication"), fast, source=slow)) == ("link", 27_000, 27_000, 102_000)


def test_communication_over_an_unknown_link_is_taken_as_measured() -> None:
    found = work_times(one_work("communication"), replace(A100_TABLE, name="other", peer_link_bytes_s=None))

    assert times(found)[:2] == ("unchanged", 102_000)


def test_work_of_another_kind_is_unknown() -> None:
    assert work_times(one_work("other"), L4).basis.tolist() == ["unknown"]


def test_without_the_source_only_shapes_tell() -> None:
    recording = Recording()
    recording.work(0, 102_000, "Memcpy DtoD", kind="copy_on_device")

    found = work_times(recording.trace(), L4)

    assert found.basis.tolist() == ["unknown"]
    assert found.notes == ("the device of the recording is unknown, so work without shapes has no prediction",)


def test_another_number_type_on_the_same_device() -> None:
    recording = Recording(Metadata(devices=(A100,)))
    recording.operator(0, 100, "aten::mm", input_shapes=LARGE, input_types=FLOAT)
    recording.launched(10, 200, 60_000_000, "ampere_sgemm_128x128_nn", 1)
    recording.operator(200, 100, "aten::_softmax", input_shapes="[[8192, 8192], [], []]", input_types=FLOAT)
    recording.launched(210, 61_000_000, 300_000, "softmax", 2)
    recording.work(62_000_000, 1_000, "Memcpy HtoD", kind="copy_in")

    found = work_times(recording.trace(), A100_TABLE, precision="bf16")

    assert found.basis.tolist() == ["learned ratio", "same device", "same device"]
    assert 0.03 < found.ns[0] / 60_000_000 < 0.15  # 312 for 19.5 TFLOP/s
    assert found.ns.tolist()[1:] == [300_000, 1_000]


def test_32_bit_convolutions_run_as_tf32_where_they_can() -> None:
    shapes, values = "[[64, 256, 56, 56], [256, 256, 3, 3], []]", '["", "", "", "[1, 1]", "[1, 1]", "[1, 1]"]'
    recording = Recording(Metadata(devices=(Device("0", "Tesla V100-SXM2-16GB"),)))
    recording.operator(0, 100, "aten::conv2d", input_shapes=shapes, input_types=FLOAT, input_values=values)
    recording.launched(10, 200, 20_000_000, "kernel", 1)

    default, wide = (work_times(recording.trace(), A100_TABLE, precision=one) for one in (None, "fp32"))

    assert default.notes == (
        "convolutions of 32-bit numbers run as TF32 on A100-SXM4-80GB, as PyTorch does by default",
    )
    assert wide.notes == ()
    assert default.ns[0] != wide.ns[0]


def test_each_device_has_its_own_source() -> None:
    recording = Recording(Metadata(devices=(A100, Device("1", "NVIDIA L4"))))
    for device in ("0", "1", "2"):
        recording.work(0, 102_000, "Memset", kind="set", device=device)

    assert work_times(recording.trace(), L4).basis.tolist() == ["bandwidth", "same device", "unknown"]


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "least_known"),
    [
        ("v100_resnet50_workers0", 1.0),
        ("a100_cudagraph_rank0of16", 1.0),
        ("mi300x_resnet_checkpoint_rank0of8", 1.0),
        ("h100_qwen_chat", 1.0),
        ("ranks128_sampled/rank0", 0.7),  # says nothing of its device
    ],
)
def test_real_traces(name: str, least_known: float, traces_folder: Path) -> None:
    trace = open_trace(traces_folder / "kineto" / f"{name}.json.gz")

    for target in ("L4", "H100-SXM", "MI300X"):
        found = work_times(trace, named_device(target))
        known = found.basis != "unknown"
        total = found.measured_ns.sum()
        assert set(found.basis.tolist()) <= set(BASES)
        assert found.measured_ns[known].sum() >= least_known * total
        assert np.isfinite([found.ns[known], found.low_ns[known], found.high_ns[known]]).all()
        assert np.isnan(found.ns[~known]).all()
        assert (found.low_ns[known] >= 0).all()
        assert (found.low_ns[known] <= found.ns[known]).all()
        assert (found.ns[known] <= found.high_ns[known]).all()
        same = found.basis == "same device"
        assert np.array_equal(found.ns[same], found.measured_ns[same])
        assert 1e-3 * total < found.ns[known].sum() < 40 * total


def test_shapes_do_not_tell_what_took_implausibly_long() -> None:
    """An unknown device may be 20 times as slow as the target, not more: then the operator did something else."""
    _, operations = operations_of_calls(one_call("aten::add", LARGE, FLOAT, device=None))
    on_l4 = float(operation_times(operations, L4).ns[0])
    recording = Recording(Metadata())
    for number, times_as_long in enumerate((19, 21)):
        recording.operator(number * 1000, 100, "aten::add", input_shapes=LARGE, input_types=FLOAT)
        length = round(times_as_long * on_l4)
        recording.launched(number * 1000 + 10, 10_000_000_000 * number + 200, length, "kernel", number + 1)

    found = work_times(recording.trace(), L4)

    assert found.basis.tolist() == ["shapes", "unknown"]
    assert found.notes[0].startswith("for 52% of the time of operators with shapes the recorded device")


def test_between_makers_what_was_learned_of_the_target_counts_most() -> None:
    """A product that took ten times what it would on the target: the time is far nearer to the target's own model."""
    trace = one_call("aten::mm", LARGE, HALF, device=Device("0", "AMD Instinct MI300X"))
    found = work_times(trace, named_device("H100-SXM"))
    _, operations = operations_of_calls(trace)
    own = operation_times(operations, named_device("H100-SXM")).ns[0]
    apart = abs(np.log(found.measured_ns[0] / own))

    assert found.basis.tolist() == ["wave scaling"]
    assert found.low_ns[0] < found.ns[0] < found.high_ns[0]
    assert abs(np.log(found.ns[0] / own)) < apart / 2
