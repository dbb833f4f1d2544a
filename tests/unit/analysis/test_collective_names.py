"""What names of collectives' kernels tell: from traces in public repositories, and from the libraries' sources."""

import pytest

from stepscope.analysis.communication import collective_class, kind_of
from stepscope.trace.naming import is_communication

_OPAQUE = "ncclDevKernelArgsStorage<4096ul>"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        # NCCL runs every algorithm but trees, with every protocol, in kernels named RING_LL
        (
            f"ncclDevKernel_AllReduce_Sum_f32_RING_LL({_OPAQUE})",
            ("NCCL", "all_reduce", "ring or NVLS", "", "float32"),
        ),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevComm*)", ("NCCL", "all_reduce", "tree", "", "bfloat16")),
        (f"ncclDevKernel_AllGather_RING_LL({_OPAQUE})", ("NCCL", "all_gather", "ring or NVLS", "", "")),
        ("ncclDevKernel_AllReduce_Sum_f16_NVLS_SIMPLE", ("NCCL", "all_reduce", "NVLS", "Simple", "float16")),
        ("ncclDevKernel_ReduceScatter_Sum_u8_RING_LL128", ("NCCL", "reduce_scatter", "ring", "LL128", "int8")),
        ("_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE", ("NCCL", "send_receive", "", "", "")),
        (
            "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
            ("NCCL", "send_receive", "", "Simple", "int8"),
        ),
        (f"ncclDevKernel_Generic({_OPAQUE})", ("NCCL", "other", "", "", "")),
        (f"ncclDevKernel_Generic_1({_OPAQUE})", ("RCCL", "other", "", "", "")),
        (
            "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)",
            ("NCCL symmetric memory", "all_reduce", "two shot", "", "bfloat16"),
        ),
        (
            "ncclSymDevKernel_AllReduce_AGxLLMC_R_sum_f16(ncclSymDevArgs)",
            ("NCCL symmetric memory", "all_reduce", "NVLS", "LL", "float16"),
        ),
        ("ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)", ("NCCL symmetric memory", "all_gather", "", "LL", "")),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false", ("MSCCL", "all_reduce", "", "Simple", "bfloat16")),
        ("void mscclpp::collective::allgatherFullmesh2(void*)", ("MSCCL++", "all_gather", "", "", "")),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
            ("PyTorch symmetric memory", "all_reduce", "NVLS", "", "bfloat16"),
        ),
        ("two_shot_all_reduce_kernel", ("PyTorch symmetric memory", "all_reduce", "two shot", "", "")),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<"
            "(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 8, false, false>",
            ("FlashInfer", "all_reduce", "one shot", "LL", "bfloat16"),
        ),
        ("void vllm::cross_device_reduce_1stage<half, 2>", ("vLLM", "all_reduce", "one shot", "", "float16")),
        (
            "void sglang::cross_device_reduce_2stage<__hip_bfloat16, 8, false>",
            ("SGLang", "all_reduce", "two shot", "", "bfloat16"),
        ),
        ("void aiter::cross_device_reduce_2stage<float, 8>", ("AITER", "all_reduce", "two shot", "", "float32")),
        (
            "quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half,8>, true>, __half>",
            ("QuickReduce", "all_reduce", "two shot", "", "float16"),
        ),
        (
            "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(T1 *, float *)",
            ("DeepEP", "all_to_all", "", "", "bfloat16"),
        ),
        ("void deep_ep::internode_ll::dispatch<true, 7168>", ("DeepEP", "all_to_all", "low latency", "", "")),
        ("hybrid_ep::device_sync_kernel", ("DeepEP", "barrier", "", "", "")),
        ("moeA2ADispatchKernel", ("TensorRT-LLM", "all_to_all", "", "", "")),
        ("oneccl_allreduce_pcie", ("oneCCL", "all_reduce", "", "", "")),
    ],
)
def test_what_a_kernels_name_tells(name: str, told: tuple[str, ...]) -> None:
    found = collective_class(name)
    assert (found.library, found.kind, found.algorithm, found.protocol, found.number_type) == told
    assert is_communication(name)


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::layout::get_dispatch_layout<256, 32>",
        "softmax_block_all_reduce",
        "blockAllReduceSum",
        "void at::native::reduce_kernel<512, 1>",
        "moe_combine_kernel",
        "",
    ],
)
def test_other_work_is_no_communication(name: str) -> None:
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("nccl:_all_gather_base", "all_gather"), ("nccl:send 0->1", "send_receive"), ("gloo:barrier", "barrier"),
     ("collective_permute", "send_receive"), ("AllToAll", "all_to_all"), ("nccl:coalesced", "other")],
)  # fmt: skip
def test_the_kind_in_a_mark(name: str, kind: str) -> None:
    assert kind_of(name) == kind
