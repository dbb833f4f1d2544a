"""What the names of host slices say about why the host is busy, and which files are the user's own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

# fmt: off
FRAMEWORKS: Final = frozenset({
    # PyTorch, its libraries and its backends
    "torch", "torchvision", "torchaudio", "torchtext", "torchao", "torchdata", "torchrec", "torchrl", "torchtune",
    "torch_geometric", "torch_mlu", "torch_npu", "torch_tensorrt", "torch_xla", "functorch", "fbgemm_gpu",
    "habana_frameworks", "intel_extension_for_pytorch", "tensordict",
    # compilers and kernels
    "aiter", "apex", "bitsandbytes", "causal_conv1d", "cupy", "deep_ep", "deep_gemm", "flash_attn", "flashinfer",
    "liger_kernel", "mamba_ssm", "numba", "onnxruntime", "sgl_kernel", "tensorrt", "transformer_engine", "triton",
    "xformers",
    # training
    "accelerate", "colossalai", "deepspeed", "fairseq", "fastai", "ignite", "lightning", "lightning_fabric", "megatron",
    "peft", "pytorch_lightning", "torchmetrics", "trl", "unsloth",
    # serving
    "lmdeploy", "ray", "sglang", "tensorrt_llm", "vllm", "xgrammar",
    # models and data
    "albumentations", "datasets", "detectron2", "dgl", "diffusers", "einops", "huggingface_hub", "kornia", "mmcv",
    "mmengine", "monai", "open_clip", "optimum", "safetensors", "sentence_transformers", "timm", "tokenizers",
    "transformers", "webdataset",
    # other frameworks
    "equinox", "flax", "haiku", "jax", "jaxlib", "keras", "optax", "orbax", "tensorflow",
    # numbers, tables and pictures
    "PIL", "cv2", "joblib", "matplotlib", "numpy", "pandas", "polars", "pyarrow", "scipy", "sklearn", "sympy",
    # logging, settings, terminals, services
    "IPython", "click", "fastapi", "fsspec", "hydra", "ipykernel", "mlflow", "omegaconf", "pytest", "starlette",
    "stepscope", "tensorboard", "tqdm", "typer", "uvicorn", "uvloop", "wandb", "zmq",
})
"""Folders that are a framework's package where Python found them: `vllm/engine/llm_engine.py`."""

_REPOSITORIES: Final[dict[str, tuple[str, ...]]] = {
    "flash_attn": ("flash-attention",),
    "lightning": ("pytorch-lightning",),
    "lightning_fabric": ("lightning", "pytorch-lightning"),
    "megatron": ("megatron-lm",),
    "pytorch_lightning": ("lightning",),
    "torch": ("pytorch",),
    "torch_xla": ("xla",),
    "torchaudio": ("audio",),
    "torchvision": ("vision",),
    "transformer_engine": ("transformerengine",),
}
"""What the folder of a package's sources is called beside the package itself."""

_ALSO_COMMON: Final[dict[str, frozenset[str]]] = {
    "datasets": frozenset({
        "arrow_dataset.py", "arrow_reader.py", "builder.py", "dataset_dict.py", "features", "fingerprint.py",
        "formatting", "iterable_dataset.py", "load.py", "packaged_modules", "table.py",
    }),
}
"""Packages whose names many programs give to a folder of their own, and what lies in the package."""
# fmt: on
_BETWEEN: Final = frozenset({"src", "python", "lib"})
_FORK: Final = re.compile(r"[-_.](?:v?\d[\w.+-]*|main|master|fork|custom|rocm|cuda|dev|src|source|upstream)$")


def is_framework(path: str, *, imported: bool) -> bool:
    """Whether a file is a framework's.

    Args:
        path: with forward slashes.
        imported: whether the path is one from where Python finds packages, and begins with the package: otherwise the
            package counts only inside a folder of its sources, as in `/opt/vllm/vllm` or `/src/triton/python/triton`,
            for a user may call a project's folder like a framework.
    """
    folders = [part for part in path.split("/") if part]
    if imported:
        return len(folders) > 1 and folders[0] in FRAMEWORKS and _is_in(folders[0], folders[1])
    return any(
        name in FRAMEWORKS and _is_checkout(name, folders[:position]) and _is_in(name, folders[position + 1])
        for position, name in enumerate(folders[:-1])
    )


def _is_in(package: str, inside: str) -> bool:
    return package not in _ALSO_COMMON or inside in _ALSO_COMMON[package]


