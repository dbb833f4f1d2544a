"""Device work by name, and how it was launched."""

from __future__ import annotations

import polars as pl
import pytest

from stepscope.analysis.operators import Arithmetic, arithmetic, kernel_table, launch_table
from stepscope.errors import UsageError
from stepscope.trace import Trace
from tests.unit.recording import Recording

FP8, BF16, FP16 = (Arithmetic(precision, True, True) for precision in ("fp8", "bf16", "fp16"))
TF32, FP32, INT8 = Arithmetic("tf32", True, True), Arithmetic("fp32", False, True), Arithmetic("int8", True, True)

MATRIX_KERNELS: dict[str, Arithmetic] = {
    # cuBLAS
    "volta_sgemm_64x64_nt": FP32,
    "ampere_sgemm_128x64_nn": FP32,
    "maxwell_sgemm_128x128_tn": FP32,
    "volta_h884gemm_128x128_ldg8_nn": FP16,
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn": FP16,
    "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_stages_32x1_tn": FP16,
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn": FP16,
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_relu_f2f_stages_64x3_tn": BF16,
    "ampere_h16816gemm_256x128_ldg8_stages_32x3_nt": FP16,
    "volta_dgemm_64x64_nn": Arithmetic("fp64", False, True),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel__5x_cublas": BF16,
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x16_kernel": FP16,
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage3_warpsize2x2x1_tensor16x8x8_kernel": TF32,
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_kernel__5x_cublas": FP32,
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128_warpgroupsize1x1x1_kernel__5x_cublas": FP8,
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT": BF16,
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": FP16,
    "nvjet_sm100_tst_mma_128x256x64_3_64x32x64_cta_v_bz_TNN": BF16,
    "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true, cublasGemvTensorStridedBatched<float const> >": FP32,
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>": FP32,
    # CUTLASS
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1>(Params)": TF32,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(Params)": BF16,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align2>(Params)": BF16,
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)": FP32,
    "cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1": Arithmetic("fp64", True, True),
    "cutlass_75_tensorop_i8816gemm_s8_256x128_64x2_tn_align16": INT8,
    # cuDNN
    "cudnn_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": FP32,
    "cudnn_turing_scudnn_128x64_stridedB_splitK_xregs_large_nn_v1": FP32,
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)": FP32,
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)": FP32,
    "turing_h1688cudnn_256x64_sliced1x2_ldg8_relu_exp_small_nhwc_tn_v1": FP16,
    "sm86_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tensor16x8x16_kernel__5x_cudnn": FP16,
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, true, false, true>": FP32,
    # attention
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, cutlass::bfloat16_t> >": BF16,
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)": FP16,
    # rocBLAS, hipBLASLt, MIOpen, Composable Kernel
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1_SN_LDSB1": BF16,
    "Cijk_Ailk_Bjlk_HHS_BH_MT64x128x64_MI32x32x8x1_SE_1LDSB0": FP16,
    "Cijk_Ailk_Bljk_SB_MT64x64x16_SN_APM1": FP32,
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN": Arithmetic("fp32", True, True),
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2": BF16,
    "_ZN2ck49kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffleINS_ES8_S8_LNS_25": Arithmetic(None, True, True),
    "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_36ProblemIDF16bDF16bDF16bff": BF16,
    # Triton
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1": Arithmetic("bf16", None, True),
}

OTHER_KERNELS: dict[str, str | None] = {
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "fp32",
    "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 10, false, false>": "fp16",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>": "bf16",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(double)>": "fp64",
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float, float, float, float)": "fp32",
    "void fbgemm_gpu::permute_2D_data_kernel<false, int, float>(int, int, float const*)": "fp32",  # no gemm in it
    "void bounds_check_indices_kernel<long, false>(long*, fbgemm_gpu::BoundsCheckMode)": None,
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>": "fp32",
    "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, c10::BFloat16> >": "bf16",
    "convert_to_channels_last": None,
    "cask_cudnn::computeWgradSplitKOffsetsKernel(cask_cudnn::ComputeSplitKOffsetsParams)": None,
    "SubTensorOpWithCastTensor1d": None,
    "create_flashinfer_kv_indices_triton": None,
    "void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16, (vllm::Fp8KVCacheDataType)0>": "bf16",
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27ProblemIDF16bDF16bfDF16bDF16b": "bf16",
    "triton_poi_fused_add_relu_0": None,
}


@pytest.mark.parametrize(("name", "expected"), MATRIX_KERNELS.items())
def test_arithmetic_of_matrix_kernels(name: str, expected: Arithmetic) -> None:
    assert arithmetic(name) == expected


