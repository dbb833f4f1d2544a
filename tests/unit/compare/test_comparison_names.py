"""Names of kernels without the numbers that compilers and libraries give them."""

from __future__ import annotations

import pytest

from stepscope.compare import compare_traces
from stepscope.compare.matching import numberless
from stepscope.report.comparison import difference_tables
from stepscope.trace import Trace
from tests.unit.recording import Recording

HASH = "fxgjkh4ttvzktj3ypjmuaxvpxf4ktaz3gnnxhyjnppfqgbxnpwtw"


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("triton_poi_fused_add_mul_7", "triton_poi_fused_add_mul_#"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "triton_red_fused_add_mean_mul_pow_rsqrt_#"),
        ("triton_per_fused_add_12_0d1d2d", "triton_per_fused_add_#"),
        ("graph_0_cpp_fused_relu_3", "graph_0_cpp_fused_relu_#"),
        (f"CompiledFxGraph {HASH}", "CompiledFxGraph #"),
        (f"## Call CompiledFxGraph {HASH} ##", "## Call CompiledFxGraph # ##"),
        ("Torch-Compiled Region: 0/0", "Torch-Compiled Region: #"),
        ("lambda at 0x7f3291c02c20", "lambda at #"),
        (
            "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1_AFC1_WGM8",
            "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_#",
        ),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>(float)",
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align#>(float)",
        ),
        # What a number tells is kept: sizes, types, vector widths.
        ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
        ("void cutlass::Kernel<cutlass_f16>(int4)", "void cutlass::Kernel<cutlass_f16>(int4)"),
        ("void vectorized_elementwise_kernel<4, float>", "void vectorized_elementwise_kernel<4, float>"),
        ("triton__0d1d2d", "triton__0d1d2d"),
        ("aten::conv2d", "aten::conv2d"),
        ("elementwisekernelofverymanylowercaseletters2d", "elementwisekernelofverymanylowercaseletters2d"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("", ""),
        ("_fused_" + "1_" * 5000, "_fused_" + "1_" * 5000),
    ],
)
def test_numbers_that_differ_from_one_compilation_to_the_next(name: str, without: str) -> None:
    assert numberless(name) == without


def trace(kernel: str, kernel_ns: int) -> Trace:
    made = Recording()
    for number in range(4):
        made.operator(number * 1000, 10, f"CompiledFxGraph {HASH[number % 2 :]}{kernel_ns}")
        made.launched(number * 1000 + 2, number * 1000 + 10, kernel_ns, kernel, number + 1)
        made.launched(number * 1000 + 4, number * 1000 + 500, 20, "gemm", number + 10)
        made.step(number * 1000, 1000, number)
    return made.trace()


def test_kernels_of_two_compilations_are_the_same_kernels() -> None:
    found = compare_traces(trace("triton_poi_fused_add_7", 100), trace("triton_poi_fused_add_3", 60))

    row = found.kernels.row(0, named=True)
    assert (row["name"], row["after_name"], row["match"]) == (
        "triton_poi_fused_add_7",
        "triton_poi_fused_add_3",
        "same kernel, other number",
    )
    assert (row["before_total_ns"], row["after_total_ns"], row["before_calls"], row["after_calls"]) == (400, 240, 1, 1)
    assert found.operators["match"].to_list() == ["same operator, other number"]
    shown = {title: table.frame for title, table in difference_tables(found)}
    assert shown["Kernels"]["matched as"].to_list() == ["same kernel, other number"]
    assert "family" not in found.kernels.columns + found.operators.columns


def test_a_name_on_both_sides_is_matched_with_itself() -> None:
    """Given kernels 3 and 7 before, 7 and 9 after: 7 is 7, whatever 3 became."""
    before = trace("triton_poi_fused_add_7", 100)
    made = Recording()
    made.launched(2, 10, 100, "triton_poi_fused_add_7", 1)
    made.launched(4, 200, 30, "triton_poi_fused_add_9", 2)
    made.step(0, 1000, 1)

    found = compare_traces(before, made.trace())

    matches = dict(found.kernels.select("name", "match").iter_rows())
    assert matches == {"triton_poi_fused_add_7": "same", "triton_poi_fused_add_9": "only after", "gemm": "only before"}
