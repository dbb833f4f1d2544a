"""Operator calls described free of any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.operation_times import operation_times
from stepscope.predict.operations import KINDS, Operations, OperationTimes
from stepscope.predict.trace_operations import CalledOperations, described, is_backward, operations_of_calls
from stepscope.readers import open_trace
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows
from tests.unit.recording import Recording

FLOAT, HALF = '"float"', '"c10::BFloat16"'


def one(name: str, shapes: str, types: str, values: str | None = None) -> Operations:
    recording = Recording()
    recording.operator(0, 10, name, input_shapes=shapes, input_types=types, input_values=values)
    return described(recording.trace(), np.array([0]))


def loops(found: Operations) -> tuple[float, ...]:
    return found.batch[0], found.rows[0], found.columns[0], found.inner[0]


def types(count: int, name: str = FLOAT) -> str:
    return f"[{', '.join([name] * count)}]"


def test_empty() -> None:
    rows, operations = operations_of_calls(Trace.from_tables({}))

    assert len(rows) == len(operations) == 0


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", "[[8, 4], [4, 2]]", (1, 8, 2, 4)),
        ("aten::bmm", "[[3, 8, 4], [3, 4, 2]]", (3, 8, 2, 4)),
        ("aten::addmm", "[[2], [8, 4], [4, 2]]", (1, 8, 2, 4)),
        ("aten::baddbmm", "[[3, 8, 2], [3, 8, 4], [3, 4, 2]]", (3, 8, 2, 4)),
        ("aten::linear", "[[5, 8, 4], [2, 4], [2]]", (1, 40, 2, 4)),
        ("aten::matmul", "[[5, 8, 4], [4, 2]]", (1, 40, 2, 4)),
        ("aten::matmul", "[[3, 1, 8, 4], [7, 4, 2]]", (21, 8, 2, 4)),
        ("aten::mv", "[[8, 4], [4]]", (1, 8, 1, 4)),
        ("aten::native_layer_norm", "[[6, 5, 4], [], [4], [4]]", (1, 30, 4, 1)),
        ("aten::native_batch_norm", "[[6, 5, 4, 3], [5], [5], [5], [5]]", (1, 5, 72, 1)),
        ("aten::_softmax", "[[6, 5, 4], [], []]", (1, 30, 4, 1)),
        ("aten::relu_", "[[6, 5]]", (1, 1, 30, 1)),
        ("aten::add", "[[6, 5], [6, 5], []]", (1, 1, 30, 1)),
        ("aten::add", "[[6, 1], [5], []]", (1, 30, 1, 1)),
        ("aten::copy_", "[[6, 5], [6, 5], []]", (1, 1, 30, 1)),
        ("aten::copy_", "[[6, 5, 4], [6, 5, 4], []]", (1, 120, 1, 1)),
        ("aten::mm", "[[0, 4], [4, 2]]", (1, 0, 2, 4)),
    ],
)
def test_dimensions(name: str, shapes: str, expected: tuple[float, ...]) -> None:
    found = one(name, shapes, types(5))

    assert loops(found) == expected


def test_softmax_over_another_dimension() -> None:
    found = one("aten::_softmax", "[[6, 5, 4], [], []]", types(3), '["", "1", "False"]')

    assert loops(found) == (1, 24, 5, 1)


def test_a_convolution_is_the_product_that_it_is_alike() -> None:
    """16 channels in 2 groups, 32 out, 3 x 3, stride 2: 8 x 8 points of each of 4 images."""
    found = one(
        "aten::cudnn_convolution",
        "[[4, 16, 16, 16], [32, 8, 3, 3], [], [], [], [], [], [], []]",
        types(2),
        '["", "", "[1, 1]", "[2, 2]", "[1, 1]", "2", "False", "False", "True"]',
    )

    assert loops(found) == (1, 256, 32, 72)
    assert found.flops[0] == 2 * 256 * 32 * 72
    assert found.kind.tolist() == ["convolution"]


def test_a_convolutions_backward_is_two_products() -> None:
    found = one(
        "aten::convolution_backward",
        "[[4, 32, 8, 8], [4, 16, 16, 16], [32, 16, 3, 3]]",
        types(3),
        '["", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]',
    )

    assert loops(found) == (2, 256, 32, 144)
    assert found.flops[0] == 2 * 2 * 256 * 32 * 144
    assert found.is_backward.tolist() == [True]


def test_attention() -> None:
    found = one(
        "aten::_scaled_dot_product_flash_attention",
        "[[2, 12, 64, 32], [2, 12, 96, 32], [2, 12, 96, 32], [], []]",
        types(3, HALF),
        '["", "", "", "0.", "False"]',
    )

    assert loops(found) == (24, 64, 96, 32)
    assert found.flops[0] == 4 * 24 * 64 * 96 * 32
    assert (found.kind[0], found.number_type[0]) == ("attention", "bf16")


@pytest.mark.parametrize(
    ("name", "shapes", "kind", "moved"),
    [
        ("aten::_foreach_add_", "[[[8, 4], [2]], [[8, 4], [2]], []]", "optimizer", 4 * 34 * 3),
        ("aten::_foreach_mul_", "[[[8, 4], [2]], []]", "optimizer", 4 * 34 * 2),
        ("aten::_foreach_zero_", "[[[8, 4], [2]]]", "optimizer", 4 * 34),
        ("aten::_foreach_norm", "[[[8, 4], [2]], []]", "optimizer", 4 * 34),
        # Parameters, gradients, two moments: all read, all but the gradients written.
        ("aten::_fused_adamw_", "[[[8]], [[8]], [[8]], [[8]], [], [[]]]", "optimizer", 4 * (33 + 25)),
        ("aten::cat", "[[[8, 4], [2, 4]], []]", "copy", 4 * 40 * 2),
        ("aten::native_dropout", "[[8, 4], [], []]", "elementwise", 4 * 64 + 32),
        ("triton_poi_fused_add_0", "[[8, 4], [8, 4], []]", "elementwise", 4 * 64),
        ("triton_red_fused_sum_1", "[[8, 4], [8], []]", "reduction", 4 * 40),
    ],
)
def test_traffic_of_lists_and_compiled_kernels(name: str, shapes: str, kind: str, moved: int) -> None:
    found = one(name, shapes, types(5))

    assert found.kind.tolist() == [kind]
    assert found.bytes.tolist() == [moved]
    assert found.flops.tolist() == [0]


def test_a_table_of_embeddings_is_read_no_more_than_once() -> None:
    found = one("aten::index_select", "[[10, 4], [], [30]]", f"[{FLOAT}, {FLOAT}, {FLOAT}]", '["", "0", ""]')

    assert found.bytes.tolist() == [4 * 120 + 4 * 40 + 4 * 30]


def test_unknown_operators_and_damaged_shapes() -> None:
    for name, shapes in (("my::operator", "[[8]]"), ("aten::mm", "[[8, 4], ["), ("aten::mm", "[[8, 4], [5, 2]]")):
        found = one(name, shapes, types(2))
        assert found.kind.tolist() == [""]
        assert np.isnan([found.flops[0], found.bytes[0], found.rows[0]]).all()


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::mm", f"[[{2**61}, {2**61}], [{2**61}, {2**61}]]"),
        ("aten::relu", f"[[{2**40}, {2**40}]]"),
        ("aten::_foreach_add_", f"[[[{2**61}, {2**61}]], [[{2**61}]]]"),
        ("aten::convolution_backward", f"[[{2**61}, 1, 1], [1, 1, {2**61}], [1, 1, 1]]"),
        ("aten::native_batch_norm", f"[[{2**61}, 0, {', '.join([str(2**61)] * 40)}]]"),
        ("aten::relu", "[[-5, 3]]"),
        ("aten::relu", f"[[{10**30}]]"),
    ],
)
def test_hostile_shapes_are_unknown(name: str, shapes: str) -> None:
    found = one(name, shapes, types(3), '["", "", "", "", "", "", "", "False", "", "", "[True, True]"]')

    assert np.isnan(found.bytes).all() or (found.bytes >= 0).all()
    assert not np.isinf([found.flops, found.bytes, found.rows, found.columns]).any()


def test_long_names_are_cut() -> None:
    assert one("aten::" + "x" * 10_000, "[[4]]", types(1)).name.tolist() == ["x" * 100]


def test_backward_by_ancestry_and_by_name() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::mm")
    recording.operator(20, 30, "autograd::engine::evaluate_function: MmBackward0")
    recording.operator(22, 20, "MmBackward0")
    recording.operator(24, 10, "aten::mm")
    recording.operator(60, 10, "aten::_softmax_backward_data")

    assert is_backward(recording.trace()).tolist() == [False, True, True, True, True]


def launched(**more: Any) -> Trace:
    recording = Recording()
    for number in (1, 2, 3):
        begin = 100 * number
        recording.operator(begin, 50, "aten::mm", input_shapes="[[8, 4], [4, 2]]", input_types=types(2))
        if number != 2:
            recording.launched(begin + 10, begin + 20, 30, more.get("kernel", "kernel"), number)
    return recording.trace()


def test_only_calls_that_launched_work() -> None:
    rows, operations = operations_of_calls(launched())

    assert rows.tolist() == [0, 2]
    assert operations.name.tolist() == ["mm", "mm"]
    assert operations.number_type.tolist() == ["fp32", "fp32"]


def test_tf32_by_the_kernels_name() -> None:
    _, operations = operations_of_calls(launched(kernel="cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4"))

    assert operations.number_type.tolist() == ["tf32", "tf32"]


@pytest.mark.traces
@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "h100_qwen_chat", "mi300x_resnet_checkpoint_rank0of8"])
def test_products_of_real_traces_have_the_dimensions_of_their_arithmetic(name: str, traces_folder: Path) -> None:
    trace = open_trace(traces_folder / "kineto" / f"{name}.json.gz")

    _, found = operations_of_calls(trace)

    products = found.select(np.isin(found.kind, ("matrix", "convolution")) & np.isfinite(found.flops))
    assert len(products) > 100
    assert set(found.kind.tolist()) <= {*KINDS, ""}
    arithmetic = 2 * products.batch * products.rows * products.columns * products.inner
    padded = products.flops < arithmetic  # few channels, in 16 bits
    assert np.array_equal(products.flops[~padded], arithmetic[~padded])
    assert set(products.kind[padded].tolist()) <= {"convolution"}


def test_distinct_operations_are_predicted_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(operations: Operations, device: DevicePeaks) -> OperationTimes:
        asked.append(len(operations))
        return operation_times(operations, device)

    monkeypatch.setattr("stepscope.predict.trace_operations.operation_times", counted)
    trace = launched()
    device = named_device("L4")
    found = [CalledOperations.of(trace).times_on(device) for _ in range(2)]

    assert asked == [1]  # both calls are alike
    alone = operation_times(operations_of_calls(trace)[1], device)
    for name in ("ns", "low_ns", "high_ns", "basis"):
        assert [getattr(each, name).tolist() for each in found] == [getattr(alone, name).tolist()] * 2


def test_the_operations_of_a_trace_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[Trace] = []

    def counted(trace: Trace) -> tuple[Rows, Operations]:
        times.append(trace)
        return operations_of_calls(trace)

    monkeypatch.setattr("stepscope.predict.trace_operations.operations_of_calls", counted)
    trace = launched()
    for precision in (None, "bf16", None):
        assert CalledOperations.of(trace, precision).cast.changed.tolist() == [precision is not None] * 2
    assert len(times) == 1
