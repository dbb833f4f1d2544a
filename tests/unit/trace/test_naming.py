"""What names of host slices give away."""

from __future__ import annotations

import pytest

from stepscope import guard
from stepscope.analysis.host import CAUSES
from stepscope.record import input_functions
from stepscope.trace.naming import (
    HOST_BACKEND,
    LOADER_START,
    UserCode,
    cause_of_name,
    is_third_party_file,
    is_user_file,
    name_patterns,
)

NAMES: dict[str, tuple[str, ...]] = {
    "profiler_overhead": (
        "torch/profiler/profiler.py(1150): step",
        "torch/profiler/profiler.py(199): start_trace",
        "torch/autograd/profiler.py(358): _start_trace",
        "torch/autograd/profiler.py(420): _stop_trace",
    ),
    "input": (
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "torch/utils/data/dataloader.py(703): __next__",
        "/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py(703): __next__",
        "DataLoader.__next__",
    ),
    "compilation": (
        "torch/_dynamo/convert_frame.py(1300): __call__",
        "torch/_inductor/compile_fx.py(560): compile_fx_inner",
        "torch/_inductor/async_compile.py(300): wait",
        "torch/_inductor/codecache.py(1100): load",
        "triton/compiler/compiler.py(226): compile",
        "triton/compiler/code_generator.py(1300): ast_to_ttir",
        "triton/compiler/compiler.py(439): _init_handles",
        "triton/backends/nvidia/compiler.py(300): make_cubin",
        "_compile.compile_inner (dynamo_timed)",
        "entire_frame_compile (dynamo_timed)",
    ),
    "graph_tracing": (
        "trace_to_jaxpr_dynamic",
        "partial_eval.py(2345): trace_to_jaxpr_dynamic",
        "jax/_src/pjit.py(9): _infer_params",
    ),
    "step_marker": ("StepMarker", "SyncLiveTensorsGraph", "SyncTensorsGraphInternal", "CollectSyncTensors"),
    "host_to_device_copy": (
        "PjRtComputationClient::TransferToDevice",
        "tpu::System::TransferToDevice=>IssueEvent",
        "TransferToServer",
        "DevicePut",
        "DevicePutWithSharding",
        "shard_args",
        "TfrtTpuClient::BufferFromHostBuffer::TfrtTpuBuffer",
        "pxla.py(112): shard_args",
    ),
    "garbage_collection": ("<built-in function collect>", "<built-in function gc.collect>", "gc.collect"),
    "checkpoint": (
        "torch/serialization.py(850): save",
        "torch/serialization.py(1100): _save",
        "torch/serialization.py(1300): load",
        "torch/distributed/checkpoint/state_dict_saver.py(60): save",
    ),
    "logging": (
        "<built-in function print>",
        "tqdm/std.py(1325): refresh",
        "/opt/env/lib/python3.11/site-packages/tqdm/std.py(1325): refresh",
        "wandb/sdk/wandb_run.py(1900): log",
        "mlflow/tracking/fluent.py(800): log_metric",
        "torch/utils/tensorboard/writer.py(350): add_scalar",
        "logging/__init__.py(1517): debug",
        "/usr/lib/python3.11/logging/__init__.py(1517): debug",
    ),
    "communication": (
        "gloo:all_reduce",
        "mpi:broadcast",
        "ucc:all_reduce",
        "c10d::barrier",
        "<built-in method _broadcast_coalesced of pybind11_builtins.pybind11_detail_function_record_v1 object at 0x7f>",
        "<built-in method wait of PyCapsule object at 0x7f8a4c1b2d30>",
        "nccl:barrier",
        "torch/distributed/distributed_c10d.py(4000): barrier",
        "torch/distributed/distributed_c10d.py(4700): monitored_barrier",
        "torch/distributed/distributed_c10d.py(2800): all_gather_object",
    ),
    "synchronisation": (
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::nonzero",
        "torch/cuda/__init__.py(975): synchronize",
        "torch/cuda/streams.py(220): synchronize",
    ),
    "optimizer": (
        "Optimizer.step#AdamW.step",
        "Optimizer.zero_grad#SGD.zero_grad",
        "torch/optim/adamw.py(200): step",
        "torch/optim/optimizer.py(484): wrapper",
    ),
    "dispatch": (
        "<built-in method run_backward of torch._C._EngineBase object at 0x7f041786f000>",
        "torch/autograd/graph.py(814): _engine_run_backward",
    ),
}

NEAR_MISSES = (
    "",
    "aten::mm",
    "ProfilerStep#5",
    "torch/autograd/profiler.py(780): __enter__",  # record_function of the user
    "torch/profiler/_utils.py(10): helper",
    "torch/utils/data/dataloader.py(480): __iter__",
    "train.py(8): enumerate_batches",
    "torch/_dynamo/eval_frame.py(465): _fn",  # stands around every call of compiled code
    "torch/_inductor/compile_fx.py(1194): run",
    "torch/_inductor/compile_fx.py(3139): wrapper",
    "torch/_inductor/codecache.py(1154): __call__",
    "torch/_inductor/output_code.py(460): __call__",
    "Torch-Compiled Region: 0/0",
    "triton/compiler/compiler.py(476): run",
    "triton/compiler/compiler.py(482): launch_metadata",
    "triton/backends/amd/compiler.py(185): get_tensor_specialization",
    "triton/runtime/jit.py(569): run",
    "<built-in method collect of builtins.PyLazyFrame object at 0x7f00>",
    "dataset.py(4): gc_collect",
    "torch/utils/checkpoint.py(430): checkpoint",  # recomputes activations
    "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py(160): forward",
    "torch/serialization.py(90): _is_zipfile",
    "tqdm/std.py(1160): __iter__",  # stands around the loop's iterator
    "tqdm/std.py(1195): __next__",
    "train_tqdm.py(3): main",
    "<built-in method print_tree of object at 0x7f00>",
    "my_wandb/run.py(3): log",
    "c10d::allreduce_",
    "nccl:all_reduce",  # a device's work: it does not hold the host
    "train.py(20): barrier_free",
    "<built-in method wait of _CudaEventBase object at 0x7f8a4c1b2d30>",
    "torch/distributed/distributed_c10d.py(2500): all_reduce",
    "aten::item_like",
    "aten::nonzero_static",
    "torch/cuda/streams.py(60): wait_stream",
    "torch/cuda/streams.py(230): query",
    "torch/cuda/__init__.py(400): set_device",
    "Optimizer.stepper",
    "torch/optimizers_of_mine.py(3): step",
    "train.py(9): run_backward_pass",
)


