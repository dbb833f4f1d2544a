"""Kernels that took the place of others between two runs: fused, no longer fused, or others for the same operator."""

from __future__ import annotations

import polars as pl
import pytest

from stepscope.compare.matching import CHANGE_SCHEMA, kernel_changes

Call = tuple[str, str | None, float, float]
SCHEMA = {"name": pl.String, "kind": pl.String, "operator": pl.String, "module": pl.String, "input_shapes": pl.String,
          "ns": pl.Float64, "calls": pl.Float64}  # fmt: skip
ATTENTION: list[Call] = [
    ("gemm_qk", "aten::bmm", 40, 1),
    ("softmax_warp_forward", "aten::_softmax", 30, 1),
    ("gemm_pv", "aten::bmm", 30, 1),
]


def kernels(*calls: Call, shapes: str = "[[8, 8]]") -> pl.DataFrame:
    rows = [(name, "compute", operator, None, shapes, ns, count) for name, operator, ns, count in calls]
    return pl.DataFrame(rows, SCHEMA, orient="row")


def changes(before: pl.DataFrame, after: pl.DataFrame) -> list[tuple[str, str, str, float, float]]:
    table = kernel_changes(before, after)
    return table.select("change", "operator", "how", "before_ns", "after_ns").rows()


def test_nothing_changes_without_kernels_or_with_the_same() -> None:
    assert kernel_changes(kernels(), kernels()).schema == CHANGE_SCHEMA
    same = kernels(("gemm", "aten::mm", 10, 1), ("copy", None, 5, 1))
    assert changes(same, same) == []
    moved = kernels(("triton_poi_fused_add_mul_7", "triton_poi_fused_add_mul_7", 5, 1))
    renumbered = kernels(("triton_poi_fused_add_mul_9", "triton_poi_fused_add_mul_9", 5, 1))
    assert changes(moved, renumbered) == []


@pytest.mark.parametrize(
    ("old", "new", "change", "how"),
    [
        ("cudnn::winograd_nonfused", "cudnn_implicit_gemm_fprop", "other algorithm", "Winograd -> implicit GEMM"),
        ("ampere_sgemm_128x64_nn", "ampere_bf16_s16816gemm_bf16_128x64", "other number type", "fp32 -> bf16"),
        ("flash_fwd_kernel", "attn_fwd.kd", "other library", "FlashAttention 2 -> AOTriton"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_32x32_nn", "other kernel", ""),
    ],
)
def test_other_kernels_for_the_same_operator(old: str, new: str, change: str, how: str) -> None:
    before, after = kernels((old, "aten::convolution", 100, 2)), kernels((new, "aten::convolution", 60, 2))

    assert changes(before, after) == [(change, "convolution", how, 100, 60)]


def test_the_same_change_of_several_calls_is_one_row() -> None:
    before = pl.concat(
        [kernels(("flash_fwd_kernel", "aten::sdpa", 10, 1), shapes=shape) for shape in ("[[1]]", "[[2]]")]
    )
    after = pl.concat([kernels(("attn_fwd.kd", "aten::sdpa", 15, 1), shapes=shape) for shape in ("[[1]]", "[[2]]")])

    assert changes(before, after) == [("other library", "sdpa", "FlashAttention 2 -> AOTriton", 20, 30)]


def test_operators_of_a_fused_attention() -> None:
    fused = kernels(("flash_fwd_kernel", "aten::_flash_attention_forward", 20, 1))

    assert changes(kernels(*ATTENTION), fused) == [("fused", "_softmax, bmm", "", 100, 20)]
    assert changes(fused, kernels(*ATTENTION)) == [("unfused", "_softmax, bmm", "", 20, 100)]


def test_operators_in_a_compiled_kernel_are_named_by_it() -> None:
    before = kernels(
        ("add", "aten::add", 30, 3),
        ("mul", "aten::mul", 20, 2),
        ("silu", "aten::silu", 10, 1),
        ("tanh", "aten::tanh", 5, 1),
        ("gemm", "aten::mm", 50, 1),
    )
    after = kernels(
        ("triton_poi_fused_add_mul_silu_0", None, 15, 1),
        ("mul", "aten::mul", 10, 1),
        ("tanh", "aten::tanh", 5, 1),
        ("gemm", "aten::mm", 50, 1),
    )
    assert changes(before, after) == [("fused", "add, mul, silu", "", 50, 15)]  # a multiplication remains


def test_a_kernel_beside_the_others_that_went_or_came() -> None:
    one = kernels(("gemm_128x64", "aten::mm", 50, 1))
    two = kernels(("gemm_128x64", "aten::mm", 50, 1), ("splitKreduce_kernel", "aten::mm", 5, 1))

    assert changes(two, one) == [("fewer kernels", "mm", "", 55, 50)]
    assert changes(one, two) == [("more kernels", "mm", "", 50, 55)]