@pytest.mark.parametrize(("name", "precision"), OTHER_KERNELS.items())
def test_arithmetic_of_other_kernels(name: str, precision: str | None) -> None:
    assert arithmetic(name) == Arithmetic(precision, None, False)


def small_trace() -> Trace:
    """Two steps of three kernels on two queues, and one kernel whose launch was lost."""
    recording = Recording()
    recording.step(0, 100, 1)
    recording.step(100, 100, 2)
    recording.launched(10, 20, 10, "volta_sgemm_64x64_nt", 101, grid="2,1,1", block="64,1,1")
    recording.launched(14, 30, 1, "fill", 102, queue="8")
    recording.launched(110, 120, 30, "volta_sgemm_64x64_nt", 103, grid="4,1,1", block="64,1,1")
    recording.work(160, 9, "lost")
    return recording.trace()


def test_no_kernels() -> None:
    table = kernel_table(Trace.from_tables({}))

    assert table.height == 0
    assert table.columns == [
        "name", "calls", "calls_per_step", "total_ns", "share", "mean_ns", "deviation_ns", "shortest_ns", "longest_ns",
        "launch_delay_ns", "shorter_than_launch", "precision", "tensor_cores", "is_matrix",
    ]  # fmt: skip
    assert launch_table(Trace.from_tables({})).height == 0


def test_kernels_by_name() -> None:
    assert kernel_table(small_trace()).rows() == [
        ("volta_sgemm_64x64_nt", 2, 1.0, 40, 0.8, 20.0, 10.0, 10, 30, 10.0, 0, "fp32", False, True),
        ("lost", 1, 0.5, 9, 0.18, 9.0, 0.0, 9, 9, None, 0, None, None, False),
        ("fill", 1, 0.5, 1, 0.02, 1.0, 0.0, 1, 1, 16.0, 1, None, None, False),
    ]


def test_kernels_by_launch_shape() -> None:
    table = kernel_table(small_trace(), group_by=["grid", "block"]).select("grid", "block", "calls", "total_ns")

    assert table.rows() == [("4,1,1", "64,1,1", 1, 30), (None, None, 2, 10), ("2,1,1", "64,1,1", 1, 10)]


def test_kernels_by_queue() -> None:
    table = kernel_table(small_trace(), group_by=["device", "queue"])

    assert table.select("device", "queue", "calls", "total_ns", "share").rows() == [
        ("0", "7", 3, 49, 49 / 50),
        ("0", "8", 1, 1, 1 / 50),
    ]


@pytest.mark.parametrize("group_by", [["colour"], []])
def test_unknown_groupings(group_by: list[str]) -> None:
    with pytest.raises(UsageError, match="kernels can be grouped by name, kind, device, queue, grid, block, not by"):
        kernel_table(small_trace(), group_by=group_by)


def test_launch_statistics() -> None:
    rows = launch_table(small_trace()).rows(named=True)

    assert rows == [
        {
            "device": "0",
            "works": 4,
            "works_without_launch": 1,
            "launch_calls": 3,
            "works_per_graph_launch": None,
            "shorter_than_launch": 1,
            "launch_call_ns": 2.0,
            "launch_delay_ns": 10.0,
            # from 10 to 150: the first is in flight for 20 ns, the second for 17, the third for 40
            "queue_depth": (20 + 17 + 40) / 140,
            "deepest_queue": 2,
        }
    ]


def test_one_graph_launch_runs_many_works() -> None:
    recording = Recording()
    recording.launch(0, 5, 101, name="cudaGraphLaunch", kind="graph_launch")
    for start in (10, 20, 30):
        recording.work(start, 10, "node", 101)

    rows = launch_table(recording.trace()).select("launch_calls", "works_per_graph_launch", "deepest_queue").rows()

    assert rows == [(1, 3.0, 3)]


def test_work_that_seems_to_start_before_its_launch_counts_no_negative_time() -> None:
    recording = Recording()
    recording.launch(10, 5, 101)
    recording.work(2, 3, "early", 101)

    table = launch_table(recording.trace())

    assert table.select("queue_depth", "deepest_queue").rows() == [(0.0, 0)]


def test_each_device_has_its_row() -> None:
    recording = Recording()
    recording.launched(0, 10, 5, "a", 101, device="1")
    recording.launched(4, 10, 5, "a", 102, device="0")

    assert launch_table(recording.trace()).select("device", "works").rows() == [("0", 1), ("1", 1)]
    assert isinstance(launch_table(recording.trace()), pl.DataFrame)
