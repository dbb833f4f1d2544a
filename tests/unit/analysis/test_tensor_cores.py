"""Which operators tensor cores could work for, and whether they did."""

from __future__ import annotations

import pytest

from stepscope.analysis.conversions import TENSOR_CORE_CALLS as CALL_SCHEMA
from stepscope.analysis.conversions import TENSOR_CORE_TABLE as TABLE_SCHEMA
from stepscope.analysis.conversions import eligible_calls, tensor_core_table
from stepscope.analysis.operators import is_eligible
from stepscope.trace import Trace, Window
from tests.unit.recording import Recording

FP16 = "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn"
FP32 = "ampere_sgemm_128x64_nn"
SHAPES = {"input_shapes": "[[8, 4], [4, 2]]", "input_types": '["float", "float"]'}


def some_products() -> Trace:
    """Two products on tensor cores with a split's reduction each, one in FP32, one graph's, one copy, one sum."""
    recording = Recording()
    for number in range(2):
        start = 100 * number
        recording.operator(start, 20, "aten::linear")
        recording.operator(start + 5, 10, "aten::mm", **SHAPES)
        recording.launched(start + 6, start + 20, 30, FP16, 10 + 2 * number)
        recording.launched(start + 9, start + 50, 5, "void cublasLt::splitKreduce_kernel<32, 16>", 11 + 2 * number)
    recording.operator(200, 20, "aten::mm", **SHAPES)
    recording.launched(205, 230, 50, FP32, 20)
    recording.operator(300, 20, "aten::sum")
    recording.launched(305, 330, 40, "reduce_kernel<512, float>", 21)
    recording.launched(350, 400, 7, FP32, 22)
    recording.operator(360, 20, "aten::convolution_backward")
    recording.launched(365, 420, 9, "miopenSp3AsmConv_v30_3_1_gfx94x", 23)
    recording.work(440, 3, "Memcpy HtoD", kind="copy_in")
    return recording.trace()


def test_empty() -> None:
    assert eligible_calls(Trace.from_tables({})).schema == CALL_SCHEMA
    assert tensor_core_table(Trace.from_tables({})).schema == TABLE_SCHEMA


def test_calls() -> None:
    calls = eligible_calls(some_products())

    assert calls.schema == CALL_SCHEMA
    columns = ["row", "operator", "start_ns", "device_ns", "matrix_ns", "tensor_core_ns", "precision", "used"]
    assert calls.select(columns).rows() == [
        (1, "aten::mm", 20, 35, 30, 30, "fp16", True),
        (3, "aten::mm", 120, 35, 30, 30, "fp16", True),
        (4, "aten::mm", 230, 50, 50, 0, "fp32", False),
        (None, None, 400, 7, 7, 0, "fp32", False),
        (6, "aten::convolution_backward", 420, 9, 9, 0, None, None),
    ]
    assert calls["kernel"].to_list() == [FP16, FP16, FP32, FP32, "miopenSp3AsmConv_v30_3_1_gfx94x"]
    assert eligible_calls(some_products(), window=Window(100, 300))["row"].to_list() == [3, 4]


def test_table() -> None:
    table = tensor_core_table(some_products())

    assert table.schema == TABLE_SCHEMA
    assert table.select("operator", "precision", "used", "calls", "device_ns", "tensor_core_ns").rows() == [
        ("aten::mm", "fp16", True, 2, 70, 60),
        ("aten::mm", "fp32", False, 1, 50, 0),
        ("aten::convolution_backward", None, None, 1, 9, 0),
        (None, "fp32", False, 1, 7, 0),
    ]
    assert table["share"].to_list() == pytest.approx([70 / 136, 50 / 136, 9 / 136, 7 / 136])


@pytest.mark.parametrize(
    ("name", "eligible"),
    [
        ("aten::mm", True),
        ("aten::addmm", True),
        ("aten::_scaled_mm", True),
        ("aten::cudnn_convolution_backward_weight", True),
        ("aten::convolution_backward", True),
        ("aten::_flash_attention_forward", True),
        ("aten::_scaled_dot_product_efficient_attention_backward", True),
        ("aten::_cudnn_rnn", True),
        ("aten::mul", False),
        ("aten::cudnn_batch_norm", False),
        ("aten::max_pool2d", False),
        ("aten::mm_of_mine", False),
    ],
)
def test_eligible_operators(name: str, eligible: bool) -> None:
    assert is_eligible(name) is eligible
