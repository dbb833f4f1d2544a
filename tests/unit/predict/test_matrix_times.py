"""Times of matrix products: rates, what power carries, learned utilization, and how wide the band is."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from scripts.predictor.model_arrays import arrays_of
from stepscope.machine.devices import device_table, named_device
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_laws import rates_of, unit_of, weight_bytes
from stepscope.predict.matrix_times import MatrixModel, matrix_times, shape_features, shipped_model
from stepscope.predict.operation_times import operation_times
from stepscope.predict.operations import Operations
from stepscope.predict.trace_operations import operations_of_calls
from stepscope.readers import open_trace

BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def products(kind: str, *shapes: tuple[float, float, float, float]) -> Operations:
    """Products of batch, rows, columns and inner."""
    batch, rows, columns, inner = np.array(shapes, np.float64).reshape(-1, 4).T
    count = len(shapes)
    return Operations(
        name=np.full(count, "mm"),
        kind=np.full(count, "matrix"),
        number_type=np.full(count, kind),
        flops=2 * batch * rows * columns * inner,
        bytes=BYTES[kind] * batch * (rows * columns + rows * inner + inner * columns),
        batch=batch,
        rows=rows,
        columns=columns,
        inner=inner,
        is_backward=np.zeros(count, np.bool_),
    )


def constant(utilization: float, width: int) -> BoostedTrees:
    return BoostedTrees(
        baseline=float(np.log(utilization)),
        roots=np.array([], np.int32),
        features=np.array([], np.int16),
        thresholds=np.array([]),
        left=np.array([], np.int32),
        values=np.array([]),
        depth=0,
        width=width,
    )


MODEL = MatrixModel(
    trees={"vector": constant(0.5, 27), "tensor": constant(0.5, 20)},
    shortest={unit: np.array([1.0, 32.0, 32.0, 32.0]) for unit in ("vector", "tensor")},
    longest={unit: np.array([1.0, 8192.0, 8192.0, 8192.0]) for unit in ("vector", "tensor")},
    bands={kind: np.array([[[0.8, 1.25]] * 4, [[0.5, 2.0]] * 4]) for kind in ("fp32", "bf16", "fp8")},
)
A100 = replace(named_device("A100-SXM4-80GB"), sustained_flops_s={}, sustained_bandwidth_bytes_s=None)
LARGE = (1, 4096, 4096, 4096)


def test_no_products_take_no_times() -> None:
    assert matrix_times(products("bf16"), A100).ns.tolist() == []


def test_time_is_the_start_and_the_base_over_the_utilization() -> None:
    """312 TFLOP/s and a utilization of a half: 2 * 4096^3 operations take 881.0 us, and the start 1.5."""
    times = matrix_times(products("bf16", LARGE), A100, MODEL)

    assert times.ns.tolist() == [pytest.approx(1_500 + 2 * 2 * 4096**3 / 312e3)]
    assert (times.low_ns / times.ns).tolist() == [0.5]
    assert (times.high_ns / times.ns).tolist() == [2.0]
    assert times.basis.tolist() == ["learned"]


@pytest.mark.parametrize(
    ("kind", "shape", "factor", "widening"),
    [
        ("bf16", (1, 4096, 4096, 4095), 2.0, 1.5),
        ("bf16", (1, 4096, 4004, 4096), 2.0, 1.5),
        ("bf16", (1, 4095, 4096, 4096), 1.0, 1.0),
        ("tf32", (1, 4096, 4004, 4096), 1.4, 1.5),
        ("tf32", (1, 4096, 4002, 4096), 2.8, 2.25),
        ("fp32", (1, 4096, 4095, 4095), 1.0, 1.0),
    ],
)
def test_tensor_cores_take_longer_for_lines_that_are_no_multiple_of_16_bytes(
    kind: str, shape: tuple[float, float, float, float], factor: float, widening: float
) -> None:
    times = matrix_times(products(kind, shape), A100, MODEL)

    arithmetic = 2e9 * np.prod(shape) / A100.flops_s[kind]
    assert times.ns.tolist() == [pytest.approx(1_500 + 2 * arithmetic * factor)]
    assert (times.high_ns / times.ns).tolist() == [pytest.approx(2.0 * widening)]


def test_a_sustained_rate_counts_and_narrows_the_band() -> None:
    """Half of what large products reach elsewhere (0.92 of the peak), after far more than half a millisecond."""
    slow = replace(A100, sustained_flops_s={"bf16": 0.46 * 312e12})
    long = (1, 8192, 8192, 8192)
    times = matrix_times(products("bf16", long), slow, MODEL)
    at_peak = matrix_times(products("bf16", long), A100, MODEL)

    arithmetic = 2 * 8192**3 / 312e12
    carried = 0.5 + 0.5 * 0.5e-3 / (arithmetic / 0.5 + 0.5e-3)
    assert times.ns[0] - 1_500 == pytest.approx((at_peak.ns[0] - 1_500) / carried)
    assert (times.low_ns / times.ns).tolist() == [0.8]


def test_the_band_of_short_products_reaches_to_twice_the_time() -> None:
    measured = replace(A100, sustained_flops_s={"bf16": 0.92 * 312e12})
    times = matrix_times(products("bf16", (1, 64, 64, 64), LARGE), measured, MODEL)

    assert (times.high_ns / times.ns).tolist() == [2.0, 1.25]


@pytest.mark.parametrize(
    ("kind", "shape", "device", "factor"),
    [
        ("bf16", LARGE, "A100-SXM4-80GB", 1.0),
        ("fp16", LARGE, "A100-SXM4-80GB", 1.0),
        ("tf32", LARGE, "A100-SXM4-80GB", 1.5),
        ("bf16", (2, 64, 64, 64), "A100-SXM4-80GB", 1.0),
        ("bf16", (16, 64, 64, 64), "A100-SXM4-80GB", 1.5),
        ("bf16", (1, 4, 64, 64), "A100-SXM4-80GB", 1.5),
        ("fp16", LARGE, "V100-SXM2-16GB", 1.0),
        ("fp16", (16, 64, 64, 64), "V100-SXM2-16GB", 1.5),
        ("fp32", LARGE, "V100-SXM2-16GB", 1.0),
        ("fp32", LARGE, "A10", 1.0),
    ],
)
def test_what_no_timing_had_widens_the_band(
    kind: str, shape: tuple[float, float, float, float], device: str, factor: float
) -> None:
    row = replace(named_device(device), sustained_flops_s={}, sustained_bandwidth_bytes_s=None)
    times = matrix_times(products(kind, shape), row, MODEL)

    assert (times.high_ns / times.ns).tolist() == [pytest.approx(2.0 * factor)]
    assert (times.ns / times.low_ns).tolist() == [pytest.approx(2.0 * factor)]


def test_what_cannot_be_said_is_not_said() -> None:
    unknown = replace(products("bf16", LARGE), flops=np.array([np.nan]))
    assert matrix_times(products("bf16", LARGE), named_device("P4"), MODEL).basis.tolist() == ["unknown"]
    assert matrix_times(unknown, A100, MODEL).basis.tolist() == ["unknown"]
    assert np.isnan(matrix_times(unknown, A100, MODEL).high_ns).tolist() == [True]


@pytest.mark.parametrize("device", ["MI300X", "Gaudi3", "TPU v4"])
def test_devices_without_timings_get_the_roofline_and_its_wide_band(device: str) -> None:
    row = named_device(device)
    times = matrix_times(products("bf16", LARGE), row, MODEL)

    rate = row.sustained_flops_s.get("bf16") or row.flops_s["bf16"]
    assert times.basis.tolist() == ["roofline"]
    assert times.ns.tolist() == [pytest.approx(2 * 4096**3 / rate / 0.7 * 1e9)]
    assert (times.high_ns / times.low_ns).tolist() == [pytest.approx(9.0)]


@pytest.mark.parametrize("capability", [None, "newest", "nan", "1e3", "-9.0", ""])
def test_a_device_of_no_readable_capability_gets_the_roofline(capability: str | None) -> None:
    row = replace(A100, capability=capability, cache_bytes=None, clock_mhz=None, power_w=None)
    assert matrix_times(products("bf16", LARGE), row, MODEL).basis.tolist() == ["roofline"]


def test_a_device_of_which_little_is_known() -> None:
    row = replace(A100, cache_bytes=None, clock_mhz=None, power_w=None)
    times = matrix_times(products("fp32", LARGE), row)
    assert times.basis.tolist() == ["learned"]
    assert times.ns[0] == pytest.approx(2 * 4096**3 / 19.5e3, rel=0.5)


def test_unknown_dimensions_get_the_roofline() -> None:
    known = products("bf16", LARGE)
    assert matrix_times(replace(known, rows=np.array([np.nan])), A100, MODEL).basis.tolist() == ["roofline"]


def test_power_carries_half_of_a_t4s_rate_and_all_of_a_v100s() -> None:
    t4 = replace(named_device("T4"), sustained_flops_s={})
    v100 = replace(named_device("V100-SXM2-16GB"), sustained_flops_s={})
    l4 = replace(named_device("L4"), sustained_flops_s={})

    assert rates_of(t4, "fp32").carried == pytest.approx(70 * 53 / 8100)
    assert rates_of(v100, "fp32").carried == 1.0
    assert rates_of(l4, "fp32").carried == pytest.approx(72 * 189 / (0.9 * 30300))


def test_multiprocessors_of_128_lanes_issue_other_instructions_too() -> None:
    h100 = named_device("H100-SXM")
    peak = h100.flops_s["fp32"]

    assert rates_of(replace(h100, sustained_flops_s={}), "fp32").peak == pytest.approx(0.9 * peak)
    assert rates_of(replace(h100, sustained_flops_s={"fp32": 0.85 * peak}), "fp32").peak == pytest.approx(peak)
    assert rates_of(A100, "fp32").peak == A100.flops_s["fp32"]


def test_amds_products_take_the_rate_that_was_measured_there() -> None:
    mi210 = replace(named_device("MI210"), sustained_flops_s={"fp32": 30e12})
    times = matrix_times(products("fp32", (1, 8192, 8192, 8192)), mi210)

    assert times.ns[0] == pytest.approx(2 * 8192**3 / 30e3, rel=0.1)
    assert times.basis.tolist() == ["roofline"]


def test_the_rate_of_another_type_on_tensor_cores_tells_its_share() -> None:
    measured = replace(A100, sustained_flops_s={"bf16": 0.5 * 312e12})

    assert rates_of(measured, "tf32").carried == pytest.approx(0.5 / 0.92)
    assert rates_of(measured, "tf32").is_sustained
    assert not rates_of(measured, "fp32").is_sustained


def test_the_units_of_number_types() -> None:
    names = ("P100-PCIe-16GB", "V100-SXM2-16GB", "H100-SXM")
    found = {name: [unit_of(named_device(name), kind) for kind in ("fp32", "fp16", "bf16")] for name in names}
    assert found == {
        "P100-PCIe-16GB": ["vector", "vector", None],
        "V100-SXM2-16GB": ["vector", "tensor", None],
        "H100-SXM": ["vector", "tensor", "tensor"],
    }
    assert unit_of(named_device("MI300X"), "bf16") is None


def test_features_of_a_product_that_fills_the_device() -> None:
    """108 tiles of 128 x 128 on 108 multiprocessors: one wave without a rest, tiles without padding."""
    operations = products("fp32", (1, 128 * 9, 128 * 12, 1024))
    features = shape_features(operations, A100, rates_of(A100, "fp32"), "vector")

    assert features.shape == (1, 27)
    assert features[0, 3:6].tolist() == [1.0, 1.0, 0.0]


def test_only_a_products_own_weight_is_a_weight() -> None:
    assert weight_bytes(products("bf16", (1, 8, 16, 32), (4, 8, 16, 32))).tolist() == [2 * 16 * 32, 0.0]


def test_the_shipped_model_is_small_and_stays_what_it_is() -> None:
    folder = files("stepscope") / "data"
    sizes = [len((folder / name).read_bytes()) for name in ("matrix_times.npz", "memory_times.npz")]
    assert sum(sizes) < 5e6
    arrays = arrays_of(shipped_model())
    again = MatrixModel.from_arrays(arrays)
    assert {name: array.tolist() for name, array in arrays_of(again).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    ("device", "timed_ns"),
    [("A100-SXM4-80GB", 539_480), ("L40S", 624_896), ("H200-SXM", 168_069), ("B200-SXM", 90_226)],
)
def test_the_shipped_model_knows_what_it_learned_from(device: str, timed_ns: float) -> None:
    """4096 x 4096 x 4096 in bf16, as aiconfigurator timed it."""
    assert matrix_times(products("bf16", LARGE), named_device(device)).ns[0] == pytest.approx(timed_ns, rel=0.1)


def test_every_device_and_odd_shape_has_an_ordered_band() -> None:
    """Also where lengths are absurd."""
    shapes = [(1, 1, 1, 1), (1, 3, 70_000, 5), (4096, 7, 7, 7), (1, 2.0**40, 2.0**40, 2.0**40), (1, 1e18, 1e18, 1e18)]
    for device in device_table():
        for kind in BYTES:
            times = operation_times(products(kind, *shapes), device)
            known = times.basis != "unknown"
            assert known.all() == (kind in device.flops_s)
            assert (times.low_ns[known] <= times.ns[known]).all()
            assert (times.ns[known] <= times.high_ns[known]).all()
            assert np.isfinite(times.high_ns[known]).all()


def test_more_work_takes_longer() -> None:
    """A hundred times the rows on every device that has such units."""
    for device in device_table():
        few, many = operation_times(products("fp16", (1, 512, 4096, 4096), (1, 51_200, 4096, 4096)), device).ns
        if "fp16" in device.flops_s:
            assert many > 20 * few


@pytest.mark.traces
def test_products_of_a_recorded_h100_which_no_timing_was_taken_on(traces_folder: Path) -> None:
    """Half of its 168 products of 10 us and more are predicted within 7 %, and all lie within the band."""
    trace = open_trace(traces_folder / "kineto" / "h100_qwen_chat.json.gz")
    called, operations = operations_of_calls(trace)
    launches = trace.launches.with_row_index("launch").select(pl.col("launch").cast(pl.Int64), "operator")
    work = trace.device_work.select(pl.col("launch").cast(pl.Int64), "duration_ns").join(launches, on="launch")
    measured = dict(work.group_by("operator").agg(pl.col("duration_ns").sum()).iter_rows())
    took = np.array([measured.get(row, 0) for row in called.tolist()], np.float64)
    long = (operations.kind == "matrix") & (took >= 10_000)
    times = matrix_times(operations.select(long), named_device("H100-SXM"))

    assert long.sum() == 168
    assert np.median(np.abs(times.ns / took[long] - 1)) < 0.07
    assert ((times.low_ns <= took[long]) & (took[long] <= times.high_ns)).all()
