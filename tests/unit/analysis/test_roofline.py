"""What operators reached of what their device allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope.analysis.roofline import (
    CALL_SCHEMA,
    MEASURED_WRONG,
    TABLE_SCHEMA,
    device_peaks,
    peaks_or_bounds,
    roofline_calls,
    roofline_table,
)
from stepscope.readers import open_trace
from stepscope.trace import Metadata, Trace, Window
from stepscope.trace.metadata import Device
from tests.unit.recording import Recording

A100 = Device("0", "NVIDIA A100-SXM4-80GB")  # 312 TFLOP/s bf16, 156 tf32, 19.5 fp32; 2039 GB/s; 40 MiB of cache
HALF = '["c10::BFloat16", "c10::BFloat16"]'
FLOAT = '["float", "float"]'
LARGE = "[[4096, 4096], [4096, 4096]]"  # 137,438,953,472 FLOPs, 100,663,296 bytes in bf16
TF32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>"


def one_call(
    name: str, shapes: str, types: str, device_ns: int, kernel: str = "kernel", device: Device | None = A100
) -> Trace:
    recording = Recording(Metadata(devices=(device,) if device else ()))
    recording.operator(0, 100, name, input_shapes=shapes, input_types=types)
    recording.launched(10, 200, device_ns, kernel, 1)
    return recording.trace()


def row(trace: Trace) -> dict[str, object]:
    [only] = roofline_table(trace).rows(named=True)
    return only


def test_empty() -> None:
    assert roofline_calls(Trace.from_tables({})).schema == CALL_SCHEMA
    assert roofline_table(Trace.from_tables({})).schema == TABLE_SCHEMA


def test_a_large_product_is_bound_by_arithmetic() -> None:
    found = row(one_call("aten::mm", LARGE, HALF, 600_000))

    assert found == {
        "operator": "aten::mm",
        "input_shapes": LARGE,
        "input_types": HALF,
        "device": "0",
        "work_kind": "matrix",
        "number_type": "bf16",
        "calls": 1,
        "device_ns": 600_000,
        "device_share": 1.0,
        "flops": 137_438_953_472,
        "bytes": 100_663_296,
        "tflop_per_s": pytest.approx(229.064922),
        "gb_per_s": pytest.approx(167.772160),
        "limit": "compute",
        "share": pytest.approx(229.064922 / 312),
        "kernel": "kernel",
        "compute_share": pytest.approx(229.064922 / 312),
        "bandwidth_share": pytest.approx(167.772160 / 2039),
        "peaks": "A100-SXM4-80GB",
        "why": "close to what the device can do",
        "better": None,
    }


@pytest.mark.parametrize(
    ("kernel", "device_ns", "least", "name"),
    [
        ("Cijk_Ailk_MT128x128x32_ISA942", 1_000_000, 1307.4, "MI300X or MI325X"),
        ("igemm_fwd_gtcx_nhwc", 100_000_000, 92.3, "MI100 to MI355X"),
        ("igemm_fwd_gtcx_nhwc", 400_000, 1307.4, "MI300X to MI355X"),  # the others could not
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", 10_000_000, 5.5, None),
        ("kernel", 1_000_000, None, None),
    ],
)
def test_the_least_peaks_of_a_device_without_a_name(
    kernel: str, device_ns: int, least: float | None, name: str | None
) -> None:
    trace = one_call("aten::mm", LARGE, HALF, device_ns, kernel, None)

    bounds = peaks_or_bounds(trace, "0")

    assert device_peaks(trace, "0") is None
    assert (None if bounds is None else bounds.name) == name or "P4" in str(bounds)
    if bounds is not None and name is not None:
        assert bounds.flops_s["bf16"] == pytest.approx(least * 1e12 if least else 0)
        [row] = roofline_table(trace, bounds=True).rows(named=True)
        assert row["compute_share"] == pytest.approx(137.438953472e9 / device_ns / (least or 1) / 1e3)
    [without] = roofline_table(trace).rows(named=True)
    assert (without["limit"], without["peaks"]) == (None, None)


def test_a_named_device_outside_of_the_table_is_not_guessed() -> None:
    trace = one_call("aten::mm", LARGE, HALF, 10**6, "Cijk_ISA942", Device("0", "Simulated Device 80GB"))

    assert peaks_or_bounds(trace, "0") is None


def test_names_of_the_table_are_known_like_those_of_drivers() -> None:
    assert device_peaks(one_call("aten::mm", LARGE, HALF, 10**6, device=Device("0", "MI300X")), "0") is not None


def test_element_wise_work_is_bound_by_memory() -> None:
    found = row(one_call("aten::add", "[[8192, 8192], [8192, 8192]]", FLOAT, 500_000))

    assert (found["limit"], found["flops"], found["bytes"]) == ("memory", 0, 805_306_368)
    assert found["tflop_per_s"] is None
    assert found["gb_per_s"] == pytest.approx(1610.612736)
    assert found["share"] == pytest.approx(1610.612736 / 2039)


@pytest.mark.parametrize(
    ("kernel", "number_type", "share"),
    [("ampere_sgemm_128x64_nn", "fp32", 13.7438953472 / 19.5), (TF32, "tf32", 13.7438953472 / 156)],
)
def test_the_kernel_tells_tf32(kernel: str, number_type: str, share: float) -> None:
    found = row(one_call("aten::mm", LARGE, FLOAT, 10_000_000, kernel))

    assert (found["number_type"], found["share"]) == (number_type, pytest.approx(share))


def test_no_share_for_an_algorithm_with_fewer_operations() -> None:
    found = row(one_call("aten::mm", LARGE, FLOAT, 4_000_000, "winograd_nonfused::winogradForwardData4x4"))

    assert (found["limit"], found["share"]) == (None, None)
    assert found["tflop_per_s"] == pytest.approx(34.359738)


def test_small_tensors_may_come_from_the_cache() -> None:
    shapes = "[[1024, 1024], [1024, 1024]]"  # 12,582,912 bytes: 6171 ns from memory
    assert row(one_call("aten::add", shapes, FLOAT, 5_000))["limit"] == "cache"
    assert row(one_call("aten::add", shapes, FLOAT, 5_000))["share"] is None
    assert row(one_call("aten::add", shapes, FLOAT, 7_000))["limit"] == "memory"
    large = "[[8192, 8192], [8192, 8192]]"  # 394,951 ns from memory, 374,382 ns without what the cache may hold
    assert row(one_call("aten::add", large, FLOAT, 370_000))["limit"] == "cache"
    too_fast = row(one_call("aten::add", large, FLOAT, 300_000))
    assert (too_fast["limit"], too_fast["share"]) == ("memory", pytest.approx(394951.6 / 300_000))


@pytest.mark.parametrize("device", [None, Device("0", "Simulated Device 80GB"), Device("0", "Tesla V100-SXM2-16GB")])
def test_without_a_peak_there_is_no_share(device: Device | None) -> None:
    found = row(one_call("aten::mm", LARGE, HALF, 600_000, device=device))  # the V100 has no bf16

    assert (found["limit"], found["share"]) == (None, None)
    assert found["tflop_per_s"] == pytest.approx(229.064922)


def test_work_counts_for_the_operator_that_launched_it() -> None:
    recording = Recording(Metadata(devices=(A100,)))
    recording.operator(0, 100, "aten::linear", input_shapes=LARGE, input_types=HALF)
    recording.operator(10, 50, "aten::mm", input_shapes=LARGE, input_types=HALF)
    recording.launched(20, 200, 500_000, "gemm", 1)
    recording.launched(30, 600_000, 50_000, "splitKreduce", 2)
    recording.launch(40, 5, 3, name="cudaMemcpyAsync", kind="copy")
    recording.work(700_000, 900_000, "Memcpy HtoD", 3, kind="copy_in")
    recording.operator(200, 10, "mine::operator")
    recording.launched(205, 800_000, 50_000, "mine", 4)
    recording.launched(300, 900_000, 50_000, "alone", 5)
    calls = roofline_calls(recording.trace())

    assert calls.select("row", "operator", "device_ns", "works", "kernel", "limit").rows() == [
        (1, "aten::mm", 550_000, 2, "gemm", "compute"),
        (2, "mine::operator", 50_000, 1, "mine", None),
    ]
    assert calls["attainable_ns"].to_list() == [pytest.approx(440_509.466), None]
    assert roofline_calls(recording.trace(), window=Window(100, 300))["operator"].to_list() == ["mine::operator"]
    table = roofline_table(recording.trace())
    assert table["device_share"].to_list() == [pytest.approx(550 / 600), pytest.approx(50 / 600)]


def test_devices_that_are_alike_need_not_have_the_same_numbers() -> None:
    alike = Recording(Metadata(devices=(Device("0", "NVIDIA H200"), Device("1", "NVIDIA H200")))).trace()
    different = Recording(Metadata(devices=(Device("0", "NVIDIA H200"), Device("1", "Tesla T4")))).trace()

    found = device_peaks(alike, "9")
    assert found is not None
    assert found.name == "H200-SXM"
    assert device_peaks(different, "9") is None
    exact = device_peaks(different, "1")
    assert exact is not None
    assert exact.name == "T4"


@pytest.mark.traces
@pytest.mark.parametrize(
    "name", ["v100_resnet50_workers4", "h100_owlv2", "mi300x_compiled_triton", "v100_ddp_rank1of2"]
)
def test_nothing_real_is_faster_than_its_peak(name: str) -> None:
    folder = os.environ.get("STEPSCOPE_TRACES")
    if not folder:
        pytest.skip("STEPSCOPE_TRACES names no folder of real traces")
    share = roofline_table(open_trace(Path(folder) / "kineto" / f"{name}.json.gz"))["share"].drop_nulls()

    assert share.len() >= 3
    assert share.filter(share > MEASURED_WRONG).to_list() == []


@pytest.mark.traces
def test_a_product_of_a_real_trace() -> None:
    folder = os.environ.get("STEPSCOPE_TRACES")
    if not folder:
        pytest.skip("STEPSCOPE_TRACES names no folder of real traces")
    table = roofline_table(open_trace(Path(folder) / "kineto" / "h100_qwen_chat.json.gz"))

    [found] = table.filter(table["input_shapes"] == "[[8944, 1024], [1024, 2816]]").rows(named=True)

    # Summed by hand from the file: 48 calls, 96 works; 2 * 8944 * 1024 * 2816 operations each.
    assert (found["calls"], found["device_ns"], found["flops"]) == (48, 4_055_251, 51_581_550_592)
    assert found["tflop_per_s"] == pytest.approx(610.5452975)


def test_the_peaks_that_a_trace_tells_count_where_the_device_is_unknown() -> None:
    told = Device("0", "Unheard-of accelerator", peak_flops_s=918e12, bandwidth_bytes_s=1638e9)
    partly = Device("1", "Unheard-of accelerator", peak_flops_s=918e12)
    known = Device("2", "NVIDIA H100 80GB HBM3", peak_flops_s=1.0, bandwidth_bytes_s=1.0)
    trace = Trace.from_tables({}, Metadata(devices=(told, partly, known)))

    peaks = device_peaks(trace, "0")

    assert peaks is not None
    assert (peaks.flops_s, peaks.bandwidth_bytes_s, peaks.source) == ({"bf16": 918e12}, 1_638_000_000_000, "the trace")
    assert device_peaks(trace, "1") is None
    table = device_peaks(trace, "2")
    assert table is not None
    assert table.bandwidth_bytes_s > 10**12
