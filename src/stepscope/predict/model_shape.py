"""What a language model is made of, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from stepscope.errors import UsageError
from stepscope.files import read_small
from stepscope.predict.operations import BYTES

TYPES: Final = ("bf16", "fp16", "fp8")
"""Number types of weights, and of the cache of keys and values."""
_LARGEST_MIB: Final = 4
_MOST: Final = 10**9
_ACTIVATIONS: Final = ("hidden_act", "hidden_activation", "activation_function", "activation")
_GATED: Final = ("silu", "swish", "swiglu")
"""Activations of feed-forward parts with three matrices, in families that are not listed below."""
_GATED_FAMILIES: Final = (
    "gemma", "llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "internlm", "olmo", "cohere",
)  # fmt: skip
"""Beginnings of `model_type` of families with three matrices, whatever their activation."""
_PLAIN_FAMILIES: Final = (
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "codegen",
    "starcoder2",
)  # fmt: skip
_UNTIED: Final = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "phi", "internlm", "olmo", "gpt_neox", "gptj", "codegen",
)  # fmt: skip
"""Families whose output layer has weights of its own where the configuration says nothing, as in transformers."""
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_size": ("head_dim",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk"),
    "expert_feed_forward": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "longest": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
"""What a model is made of, and how Hugging Face's configurations call it."""
_NOT_DESCRIBED: Final[Mapping[str, str]] = {
    "kv_lora_rank": "attention with a compressed cache (MLA)",
    "ssm_cfg": "a state-space model",
    "mamba_d_state": "layers of a state-space model",
    "linear_num_key_heads": "layers of linear attention",
    "is_encoder_decoder": "an encoder and a decoder",
}
"""Keys of models whose passes `predict.serving` does not describe."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer that generates.

    Attributes:
        kv_heads: heads of the cache.
        feed_forward: width between the matrices of the feed-forward part, which has three if `gated`, else two.
        tied: whether the output layer is the embedding's table.
        weights: number type of the file's weights, one of TYPES.
        experts, experts_per_token: of each layer but the first `dense_layers`; 0 without experts.
        window: tokens to which attention is limited in some layers; None where it is not.
        longest: tokens of prompt and answer that it was made for; None where unknown.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    gated: bool
    tied: bool = False
    weights: str = "bf16"
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    window: int | None = None
    longest: int | None = None

    @property
    def attention_numbers(self) -> int:
        """Numbers of a layer's four matrices around attention."""
        return self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)

    @property
    def parameters(self) -> int:
        """Numbers of all matrices; norms and biases are left out."""
        matrices = 3 if self.gated else 2
        dense = matrices * self.hidden * self.feed_forward
        width = self.expert_feed_forward * (self.experts + self.shared_experts)
        sparse = self.hidden * (matrices * width + self.experts)
        sparse_layers = self.layers - self.dense_layers if self.experts else 0
        layers = self.layers * self.attention_numbers + (self.layers - sparse_layers) * dense + sparse_layers * sparse
        return layers + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def cache_bytes(self, tokens: int, number_type: str) -> int:
        """Bytes of keys and values of this many tokens."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_size * BYTES[number_type]


def read_model(path: Path) -> ModelShape:
    """Read a model's `config.json`, as Hugging Face's transformers write it, or the folder that holds it.

    Raises:
        UsageError: the file cannot be read, or describes no transformer that this module knows.
    """
    file = path / "config.json" if path.is_dir() else path
    if file is not path and not file.exists():
        raise UsageError(f"{path} has no config.json: name the model's configuration, or the folder that holds it")
    try:
        text = read_small(file, _LARGEST_MIB, ", too large for a model's config.json")
        if not text.strip():
            raise UsageError(f"{file} is empty")
        content = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(f"{file} is not a model's config.json: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a model's config.json: it holds no object")
    return model_of(content, str(file))


def model_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """The model that a configuration describes.

    Args:
        where: the file's name, for messages.
    """
    inner = config.get("text_config")
    found = {**config, **inner} if isinstance(inner, dict) else dict(config)
    for key, what in _NOT_DESCRIBED.items():
        if found.get(key):
            raise UsageError(f"{where}: {key!r} tells {what}, which is not predicted")
    sizes = {name: _size(found, keys, where) for name, keys in _KEYS.items()}
    missing = [_KEYS[name][0] for name in ("layers", "hidden", "heads", "vocabulary") if not sizes[name]]
    if missing:
        raise UsageError(f"{where} is not a transformer's config.json: {', '.join(missing)} is missing")
    hidden, heads = sizes["hidden"] or 1, sizes["heads"] or 1
    kv_heads = 1 if found.get("multi_query") and not found.get("new_decoder_architecture") else sizes["kv_heads"]
    family = str(found.get("model_type", ""))
    feed_forward = sizes["feed_forward"] or 4 * hidden
    window = found.get("sliding_window") if found.get("use_sliding_window", True) else None
    return ModelShape(
        name=str(found.get("_name_or_path") or family or "the model")[:200],
        layers=sizes["layers"] or 1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=sizes["head_size"] or max(hidden // heads, 1),
        feed_forward=feed_forward,
        vocabulary=sizes["vocabulary"] or 1,
        gated=_is_gated(found, where),
        tied=bool(found.get("tie_word_embeddings", not family.startswith(_UNTIED))),
        weights=_weights(found, where),
        experts=sizes["experts"] or 0,
        experts_per_token=min(sizes["experts_per_token"] or 1, sizes["experts"] or 0),
        expert_feed_forward=sizes["expert_feed_forward"] or feed_forward,
        shared_experts=sizes["shared_experts"] or 0,
        dense_layers=min(sizes["dense_layers"] or 0, sizes["layers"] or 1),
        window=window if isinstance(window, int) and window > 0 else None,
        longest=sizes["longest"],
    )


def _is_gated(found: Mapping[str, Any], where: str) -> bool:
    family = str(found.get("model_type", ""))
    if family.startswith(_GATED_FAMILIES):
        return True
    activation = next((str(found[key]) for key in _ACTIVATIONS if found.get(key)), "")
    if not activation and family not in _PLAIN_FAMILIES:
        raise UsageError(
            f"{where}: hidden_act is missing, and model_type is no family that is known: whether the feed-forward part "
            "has two matrices or three is unknown"
        )
    return activation in _GATED and family not in _PLAIN_FAMILIES


def _size(found: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int | None:
    key = next((key for key in keys if found.get(key) is not None), None)
    if key is None:
        return None
    value = found[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise UsageError(f"{where}: {key!r} should be a whole number from 0 to {_MOST:,}, not {str(value)[:80]!r}")
    return value


def _weights(found: Mapping[str, Any], where: str) -> str:
    quantization = found.get("quantization_config")
    if isinstance(quantization, dict):
        method = str(quantization.get("quant_method"))
        if method == "fp8" or "float" in str(quantization.get("config_groups", "")):
            return "fp8"
        raise UsageError(f"{where}: weights as {method!r} are not predicted, only {', '.join(TYPES)}")
    kept = str(found.get("torch_dtype") or found.get("dtype") or "")
    return "fp16" if kept == "float16" else "bf16"
