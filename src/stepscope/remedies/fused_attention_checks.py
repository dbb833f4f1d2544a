"""What `attention` accepts: the vendor's rules for its fused kernel, held on every device so that code is portable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stepscope.remedies.fused_attention_blocks import Settings

SOFTMAX_MODES: Final = ("exact", "fast")
PADDINGS: Final = ("left", "right")


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise TypeError or ValueError where the three do not fit each other."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head size), not {_shape(tensor)}")
    found = f"query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query, key and value must have the same batch size, which is not broadcast: {found}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key and value must have the same number of heads and the same length: {found}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head size: {found}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"query's heads must be a multiple of key's and value's: {found}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        types = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"query, key and value must have the same floating-point type, not {types}")
    if not query.device == key.device == value.device:
        devices = f"{query.device}, {key.device} and {value.device}"
        raise ValueError(f"query, key and value must be on the same device, not on {devices}")
    if query.device.type == "hpu" and query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the HPU's fused attention takes float32 and bfloat16, not {query.dtype}")


def check_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> None:
    """Raise TypeError or ValueError where the mask does not fit."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, not {type(mask).__name__}")
    if is_causal:
        raise ValueError("attn_mask cannot be given together with is_causal=True: put the triangle into the mask")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ValueError(f"attn_mask must be boolean, float32 or of query's type {query.dtype}, not {mask.dtype}")
    if mask.device != query.device:
        raise ValueError(f"attn_mask must be on query's device {query.device}, not on {mask.device}")
    full = (*query.shape[:3], key.shape[2])
    fits = mask.dim() <= 4 and all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(full), strict=False))
    if not fits or mask.dim() < 2:
        raise ValueError(
            f"attn_mask must have 2 to 4 dimensions that can be broadcast to (batch, heads, queries, keys) = {full}, "
            f"not {_shape(mask)}"
        )


def check_options(dropout_p: float, scale: float | None, softmax_mode: str, seq_padding: str) -> None:
    """Raise TypeError or ValueError for a value that none of the devices knows."""
    for name, number in (("dropout_p", dropout_p), ("scale", scale)):
        if not isinstance(number, (int, float)) and not (name == "scale" and number is None):
            raise TypeError(f"{name} must be a number, not {type(number).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is a chance from 0 to 1, not {dropout_p}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, or None for 1 / sqrt(head size), not {scale}")
    if softmax_mode not in SOFTMAX_MODES:
        raise ValueError(f'softmax_mode is "exact" or "fast", not {softmax_mode!r}')
    if seq_padding not in PADDINGS:
        raise ValueError(f'seq_padding is "left" or "right", not {seq_padding!r}')


def check_modes(query: Tensor, settings: Settings, training: bool, recompute: bool) -> None:
    """Raise TypeError or ValueError for a combination that the fused kernels do not have."""
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute must be True, False or None, not {recompute!r}")
    if settings.fast and query.dtype != torch.bfloat16:
        raise ValueError(f'softmax_mode="fast" is for bfloat16, not {query.dtype}: use "exact"')
    if settings.fast and training and recompute and not settings.causal:
        raise ValueError(
            'softmax_mode="fast" cannot train in recompute mode with is_causal=False: use "exact", or recompute=False'
        )
    if settings.want_dropout and recompute:
        raise ValueError("return_dropout_mask=True needs recompute=False: in recompute mode no dropout mask is kept")
    if settings.want_probabilities and training:
        raise ValueError("return_attn_probs=True is for inference: use torch.no_grad(), or inputs without gradients")
    if settings.want_probabilities and query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"return_attn_probs=True is for float32 and bfloat16, not {query.dtype}")


def check_lengths(
    lengths: Tensor | Sequence[int] | None, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> None:
    """Raise TypeError or ValueError where the valid lengths do not fit.

    Values that are on another device than the CPU are not looked at, because that would wait for the device.
    """
    if lengths is None:
        return
    if not is_causal or mask is not None:
        raise ValueError("valid_seq_len needs is_causal=True and attn_mask=None")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"valid_seq_len needs as many keys as queries, not {key.shape[2]} and {query.shape[2]}")
    if isinstance(lengths, Tensor):
        if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
            raise ValueError(f"valid_seq_len must hold integers, not {lengths.dtype}")
        found = tuple(lengths.shape)
    elif isinstance(lengths, Sequence) and all(hasattr(n, "__index__") for n in lengths):
        found = (len(lengths),)
    else:
        raise TypeError("valid_seq_len must be a tensor or a list of integers, one for each batch element")
    if found != (query.shape[0],):
        raise ValueError(f"valid_seq_len must have one length for each of {query.shape[0]} batch elements, not {found}")
    if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
        return
    for length in lengths.tolist() if isinstance(lengths, Tensor) else lengths:
        if not 0 <= length <= query.shape[2]:
            raise ValueError(f"valid_seq_len must lie between 0 and the padded length {query.shape[2]}, not {length}")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
