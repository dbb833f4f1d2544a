"""Attention block by block in plain operators: softmax(scale * Q K^T + mask) V without ever holding all scores.

A block is some queries of some heads with all the keys they see. Its scores are computed, used and freed, and the
backward pass recomputes them (the idea of Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021).
It is used where PyTorch's own kernels would write the scores out, or copy the mask: see `attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

_BITS: Final = 16
_VALUES: Final = 2**_BITS
"""Range of the random numbers: four are cut from 64 random bits, because drawing dominates on a CPU."""


class Dropout:
    """Draw dropout masks part by part; the same seed gives the same parts in the same order.

    Args:
        chance: dropout probability of each value, 0 to 1; drawn in steps of 2**-16, so to within 0.000008.
    """

    def __init__(self, chance: float, seed: int, device: torch.device) -> None:
        self._chance = chance
        self._threshold = min(round(chance * _VALUES), _VALUES - 1) - _VALUES // 2
        self._generator = torch.Generator(device).manual_seed(seed) if chance else None

    @staticmethod
    def new_seed() -> int:
        """Draw a seed from the CPU's default generator: `torch.manual_seed` governs it, and no device is waited for."""
        return int(torch.randint(2**62, (), device="cpu"))

    def next(self, shape: torch.Size) -> Tensor:
        """The next part as int16: 1 where a value is kept, 0 where it is dropped.

        Integers, because comparing and masking booleans is several times slower on a CPU than arithmetic.
        """
        assert self._generator is not None
        count = shape.numel()
        if self._chance >= 1:
            return torch.zeros(shape, dtype=torch.int16, device=self._generator.device)
        bits = torch.empty(-(-count * _BITS // 64), dtype=torch.int64, device=self._generator.device)
        bits.random_(-(2**63), None, generator=self._generator)
        return bits.view(torch.int16)[:count].view(shape).ge_(self._threshold)

    def factors(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Factors for the values: 0 where dropped, else 1 / (1 - chance)."""
        factors = kept.to(dtype)
        return factors if self._chance >= 1 else factors.mul_(1 / (1 - self._chance))


BLOCK_BYTES: Final = 2**20
"""Largest size of a block's scores, if that leaves `_LEAST_ROWS` queries: what a CPU's cache can hold."""
_LEAST_ROWS: Final = 16
_CAUSAL_ROWS: Final = 128
"""Most queries of a block under a causal mask: a larger block computes more hidden scores."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments that all blocks share.

    Attributes:
        fast: scores and probabilities in the inputs' own dtype instead of FP32.
        keep_dropout: keep the dropout mask for the backward pass, a byte a score, instead of drawing it again.
        want_dropout: also return which probabilities were kept, (batch, heads, queries, keys), boolean.
        want_probabilities: also return the probabilities before dropout, (batch, heads, queries, keys).
    """

    scale: float
    causal: bool = False
    dropout_p: float = 0.0
    fast: bool = False
    keep_dropout: bool = False
    want_dropout: bool = False
    want_probabilities: bool = False


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute attention in blocks, with gradients for query, key, value and a float mask.

    Args:
        query: (batch, heads, queries, head size).
        key, value: (batch, key heads, keys, head size); heads is a multiple of key heads, value's size may differ.
        mask: boolean, True where a key is seen, or floats added to the scores; broadcast to (batch, heads, queries,
            keys).

    Returns:
        (output, probabilities or None, dropout mask or None); the output of a query that sees no key is zero.
    """
    seed = Dropout.new_seed() if settings.dropout_p else 0
    results: tuple[Tensor, Tensor | None, Tensor | None]
    results = _BlockAttention.apply(query, key, value, mask, settings, seed)  # type: ignore[no-untyped-call]
    return results


@dataclass(frozen=True, slots=True)
class _Block:
    """Batch elements, key heads, queries, and the number of keys they see."""

    batch: slice
    heads: slice
    rows: slice
    keys: int

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Slice this block out of a tensor of shape (batch, key heads, group, queries, size)."""
        return tensor[self.batch, self.heads, :, self.rows]

    def of_scores(self, tensor: Tensor) -> Tensor:
        """Slice this block out of a tensor with one value per score, (batch, key heads, group, queries, keys).

        A dimension of size 1 is broadcast.
        """
        index = (self.batch, self.heads, slice(None), self.rows, slice(self.keys))
        return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, index, strict=True))]


@dataclass(frozen=True, slots=True)
class _Part:
    """Batch elements and key heads whose blocks are consecutive; keys and values are (both together, keys, size)."""

    batch: slice
    heads: slice
    keys: Tensor
    values: Tensor
    blocks: list[_Block]


class _Scores:
    """Splits attention into blocks, and computes the probabilities of one."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings) -> None:
        self.settings = settings
        self.key, self.value = key, value
        self.heads = (key.shape[1], query.shape[1] // key.shape[1])
        self.query = self.by_key_head(query)
        self.exact = torch.promote_types(query.dtype, torch.float32)
        self.computed = query.dtype if settings.fast else self.exact
        self.hidden = torch.finfo(self.computed).min
        self.mask = None if mask is None else self.by_key_head(mask[(None,) * (4 - mask.dim())])

    def by_key_head(self, tensor: Tensor) -> Tensor:
        """Reshape (batch, heads, ...) to (batch, key heads, group, ...)."""
        if tensor.shape[1] == 1:
            return tensor.unsqueeze(2)
        return torch.unflatten(tensor, 1, self.heads)

    def parts(self) -> Iterator[_Part]:
        """Yield all parts; their blocks cover every score that no causal mask hides."""
        batch, heads, group, length, _ = self.query.shape
        per_row = max(group * self.key.shape[2] * self.computed.itemsize, 1)
        rows = max(BLOCK_BYTES // per_row, _LEAST_ROWS)
        rows = max(min(length, rows, _CAUSAL_ROWS if self.settings.causal else rows), 1)
        heads_at_once = max(min(heads, BLOCK_BYTES // (per_row * rows)), 1)
        batch_at_once = max(min(batch, BLOCK_BYTES // (per_row * rows * heads)), 1)
        for first in range(0, batch, batch_at_once):
            for head in range(0, heads, heads_at_once):
                yield self._part(slice(first, first + batch_at_once), slice(head, head + heads_at_once), rows)

    def _part(self, batch: slice, heads: slice, rows: int) -> _Part:
        keys, values = (each[batch, heads].to(self.computed).flatten(0, 1) for each in (self.key, self.value))
        length, seen = self.query.shape[3], keys.shape[1]
        ends = [(row, min(row + rows, length)) for row in range(0, length, rows)]
        blocks = [
            _Block(batch, heads, slice(row, end), min(end, seen) if self.settings.causal else seen) for row, end in ends
        ]
        return _Part(batch, heads, keys, values, blocks)

    def weights(self, part: _Part, block: _Block) -> tuple[Tensor, Tensor, torch.Size]:
        """Scaled queries and probabilities, (batch and key heads, group and queries, ...); the scores' full shape."""
        queries = block.of_queries(self.query)
        rows = (queries.to(self.exact) * self.settings.scale).to(self.computed)
        shape = torch.Size((*queries.shape[:-1], block.keys))
        rows = rows.flatten(2, 3).flatten(0, 1)
        scores = rows @ part.keys[:, : block.keys].mT
        if self.settings.causal and block.keys > block.rows.start:
            later = scores.new_full((shape[3], block.keys - block.rows.start), self.hidden).triu_(1)
            scores.view(shape)[..., block.rows.start :] += later
        if self.mask is None:
            return rows, torch.softmax(scores, -1), shape
        return rows, self._masked(scores.view(shape), block.of_scores(self.mask)).view_as(scores), shape

    def _masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Probabilities under a mask, 0 for a query that sees no key.

        Arithmetic with a large number for infinity: on a CPU several times as fast as filling by booleans.
        """
        if mask.dtype == torch.bool:
            numbers = mask.view(torch.uint8)
            seeing = numbers.amax(-1, keepdim=True)
            scores += numbers.to(scores.dtype).sub_(1).mul_(-self.hidden)
        else:
            seeing = mask.amax(-1, keepdim=True) > -torch.inf
            scores.add_(mask).clamp_(min=self.hidden)
        return torch.softmax(scores, -1).mul_(seeing.to(scores.dtype))


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings, seed: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        with torch.autocast(query.device.type, enabled=False):
            output, probabilities, kept, held = _forward(query, key, value, mask, settings, seed)
        ctx.save_for_backward(query, key, value, mask, *held)
        ctx.settings, ctx.seed = settings, seed
        ctx.mark_non_differentiable(*(each for each in (probabilities, kept) if each is not None))
        return output, probabilities, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *held = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            scores = _Scores(query, key, value, mask, ctx.settings)
            gradients = _Gradients(scores, ctx.seed, held, with_mask=ctx.needs_input_grad[3])
            for part in scores.parts():
                gradients.add(part, scores.by_key_head(grad))
        grad_mask = None if gradients.mask is None else gradients.mask.view(mask.shape).to(mask.dtype)
        return gradients.query.flatten(1, 2), gradients.key, gradients.value, grad_mask, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings, seed: int
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Return output, probabilities, dropout mask, and the masks kept for the backward pass."""
    scores = _Scores(query, key, value, mask, settings)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    full = (*query.shape[:-1], key.shape[2])
    probabilities = query.new_zeros(full) if settings.want_probabilities else None
    kept = query.new_zeros(full, dtype=torch.bool) if settings.want_dropout else None
    dropout = Dropout(settings.dropout_p, seed, query.device)
    held: list[Tensor] = []
    for part in scores.parts():
        for block in part.blocks:
            _, weights, shape = scores.weights(part, block)
            if probabilities is not None:
                block.of_scores(scores.by_key_head(probabilities)).copy_(weights.view(shape))
            if settings.dropout_p:
                stays = dropout.next(weights.shape)
                weights *= dropout.factors(stays, weights.dtype)
                if settings.keep_dropout:
                    held.append(stays.to(torch.uint8))
                if kept is not None:
                    block.of_scores(scores.by_key_head(kept)).copy_(stays.view(shape))
            elif kept is not None:
                block.of_scores(scores.by_key_head(kept)).fill_(True)
            rows = weights @ part.values[:, : block.keys]
            block.of_queries(scores.by_key_head(output)).copy_(rows.view(*shape[:-1], rows.shape[-1]))
    return output, probabilities, kept, held


class _Gradients:
    """Gradients of the inputs, filled part by part; `query` is (batch, key heads, group, queries, size)."""

    def __init__(self, scores: _Scores, seed: int, held: list[Tensor], *, with_mask: bool) -> None:
        self._scores = scores
        self._dropout = Dropout(scores.settings.dropout_p, seed, scores.query.device)
        self._held = iter(held) if held else None
        self.query = torch.empty(scores.query.shape, dtype=scores.query.dtype, device=scores.query.device)
        self.key, self.value = torch.empty_like(scores.key), torch.empty_like(scores.value)
        mask = scores.mask
        self.mask = torch.zeros_like(mask, dtype=scores.exact) if mask is not None and with_mask else None

    def add(self, part: _Part, grad: Tensor) -> None:
        """Fill the gradients of a part's queries, keys and values; `grad` is the output's, shaped as the queries."""
        sums = (each.mT.shape for each in (part.keys, part.values))
        key, value = (part.keys.new_zeros(shape, dtype=self._scores.exact) for shape in sums)
        for block in part.blocks:
            rows, weights, shape = self._scores.weights(part, block)
            seen = slice(block.keys)
            grad_rows = block.of_queries(grad).to(rows.dtype).flatten(2, 3).flatten(0, 1)
            grad_weights = grad_rows @ part.values[:, seen].mT
            used = self._dropped(weights, grad_weights)
            value[..., seen] += grad_rows.mT @ used  # transposed: twice as fast on a CPU as used.mT @ grad_rows
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            key[..., seen] += rows.mT @ grad_scores
            grad_query = (grad_scores @ part.keys[:, seen]).mul_(self._scores.settings.scale)
            block.of_queries(self.query).copy_(grad_query.view(*shape[:-1], grad_query.shape[-1]))
            if self.mask is not None:
                mask = block.of_scores(self.mask)
                mask += grad_scores.view(shape).sum_to_size(mask.shape)
        for whole, summed in ((self.key, key), (self.value, value)):
            target = whole[part.batch, part.heads]
            target.copy_(summed.mT.view(target.shape))

    def _dropped(self, weights: Tensor, grad_weights: Tensor) -> Tensor:
        """The weights after dropout; the same dropout is applied to their gradient in place."""
        if not self._scores.settings.dropout_p:
            return weights
        stays = next(self._held) if self._held is not None else self._dropout.next(weights.shape)
        factors = self._dropout.factors(stays, weights.dtype)
        grad_weights *= factors
        return factors.mul_(weights)


_BLOCK: Final = 128
"""Queries and keys of a block of flex_attention: its default."""

Results = tuple[Tensor, Tensor | None, Tensor | None]


def attend_by_element(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    padding: str,
    attend: Callable[[Tensor, Tensor, Tensor], Results],
) -> Results:
    """Call `attend` for the valid part of each batch element; padded positions of its results are zero."""
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
    """Compile flex_attention once per process: uncompiled, it would hold all scores."""
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
    """Run one kernel over all elements that skips padded blocks by the lengths on the device, without a wait."""
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
    """Set padded rows of (batch, heads, queries, size), and their gradients, to zero."""
    begin, end = _borders(lengths, output.shape[2], padding)
    number = torch.arange(output.shape[2], device=output.device)
    padded = (number < begin[:, None]) | (number >= end[:, None])
    return output.masked_fill(padded[:, None, :, None], 0)


def block_mask(begin: Tensor, end: Tensor, length: int) -> Any:
    """Build flex_attention's mask for the causal part of positions `begin` (inclusive) to `end`, one pair per element.

    It is computed from the block borders alone, (batch, blocks, blocks), on the device of the lengths.
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
    """The number of key blocks of each row of blocks, and their indices first; a head dimension is added."""
    chosen = blocks.to(torch.int32)
    numbers = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen.sum(-1, dtype=torch.int32)[:, None], numbers[:, None]


def _borders(lengths: Tensor, whole: int, padding: str) -> tuple[Tensor, Tensor]:
    """First position and end (exclusive) of each element, clamped to the valid range."""
    lengths = lengths.clamp(0, whole)
    if padding == "left":
        return whole - lengths, torch.full_like(lengths, whole)
    return torch.zeros_like(lengths), lengths