def _is_checkout(package: str, around: Sequence[str]) -> bool:
    """Whether the folder around a package (or around its src) is named like the package's sources."""
    if around and around[-1].lower() in _BETWEEN:
        around = around[:-1]
    if not around:
        return False
    names = {_plain(name) for name in (package, *_REPOSITORIES.get(package, ()))}
    return bool(names & {_plain(around[-1]), _plain(_FORK.sub("", around[-1].lower()))})


def _plain(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())


LOADER_START: Final = r"^DataLoader\.__iter__$|torch/utils/data/dataloader\.py\(\d+\): _get_iterator$"
"""Names of the call that makes an iterator over a loader, and starts its workers."""

HOST_BACKEND: Final = r"^(?:gloo|mpi|ucc):"
"""What collectives are called that run on the host itself, on threads of their own."""
LAZY_EXECUTION: Final = r"^StepMarker$|^SyncLiveTensorsGraph$"
"""What PyTorch/XLA records where a program's lazily recorded graph is cut and run."""
_CAUSES_BY_NAME: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (cause, re.compile(pattern))
    for cause, pattern in (
        (
            "profiler_overhead",
            r"torch/profiler/profiler\.py\("
            r"|torch/autograd/profiler\.py\(\d+\): (?:_start_trace|_stop_trace)",
        ),
        (
            "input",
            r"enumerate\(DataLoader\)|torch/utils/data/dataloader\.py\(\d+\): __next__|DataLoader\.__next__"
            rf"|{LOADER_START}"
            # Marks that JAX and PyTorch/XLA programs set themselves, where nothing else tells what loads data.
            r"|^(?:data|input|load_(?:batch|data)|next_batch|get_batch|fetch_(?:batch|data)|data_?load(?:er|ing))$"
            r"|^Iterator(?:GetNext|::)|^InputPipeline|^ParallelLoader",
        ),
        (
            "compilation",
            # Whenever compiled code runs, Inductor's run, wrapper and __call__ and Triton's launch path are open.
            r"torch/_dynamo/convert_frame\.py|torch/_inductor/async_compile\.py"
            r"|torch/_inductor/compile_fx\.py\(\d+\): (?!(?:run|wrapper)$)"
            r"|torch/_inductor/codecache\.py\(\d+\): (?!(?:__call__|get_current_callable)$)"
            r"|triton/compiler/(?:code_generator|compiler)\.py\(\d+\): (?:compile$|ast_to_ttir|__init__|_init_handles)"
            r"|triton/backends/.*compiler\.py\(\d+\): make_|dynamo_timed|entire_frame_compile|compile_inner"
            # Habana's graph compiler; XLA's, of JAX and of torch_xla, by its clients' calls.
            r"|^compileGraph|^XlaCompil|^(?:\w+::)*\w*(?:Client|Compiler)::Compile(?:AndLoad)?\b"
            r"|^XLAGraphExecutor::Compile$|^backend_compile(?:_and_load)?$"
            # JAX's tracer writes its frames without their folder.
            r"|(?:^|/)compiler\.py\(\d+\): (?:backend_compile|compile_or_get_cached)",
        ),
        (
            "graph_tracing",
            r"^trace_to_jaxpr|^lower_sharding_computation$|(?:^|/)(?:pxla|mlir)\.py\(\d+\): (?:lower_|jaxpr_sub)"
            r"|(?:^|/)(?:partial_eval|pjit)\.py\(\d+\): (?:trace_to_|_create_pjit_jaxpr|_infer_params)",
        ),
        (
            "step_marker",
            r"^StepMarker$|^Sync(?:Live)?TensorsGraph(?:Internal)?$|^CollectSyncTensors$|^ExtractIR|^RunPostOrder$"
            r"|^ScheduleSyncTensorsGraph$",
        ),
        (
            "host_to_device_copy",
            # Of XLA's clients: TPU, CPU and GPU, of JAX and of PyTorch/XLA, and what they do to transfer.
            r"^(?:[\w:]+::)?TransferTo(?:Device|Server|Infeed)\w*(?:$|=>)|^DevicePut|^shard_args$|^cpp_pjit_shard_arg_fallback$"
            r"|::BufferFromHost|::CopyToMemoryVia|::LinearizeHostBuffer|^H2D Dispatch$|^(?:Xla)?Linearize$"
            r"|(?:^|/)(?:pxla|array)\.py\(\d+\): (?:shard_args|batched_device_put|shard_device_array)$",
        ),
        ("garbage_collection", r"built-in function (?:gc\.)?collect>|^gc\.collect|^Garbage collection"),
        (
            "checkpoint",
            r"^stepscope\.checkpoint#|torch/serialization\.py\(\d+\): (?:_?save|_?load)|torch/distributed/checkpoint/",
        ),
        (
            "logging",
            # A progress bar's __iter__ stands around everything that the iterator it shows does.
            r"^stepscope\.logging#|built-in function print>|(?:^|/)tqdm/(?!.*\): __(?:iter|next)__$)"
            r"|(?:^|/)(?:wandb|mlflow|torchmetrics|sklearn/metrics)/|(?:^|/)rich/(?:console|live)\.py"
            r"|torch/utils/tensorboard/|(?:^|/)logging/__init__\.py"
            r"|built-in method (?:write|writelines|flush) of (?:_io\.)?TextIOWrapper"
            r"|built-in method writerows? of _csv\.writer",
        ),
        (
            "communication",
            HOST_BACKEND + r"|(?::|::)barrier$"
            # What Python calls that returns only when the other ranks are there: buffers of DDP, a collective's wait().
            r"|built-in method (?:_broadcast_coalesced|wait) of (?:PyCapsule|pybind11_)"
            r"|distributed_c10d\.py\(\d+\): (?:monitored_)?"
            r"(?:barrier|all_gather_object|broadcast_object_list|gather_object)",
        ),
        (
            "synchronisation",
            r"^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero)$"
            r"|torch/cuda/(?:__init__|streams)\.py\(\d+\): synchronize$"
            r"|(?:^|/)(?:api|array)\.py\(\d+\): (?:block_until_ready|try_to_block|copy_to_host_async)$"
            r"|^ArrayImpl\.copy_to_host_async$|^Acquire semaphore$|^D2H Dispatch$"
            r"|^(?:[\w:]+::)?TransferFrom(?:Device|Server|Outfeed)\w*(?:$|=>)",
        ),
        ("optimizer", r"^Optimizer\.(?:step|zero_grad)#|torch/optim/\w+\.py\("),
        ("dispatch", r"built-in method run_backward |: _engine_run_backward$"),
    )
)
"""The first pattern that a name holds decides. Patterns name what frameworks record, not what users may call things."""

