"""What names of kernels tell: kind, library and algorithm, from one table of patterns."""

from __future__ import annotations

import pytest

from stepscope.analysis.operators import arithmetic, has_four_bits, kernel_class

TRTLLM = "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_schedP2x1x2x3"
DECODE = "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u>(Params)"


@pytest.mark.parametrize(
    ("name", "kind", "library", "algorithm"),
    [
        (f"{TRTLLM}_swiGlu_dynBatch_sm100f", "experts", "TensorRT-LLM", "grouped product"),
        (f"{TRTLLM}_sm100f", "matrix", "TensorRT-LLM", ""),
        (
            "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausal",
            "attention",
            "TensorRT-LLM",
            "paged attention",
        ),
        ("void moe::dev::routing::routingIndicesHistogramKernel<moe::dev::Params>(P)", "routing", "TensorRT-LLM", ""),
        ("void tensorrt_llm::kernels::quantize_with_block_size<(T)2>(flashinfer::Layout)", "quantisation", None, None),
        (DECODE, "attention", "FlashInfer", "paged attention"),
        (
            "void flash::flash_fwd_kernel<Flash_traits<128>>",
            "attention",
            "FlashAttention 2",
            "flash attention",
        ),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<float>>", "attention", "FlashAttention 3", None),
        ("attn_fwd.kd", "attention", "AOTriton", "flash attention"),
        ("kernel_unified_attention_3d", "attention", "vLLM", ""),
        ("void paged_attention_ll4mi_QKV_mfma16_kernel<0>", "attention", "vLLM", "paged attention"),
        ("ragged_paged_attention", "attention", "", "paged attention"),
        ("_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelI", "attention", "CK", "paged attention"),
        ("_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weight", "matrix", "CK", ""),
        ("aiter_fused_moe_kernel_bf16", "experts", "AITER", "grouped product"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "experts", "Triton", "grouped product"),
        ("fused_moe_kernel", "experts", "Triton", "grouped product"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32", "matrix", "hipBLASLt", ""),
        ("Cijk_B_PostGSU2", "matrix", "rocBLAS", "split-K"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "matrix", "cuBLAS", ""),
        (
            "void cutlass::device_kernel<cutlass::gemm::GemmUniversal<int>>",
            "matrix",
            "CUTLASS",
            "",
        ),
        ("triton_tem_fused_mm_3", "matrix", "Triton", "fused by the compiler"),
        ("triton_poi_fused_add_silu_0", "elementwise", "Triton", "fused by the compiler"),
        ("triton_red_fused_mean_pow_1", "reduction", "Triton", "fused by the compiler"),
        ("igemm_fwd_gtcx_nhwc_fp32_bx0_bt128x128x8", "convolution", "MIOpen", "implicit GEMM"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "convolution", "cuDNN", "Winograd"),
        ("void at::native::conv_depthwise2d_forward_kernel<1, float, int>", "depthwise", "PyTorch", ""),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>", "softmax", "PyTorch", ""),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "cache", "vLLM", None),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16b", "normalisation", "AITER", ""),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(T)>", "copy", "PyTorch", ""),
        ("void at::native::elementwise_kernel<4, clamp_min_scalar_kernel_impl(T)>", "elementwise", "PyTorch", None),
        ("void rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "rotary", "", ""),
        ("void vllm::moe::topkGatingSoftmax<4, 64>(float const*)", "routing", "vLLM", ""),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(T)", "sampling", "FlashInfer", ""),
        ("void marlin::Marlin<__nv_bfloat16, 256>(T)", "matrix", "vLLM", ""),
        ("void cutlass::device_kernel<cutlass::gemm::GroupProblemShape<int>>", "experts", "CUTLASS", None),
        ("kernel_mha", "attention", "", None),
        ("_Z9mystery42Pf", "", "", ""),
        ("Kernel", "", "", ""),
    ],
)
def test_kinds_and_libraries(name: str, kind: str, library: str | None, algorithm: str | None) -> None:
    found = kernel_class(name)

    assert found.kind == kind
    assert library is None or found.library == library
    assert algorithm is None or found.algorithm == algorithm
    assert arithmetic(name).is_matrix == (kind in ("matrix", "convolution", "attention", "experts"))


def test_argument_types_of_a_template_do_not_make_a_matrix_product() -> None:
    finalize = "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::Params<cutlass::bfloat16_t>>"
    assert not arithmetic(finalize).is_matrix


@pytest.mark.parametrize(
    ("name", "precision", "has_four"),
    [
        (TRTLLM, "fp8", True),
        ("bmm_Bfloat16_E2m1E2m1_Fp32_t128x8x512_sm100a", "fp4", True),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "bf16", True),
        ("void awq_gemm_kernel<half>", "fp16", True),
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausal", "fp8", False),
        ("Cijk_Alik_Bljk_F8BS_BH_Bias_SHB_HA_S_SAB_SCD_SAV_MT256x256x64", "fp8", False),
        ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT128x224x64", "bf16", False),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x16", "fp32", False),
        ("void quantize_to_nvfp4<half>", "fp4", False),
    ],
)
def test_number_types(name: str, precision: str, has_four: bool) -> None:
    assert arithmetic(name).precision == precision
    assert has_four_bits(name) == has_four