@pytest.mark.parametrize(("name", "cause"), [(name, cause) for cause, names in NAMES.items() for name in names])
def test_causes(name: str, cause: str) -> None:
    assert cause_of_name(name) == cause


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_say_nothing(name: str) -> None:
    assert cause_of_name(name) is None


def test_names_give_away_causes_of_the_vocabulary() -> None:
    assert set(NAMES) <= set(CAUSES)


@pytest.mark.parametrize(
    "file",
    [
        *("train.py", "./train.py", "project/model.py", "/data/project/train.py", "../train.py", "torch_model/net.py"),
        *("<ipython-input-3-0a1b2c>", "/tmp/ipykernel_77/1234.py"),
        # Folders that a user called like a framework, and what is no package of it
        *("/home/alice/triton-experiments/train.py", "/home/alice/triton-experiments/triton/kernels.py"),
        *("/home/alice/accelerate/train.py", "/home/alice/torch/train.py", "/home/bob/src/vllm/train.py"),
        *("/home/alice/vllm/examples/offline.py", "/home/bob/transformers/src/train.py", "my_vllm/model.py"),
        *("datasets/coco.py", "/home/alice/datasets/coco.py", "keras.py", "../lightning_tricks/loop.py"),
        *("C:\\Users\\alice\\triton\\train.py", "/home/alice/pytorch/train.py", "/home/bob/torch/nn.py"),
    ],
)
def test_the_users_files(file: str) -> None:
    assert is_user_file(file)


@pytest.mark.parametrize(
    "file",
    [
        None,
        "",
        "<built-in method mm of type object at 0x7f00>",
        "<frozen importlib._bootstrap>",
        "<string>",
        "<eval_with_key>.0",
        "torch/nn/modules/linear.py",
        "transformers/trainer.py",
        "contextlib.py",
        "logging/__init__.py",
        "/usr/lib/python3.11/threading.py",
        "/opt/env/lib/python3.11/site-packages/anything/file.py",
        "/usr/lib/python3/dist-packages/anything/file.py",
        "/opt/pytorch/torch/nn/modules/module.py",
        "/workspace/transformers/src/transformers/models/gpt2/modeling_gpt2.py",
        "datasets/arrow_dataset.py",
        *(f"{package}/layers/file.py" for package in ("aiter", "sgl_kernel", "vllm", "sglang", "triton", "flash_attn")),
        *(f"{package}/file.py" for package in ("xformers", "deepspeed", "accelerate", "lightning", "megatron")),
        "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py",
        "/sgl-workspace/sglang/sgl-kernel/python/sgl_kernel/elementwise.py",
        "/sgl-workspace/triton-custom/python/triton/runtime/jit.py",
        "/opt/vllm-0.6.3/vllm/engine/llm_engine.py",
        "/app/aiter/aiter/ops/mha.py",
        "/build/pytorch_2.5.1/torch/nn/modules/module.py",
        "/workspace/flash-attention/flash_attn/flash_attn_interface.py",
        "/workspace/DeepSpeed/deepspeed/runtime/engine.py",
        "/workspace/Megatron-LM/megatron/core/tensor_parallel/layers.py",
        "/home/bob/pytorch-lightning/src/lightning/pytorch/trainer/trainer.py",
        "C:\\Users\\bob\\vllm\\vllm\\engine\\llm_engine.py",
        "C:\\env\\Lib\\site-packages\\torch\\nn\\functional.py",
        "/tmp/torchinductor_alice/ab/cabcdef.py",
        "/home/alice/.triton/cache/0a1b/kernel.py",
    ],
)
def test_files_of_others(file: str | None) -> None:
    assert not is_user_file(file)


@pytest.mark.parametrize(
    "file",
    [
        guard.__file__,
        input_functions.__file__,
        "/home/alice/code/stepscope/record/input_functions.py",
        "C:\\env\\stepscope\\record\\lines.py",
        "stepscope/remedies/loading/loaders.py",
    ],
)
def test_stepscopes_own_files_are_never_the_users(file: str) -> None:
    """Nor those of a library that says what is done, however the user's code is set."""
    assert file not in UserCode(also=("*.py",))
    assert not is_user_file(file)
    assert not is_third_party_file(file)


def test_a_project_of_that_name_is_the_users() -> None:
    assert is_user_file("/home/alice/stepscope/train.py")


def test_the_table_of_names_holds_what_the_code_looks_for() -> None:
    patterns = {cause: pattern.pattern for cause, pattern in name_patterns("host_names.tsv")["cause"]}

    assert LOADER_START in patterns["input"]
    assert HOST_BACKEND in patterns["communication"]
