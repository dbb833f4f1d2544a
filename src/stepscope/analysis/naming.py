"""What the names of host slices say about why the host is busy, and which files are the user's own."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Final

_CAUSES_BY_NAME: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (cause, re.compile(pattern))
    for cause, pattern in (
        (
            "profiler_overhead",
            r"torch/profiler/profiler\.py\("
            r"|torch/autograd/profiler\.py\(\d+\): (?:_start_trace|_stop_trace)",
        ),
        ("input", r"enumerate\(DataLoader\)|torch/utils/data/dataloader\.py\(\d+\): __next__|DataLoader\.__next__"),
        (
            "compilation",
            # Whenever compiled code runs, Inductor's run, wrapper and __call__ and Triton's launch path are open.
            r"torch/_dynamo/convert_frame\.py|torch/_inductor/async_compile\.py"
            r"|torch/_inductor/compile_fx\.py\(\d+\): (?!(?:run|wrapper)$)"
            r"|torch/_inductor/codecache\.py\(\d+\): (?!(?:__call__|get_current_callable)$)"
            r"|triton/compiler/(?:code_generator|compiler)\.py\(\d+\): (?:compile$|ast_to_ttir|__init__|_init_handles)"
            r"|triton/backends/.*compiler\.py\(\d+\): make_|dynamo_timed|entire_frame_compile|compile_inner",
        ),
        ("garbage_collection", r"built-in function (?:gc\.)?collect>|^gc\.collect|^Garbage collection"),
        ("checkpoint", r"torch/serialization\.py\(\d+\): (?:_?save|_?load)|torch/distributed/checkpoint/"),
        (
            "logging",
            # A progress bar's __iter__ stands around everything that the iterator it shows does.
            r"built-in function print>|(?:^|/)tqdm/(?!.*\): __(?:iter|next)__$)|(?:^|/)(?:wandb|mlflow)/"
            r"|torch/utils/tensorboard/|(?:^|/)logging/__init__\.py",
        ),
        (
            "communication",
            r"^gloo:|^mpi:|^ucc:|(?::|::)barrier$"
            r"|distributed_c10d\.py\(\d+\): (?:monitored_)?"
            r"(?:barrier|all_gather_object|broadcast_object_list|gather_object)",
        ),
        (
            "synchronisation",
            r"^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero)$"
            r"|torch/cuda/(?:__init__|streams)\.py\(\d+\): synchronize$",
        ),
        ("optimizer", r"^Optimizer\.(?:step|zero_grad)#|torch/optim/\w+\.py\("),
        ("dispatch", r"built-in method run_backward |: _engine_run_backward$"),
    )
)
"""The first pattern that a name holds decides. Patterns name what frameworks record, not what users may call things."""

# fmt: off
_FRAMEWORKS: Final = frozenset({
    "torch", "torchvision", "torchaudio", "torchtext", "torch_xla", "functorch", "triton", "transformers",
    "accelerate", "datasets", "tokenizers", "diffusers", "peft", "trl", "timm", "lightning", "pytorch_lightning",
    "lightning_fabric", "torchmetrics", "deepspeed", "megatron", "apex", "xformers", "flash_attn", "vllm", "sglang",
    "fairseq", "ignite", "fastai", "numpy", "pandas", "scipy", "sklearn", "PIL", "cv2", "tqdm", "wandb",
    "tensorboard", "mlflow", "tensorflow", "jax", "jaxlib", "flax", "keras", "ray", "hydra", "omegaconf", "click",
    "typer", "pytest", "IPython", "ipykernel", "stepscope", "habana_frameworks", "torchrec", "fbgemm_gpu", "einops",
    "safetensors", "huggingface_hub", "bitsandbytes",
})
# fmt: on
_LIBRARY_PATH: Final = re.compile(r"(?:^|/)(?:site-packages|dist-packages)/|/lib/python\d|^<(?!ipython-input-)|^$")
"""A name in angle brackets is no file, unless it is that of a notebook's cell."""


@lru_cache(maxsize=65536)
def cause_of_name(name: str) -> str | None:
    """The cause a slice's name gives away, None where the name says nothing."""
    return next((cause for cause, pattern in _CAUSES_BY_NAME if pattern.search(name)), None)


@lru_cache(maxsize=65536)
def is_user_file(file: str | None) -> bool:
    """Whether a Python file is the user's: not the standard library's, an installed package's or a framework's."""
    if not file or _LIBRARY_PATH.search(file):
        return False
    top = file.lstrip("./").split("/", 1)[0].removesuffix(".py")
    if top in sys.stdlib_module_names or top in _FRAMEWORKS:
        return top == "__main__"
    return not any(f"/{package}/" in file for package in ("torch", "torchvision", "transformers", "accelerate"))