_LIBRARY_PATH: Final = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|/lib/python\d|(?:^|/)torchinductor_[^/]*/|/\.triton/|^<(?!ipython-input-)"
)
"""Where packages and generated code lie; a name in angle brackets is no file, but for that of a notebook's cell."""
_DRIVE: Final = re.compile(r"[A-Za-z]:/")


@lru_cache(maxsize=65536)
def cause_of_name(name: str) -> str | None:
    """The cause a slice's name gives away, None where the name says nothing."""
    return next((cause for cause, pattern in _CAUSES_BY_NAME if pattern.search(name)), None)


@lru_cache(maxsize=65536)
def is_user_file(file: str | None) -> bool:
    """Whether a Python file is the user's: not the standard library's, an installed package's or a framework's."""
    path = (file or "").replace("\\", "/")
    if not path or _LIBRARY_PATH.search(path):
        return False
    if path.startswith("/") or _DRIVE.match(path):
        return not is_framework(path, imported=False)
    path = path.lstrip("./")
    top = path.split("/", 1)[0].removesuffix(".py")
    if top in sys.stdlib_module_names:
        return top == "__main__"
    return not (is_framework(path, imported=True) or is_framework(path, imported=False))


@dataclass(frozen=True, slots=True)
class UserCode:
    """Which files are the user's code, beside what `is_user_file` knows.

    Patterns are globs for a path or for the end of one, in which * also stands for several folders; the name of a
    folder stands for everything in it.

    Attributes:
        also: files that are the user's too, such as a framework that the user maintains.
        not_those: files that are not, whatever else is said of them.
    """

    also: tuple[str, ...] = ()
    not_those: tuple[str, ...] = ()

    def __contains__(self, file: str | None) -> bool:
        return _is_users(self, file)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> UserCode:
        """What the variables STEPSCOPE_USER_CODE and STEPSCOPE_NOT_USER_CODE say; patterns stand apart as in PATH."""
        also, not_those = (
            tuple(part for part in variables.get(name, "").split(os.pathsep) if part.strip("/ "))
            for name in ("STEPSCOPE_USER_CODE", "STEPSCOPE_NOT_USER_CODE")
        )
        return cls(also, not_those)


DEFAULT_USER_CODE: Final = UserCode()


@lru_cache(maxsize=65536)
def _is_users(code: UserCode, file: str | None) -> bool:
    if not file or _matches(file, code.not_those):
        return False
    return _matches(file, code.also) or is_user_file(file)


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    path = file.replace("\\", "/")
    for pattern in patterns:
        inside = pattern.rstrip("/") + "/*"
        if any(fnmatchcase(path, each) for each in (pattern, f"*/{pattern}", inside, f"*/{inside}")):
            return True
    return False
