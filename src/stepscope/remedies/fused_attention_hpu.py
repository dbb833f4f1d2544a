"""Attention by the fused kernel of Intel's Gaudi software, which is imported only where tensors are on an HPU."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stepscope.remedies.fused_attention_blocks import Settings
from stepscope.remedies.fused_attention_lengths import zero_padding


def vendor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    settings: Settings,
    scale: float | None,
    recompute: bool,
    valid_seq_len: Tensor | Sequence[int] | None,
    seq_padding: str,
) -> Any:
    """`FusedSDPA.apply` with its arguments in the documented order.

    Source: Intel Gaudi documentation, "Using Fused Scaled Dot Product Attention (FusedSDPA)".

    Raises:
        RuntimeError: the vendor's package is not installed.
    """
    try:
        kernel = import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
    except ImportError as error:
        raise RuntimeError(
            "attention on an HPU needs habana_frameworks of the Intel Gaudi software, which cannot be imported"
        ) from error
    group = query.shape[1] // key.shape[1]
    if group > 1:  # the kernel wants the same number of heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    lengths = None
    if valid_seq_len is not None:
        lengths = torch.as_tensor(valid_seq_len, dtype=torch.int32).to(query.device)
    results = kernel.apply(
        query,
        key,
        value,
        attn_mask,
        settings.dropout_p,
        settings.causal,
        scale,
        "fast" if settings.fast else "None",
        recompute,
        lengths,
        seq_padding,
        settings.want_dropout,
        settings.want_probabilities,
    )
    if lengths is None:
        return results
    if isinstance(results, Tensor):
        return zero_padding(results, lengths, seq_padding)
    return (zero_padding(results[0], lengths, seq_padding), *results[1:])
