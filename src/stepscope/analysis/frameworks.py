"""Which files are a framework's wherever they lie: known packages, and how a checkout of their sources looks."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    """Whether the folder around a package, but for one such as src, is named like the package's sources."""
    if around and around[-1].lower() in _BETWEEN:
        around = around[:-1]
    if not around:
        return False
    names = {_plain(name) for name in (package, *_REPOSITORIES.get(package, ()))}
    return bool(names & {_plain(around[-1]), _plain(_FORK.sub("", around[-1].lower()))})


def _plain(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())
