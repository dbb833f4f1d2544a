"""FLOPs and bytes of operators, held against PyTorch's own counter on operators that really ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.analysis.work import Work, broadcast, call_of
from stepscope.analysis.work_formulas import WORK_SCHEMA, work_of, work_of_operators
from stepscope.readers import open_trace
from stepscope.trace import Trace
from tests.unit.recording import Recording

FLOAT, HALF, LONG = '"float"', '"c10::Half"', '"long int"'


def worked(name: str, shapes: str, types: str, values: str | None = None) -> Work | None:
    call = call_of(shapes, types, values)
    assert call is not None
    return work_of(name, call)


def needs(name: str, shapes: str, types: str, values: str | None = None) -> tuple[int | None, int | None]:
    found = worked(name, shapes, types, values)
    assert found is not None
    return found.flops, found.bytes


def test_empty() -> None:
    assert work_of_operators(Trace.from_tables({})).schema == WORK_SCHEMA


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "byte_count"),
    [
        ("aten::mm", "[[8, 4], [4, 2]]", 128, 4 * (32 + 8 + 16)),
        ("aten::mm", "[[8, 4], [4, 2], [8, 2]]", 128, 4 * (32 + 8 + 16)),
        ("aten::bmm", "[[3, 8, 4], [3, 4, 2]]", 384, 12 * (32 + 8 + 16)),
        ("aten::addmm", "[[2], [8, 4], [4, 2], [], []]", 128, 4 * (2 + 32 + 8 + 16)),
        ("aten::baddbmm", "[[3, 8, 2], [3, 8, 4], [3, 4, 2]]", 384, 12 * (16 + 32 + 8 + 16)),
        ("aten::linear", "[[5, 8, 4], [2, 4], [2]]", 640, 4 * (160 + 8 + 2 + 80)),
        ("aten::matmul", "[[3, 1, 8, 4], [7, 4, 2]]", 2688, 4 * (96 + 56 + 336)),
        ("aten::matmul", "[[4], [4, 2]]", 16, 4 * (4 + 8 + 2)),
        ("aten::matmul", "[[8, 4], [4]]", 64, 4 * (32 + 4 + 8)),
        ("aten::mv", "[[8, 4], [4]]", 64, 4 * (32 + 4 + 8)),
        ("aten::relu_", "[[8, 4]]", 0, 256),
        ("aten::add", "[[8, 1], [4], []]", 0, 4 * (8 + 4 + 32)),
        ("aten::mul", "[[8, 4], []]", 0, 256),
        ("aten::sqrt", "[[49], [49]]", 0, 392),
        ("aten::where", "[[8, 4], [8, 4], []]", 0, 384),
        ("aten::sum", "[[8, 4], []]", 0, 128),
        ("aten::_softmax", "[[8, 4], [], []]", 0, 256),
        ("aten::_softmax_backward_data", "[[8, 4], [8, 4], []]", 0, 384),
        ("aten::native_layer_norm", "[[8, 4], [], [4], [4]]", 0, 128 + 16 + 16 + 128),
        ("aten::native_layer_norm_backward", "[[8, 4], [8, 4], []]", 0, 384),
        ("aten::fill_", "[[8, 4], []]", 0, 128),
    ],
)
def test_numbers(name: str, shapes: str, flops: int, byte_count: int) -> None:
    types = "[" + ", ".join([FLOAT] * shapes.count("[")) + "]"

    assert needs(name, shapes, types) == (flops, byte_count)


def test_types_decide_on_bytes() -> None:
    assert needs("aten::add", "[[4], [4]]", f"[{HALF}, {FLOAT}]") == (0, 4 * (2 + 4 + 4))
    assert needs("aten::eq", "[[4], [4]]", f"[{HALF}, {HALF}]") == (0, 4 * (2 + 2 + 1))
    assert needs("aten::where", "[[4], [4], [4]]", f'["bool", {HALF}, {HALF}]') == (0, 4 * (1 + 2 + 2 + 2))
    assert needs("aten::copy_", "[[4], [4], []]", f'[{HALF}, {FLOAT}, "Scalar"]') == (0, 24)
    assert needs("aten::embedding", "[[10, 7], [3, 4]]", f"[{HALF}, {LONG}]") == (0, 96 + 168 + 140)
    assert needs("aten::_softmax", "[[4], [], []]", f'[{HALF}, "Scalar", "Scalar"]', '["", "0", "True"]') == (0, 24)
    assert worked("aten::mm", "[[2, 2], [2, 2]]", f"[{HALF}, {HALF}]") == Work("matrix", 16, 24, "fp16")


@pytest.mark.parametrize(
    ("name", "shapes", "types"),
    [
        ("aten::mm", "[[8, 4], [5, 2]]", f"[{FLOAT}, {FLOAT}]"),
        ("aten::mm", "[[8, 4]]", f"[{FLOAT}]"),
        ("aten::mm", "[[8, 4], [4, 2]]", '["", ""]'),
        ("aten::mm", "[[8, -4], [-4, 2]]", f"[{FLOAT}, {FLOAT}]"),
        ("aten::mm", "[[1000000000000, 1000000000000], [1000000000000, 2]]", f"[{FLOAT}, {FLOAT}]"),
        ("aten::mm", '[[8, "4"], [4, 2]]', f"[{FLOAT}, {FLOAT}]"),
        ("aten::add", "[[3], [4]]", f"[{FLOAT}, {FLOAT}]"),
        ("aten::linear", "[[], []]", "[]"),
        ("aten::conv2d", "[[2, 4, 9, 9], []]", f"[{FLOAT}]"),
        ("aten::cat", "[[[2], [2]]]", '["TensorList"]'),
        ("mine::mm", "[[8, 4], [4, 2]]", f"[{FLOAT}, {FLOAT}]"),
    ],
)
def test_what_shapes_do_not_tell_is_unknown(name: str, shapes: str, types: str) -> None:
    assert worked(name, shapes, types) is None


@pytest.mark.parametrize("text", [None, "", "{", "3", '{"a": 1}', '["float", 1]', "[" * 100_000])
def test_damaged_columns_are_unknown(text: str | None) -> None:
    assert call_of(text, text, None) is None
    assert call_of("[[2]]", '["float"]', "{") is None


def test_broadcast() -> None:
    assert broadcast([]) == ()
    assert broadcast([(3, 1, 4), (2, 1)]) == (3, 2, 4)
    assert broadcast([(0,), (1,)]) == (0,)
    assert broadcast([(3,), (4,)]) is None


CONVOLUTION = "[[2, 4, 9, 9], [6, 2, 3, 3], [], [], [], [], [], [], []]"
LISTS = '["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]'


def strides(*values: str) -> str:
    return '["", "", "", ' + ", ".join(f'"{value}"' for value in values) + "]"


def test_convolutions() -> None:
    rest = ("[0, 0]", "2")
    even = strides("[2, 2]", "[1, 1]", "[1, 1]", "False", *rest)
    assert needs("aten::convolution", CONVOLUTION, LISTS, even) == (2 * 2 * 25 * 108, 4 * (648 + 108 + 2 * 25 * 6))
    wide = strides("[2]", "[1]", "[2]", "False", *rest)  # (9 + 2 - 2 * 2 - 1) // 2 + 1 = 4
    assert needs("aten::convolution", CONVOLUTION, LISTS, wide) == (2 * 2 * 16 * 108, 4 * (648 + 108 + 2 * 16 * 6))
    assert needs("aten::convolution", CONVOLUTION, LISTS) == (None, None)
    assert needs("aten::convolution", CONVOLUTION, LISTS, strides("[0]", "[1]", "[1]", "False")) == (None, None)
    turned = strides("[2]", "[1]", "[1]", "True", *rest)
    transposed = needs("aten::convolution", "[[2, 6, 9, 9], [6, 2, 3, 3]]", '["float", "float"]', turned)
    assert transposed == (2 * 2 * 81 * 108, 4 * (2 * 6 * 81 + 108 + 2 * 4 * 17 * 17))
    unknown = needs(
        "aten::convolution", "[[2, 6, 9, 9], [6, 2, 3, 3]]", '["float", "float"]', turned.replace('"2"', '""')
    )
    assert unknown == (2 * 2 * 81 * 108, None)  # without groups the channels of the output are unknown


def test_names_of_number_types_and_tuples_as_some_profilers_write_them() -> None:
    shapes, types = "[[1, 3, 8, 8], [4, 3, 1, 1]]", '["BFloat16", "BFloat16"]'
    values = strides("(1, 1)", "(0, 0)", "(1, 1)", "False", "(0, 0)", "1")
    assert needs("aten::convolution", shapes, types, values) == (2 * 64 * 12, 2 * (192 + 12 + 256))


def test_experts_read_at_least_those_that_one_token_chooses() -> None:
    shapes, types = "[[16, 8], [64, 12, 8], [64, 8, 6], [16, 2]]", '["BFloat16", "BFloat16", "BFloat16", "Float"]'
    weights = 12 * 8 + 8 * 6
    expected = (2 * 16 * 2 * weights, 2 * (2 * 16 * 8 + 2 * weights) + 4 * 32)
    assert needs("vllm::rocm_aiter_fused_moe", shapes, types) == expected
    assert worked("vllm::rotary", shapes, types) is None


def test_a_convolution_without_values_learns_its_size_from_its_backward_pass() -> None:
    recording = Recording()
    forward = {"input_shapes": CONVOLUTION, "input_types": LISTS}
    recording.operator(0, 10, "aten::cudnn_convolution", **forward)
    recording.operator(20, 30, "aten::cudnn_convolution_backward", **_backward("[2, 4, 9, 9]", "[2, 6, 5, 5]"))
    recording.operator(25, 5, "aten::cudnn_convolution_backward_input", **_backward("[]", "[2, 6, 5, 5]"))
    recording.operator(
        35,
        5,
        "aten::cudnn_convolution_backward_weight",
        input_shapes="[[], [2, 6, 5, 5], [2, 4, 9, 9]]",
        input_types='["GenericList", "float", "float"]',
    )

    work = work_of_operators(recording.trace())

    assert work["flops"].to_list() == [10_800, None, 10_800, 10_800]
    assert work["bytes"].to_list() == [4 * (648 + 108 + 300), None, 4 * (300 + 648 + 108), 4 * (300 + 648 + 108)]
    assert work["work_kind"].to_list() == ["convolution", None, "convolution", "convolution"]


def _backward(given: str, gradient: str) -> dict[str, str]:
    first = "float" if given != "[]" else "GenericList"
    shapes = f"[{given}, {gradient}, [6, 2, 3, 3]]"
    return {"input_shapes": shapes, "input_types": f'["{first}", "float", "float"]'}


def test_a_size_that_is_not_the_same_everywhere_stays_unknown() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::cudnn_convolution", input_shapes=CONVOLUTION, input_types=LISTS)
    for number, gradient in enumerate(("[2, 6, 5, 5]", "[2, 6, 7, 7]")):
        recording.operator(
            20 + 20 * number, 10, "aten::cudnn_convolution_backward", **_backward("[2, 4, 9, 9]", gradient)
        )
        recording.operator(22 + 20 * number, 5, "aten::cudnn_convolution_backward_input", **_backward("[]", gradient))

    assert work_of_operators(recording.trace())["flops"].to_list() == [None, None, 10_800, None, 21_168]


def test_attention() -> None:
    shapes, types = "[[2, 4, 16, 8], [2, 4, 20, 8], [2, 4, 20, 6]]", f"[{HALF}, {HALF}, {HALF}]"
    name = "aten::_scaled_dot_product_flash_attention"
    byte_count = 2 * (2 * 4) * (16 * 8 + 20 * 8 + 20 * 6 + 16 * 6)
    full = 2 * 8 * 16 * 20 * (8 + 6)
    assert needs(name, shapes, types, '["", "", "", "0.", "False"]') == (full, byte_count)
    assert needs(name, shapes, types, '["", "", "", "0.", "True"]') == (2 * 8 * 136 * 14, byte_count)
    assert needs(name, shapes, types) == (None, byte_count)
    packed = "[[64, 4, 8], [64, 4, 8], [64, 4, 8], [3]]"
    assert worked("aten::_flash_attention_forward", packed, f"[{HALF}, {HALF}, {HALF}, {LONG}]") is None


def real_steps() -> dict[str, Callable[[], None]]:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def convolutions() -> None:
        image = torch.randn(2, 4, 9, 9, requires_grad=True)
        weight = torch.randn(6, 4, 3, 3, requires_grad=True)
        functional.conv2d(image, weight, stride=2, padding=1).sum().backward()
        functional.conv2d(image, weight, dilation=2).sum().backward()
        functional.conv1d(torch.randn(2, 3, 20), torch.randn(5, 3, 4), torch.randn(5))
        functional.conv_transpose2d(torch.randn(2, 4, 5, 5), torch.randn(4, 3, 3, 3), stride=2)
        functional.conv3d(torch.randn(1, 2, 5, 6, 7), torch.randn(3, 2, 2, 2, 2), stride=(1, 2, 1))
        functional.conv2d(torch.randn(2, 4, 9, 9), torch.randn(8, 2, 3, 3), groups=2)

    def products() -> None:
        torch.nn.Linear(8, 5)(torch.randn(3, 7, 8)).sum().backward()
        torch.matmul(torch.randn(3, 1, 4, 5), torch.randn(2, 5, 6))
        torch.bmm(torch.randn(3, 4, 5), torch.randn(3, 5, 2))
        torch.baddbmm(torch.randn(3, 4, 2), torch.randn(3, 4, 5), torch.randn(3, 5, 2))
        torch.addmm(torch.randn(2), torch.randn(4, 5), torch.randn(5, 2))

    def attention() -> None:
        inputs = [torch.randn(2, 4, size, 8, requires_grad=True) for size in (16, 24, 24)]
        functional.scaled_dot_product_attention(*inputs).sum().backward()

    return {"convolutions": convolutions, "products": products, "attention": attention}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convolutions", "products", "attention"])
def test_flops_are_those_that_pytorch_counts(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    # The counter knows fused attention on devices; on the CPU it is told that the same formulas apply.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gradient = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    step = real_steps()[name]
    with FlopCounterMode(display=False, custom_mapping={fused: forward, gradient: backward}) as counter:
        step()
    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    trace = open_trace(tmp_path / "trace.json")
    counted = {
        f"aten::{key.__name__.split('.')[0]}": flops for key, flops in counter.get_flop_counts()["Global"].items()
    }
    found = pl.concat([trace.operators, work_of_operators(trace)], how="horizontal").filter(pl.col("flops") > 0)
    by_name = dict(found.group_by("name").agg(pl.col("flops").sum()).iter_rows())

    assert counted
    assert {key: by_name.get(key) for key in counted} == counted
