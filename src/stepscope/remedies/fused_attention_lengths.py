"""Causal attention over sequences of different lengths in one padded batch, without work for the padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK: Final = 128
"""Queries and keys of a block of flex_attention: its own default."""

Results = tuple[Tensor, Tensor | None, Tensor | None]


def attend_by_element(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    padding: str,
    attend: Callable[[Tensor, Tensor, Tensor], Results],
) -> Results:
    """Call `attend` for the valid part of each batch element; padding has zeros in all that it returns.

    Padding is never read, so that its values do not matter, and its gradients are zeros.
    """
    if not query.shape[0]:
        return attend(query, key, value)
    whole = query.shape[2]
    found: list[list[Tensor]] = [[], [], []]
    for q, k, v, length in zip(query.unbind(), key.unbind(), value.unbind(), lengths, strict=True):
        begin = whole - length if padding == "left" else 0
        around = (begin, whole - begin - length)
        valid = [each.narrow(1, begin, length)[None] for each in (q, k, v)]
        results = attend(*valid)
        for results_of_kind, result, borders in zip(found, results, ((0, 0), around, around), strict=True):
            if result is not None:
                results_of_kind.append(pad(result[0], (*borders, *around)))
    output, probabilities, kept = (torch.stack(each) if each else None for each in found)
    assert output is not None
    return output, probabilities, kept


def can_use_flex(query: Tensor, lengths: Tensor | Sequence[int], dropout_p: float) -> bool:
    """Whether flex_attention can take the lengths as they are, on the device: CUDA with Triton, PyTorch 2.7 or so."""
    return (
        isinstance(lengths, Tensor)
        and lengths.device == query.device
        and query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[-1] >= 16
        and not dropout_p
        and _has_flex()
    )


@cache
def _has_flex() -> bool:
    if find_spec("triton") is None or find_spec("torch.nn.attention.flex_attention") is None:
        return False
    from torch.nn.attention.flex_attention import BlockMask

    return "seq_lengths" in inspect.signature(BlockMask.from_kv_blocks).parameters


@cache
def _compiled_flex() -> Callable[..., Any]:
    """flex_attention, compiled once a process: not compiled it would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    padding: str,
    scale: float,
    flex: Callable[..., Any] | None = None,
) -> Tensor:
    """One kernel over all elements that skips padded blocks by the lengths on the device; nothing waits for them."""
    begin, end = _borders(lengths, query.shape[2], padding)
    output: Tensor = (flex or _compiled_flex())(
        query,
        key,
        value,
        block_mask=block_mask(begin, end, query.shape[2]),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return zero_padding(output, lengths, padding)


def zero_padding(output: Tensor, lengths: Tensor, padding: str) -> Tensor:
    """Zeros in the padded rows of (batch, heads, queries, size), and in their gradients."""
    begin, end = _borders(lengths, output.shape[2], padding)
    number = torch.arange(output.shape[2], device=output.device)
    padded = (number < begin[:, None]) | (number >= end[:, None])
    return output.masked_fill(padded[:, None, :, None], 0)


def block_mask(begin: Tensor, end: Tensor, length: int) -> Any:
    """flex_attention's mask of the causal part of positions `begin` (inclusive) to `end`, one pair a batch element.

    Made from the borders of the blocks alone, (batch, blocks, blocks), on the device of the lengths.
    """
    from torch.nn.attention.flex_attention import BlockMask

    number = torch.arange(-(-length // _BLOCK), device=begin.device)
    first, rows, keys = begin[:, None, None], number[None, :, None], number[None, None, :]
    last = end[:, None, None]
    touched = (keys <= rows) & ((keys + 1) * _BLOCK > first) & ((rows + 1) * _BLOCK > first) & (rows * _BLOCK < last)
    touched &= first < last
    full = (keys < rows) & (keys * _BLOCK >= first) & ((rows + 1) * _BLOCK <= last)

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (key >= begin[batch]) & (row < end[batch])

    return BlockMask.from_kv_blocks(
        *_ordered(touched & ~full), *_ordered(full), BLOCK_SIZE=_BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each row of blocks has, and their numbers, these first; a dimension for heads is added."""
    chosen = blocks.to(torch.int32)
    numbers = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen.sum(-1, dtype=torch.int32)[:, None], numbers[:, None]


def _borders(lengths: Tensor, whole: int, padding: str) -> tuple[Tensor, Tensor]:
    """First position and the one after the last of each element; what is out of range is taken for its border."""
    lengths = lengths.clamp(0, whole)
    if padding == "left":
        return whole - lengths, torch.full_like(lengths, whole)
    return torch.zeros_like(lengths), lengths
