"""The cross entropy of a linear layer's scores, which are made and forgotten block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepscope.remedies.class_losses import LossSettings, applied, computed_in

_FEWEST_ROWS: Final = 128
"""Positions in a block at least, for a matrix product of fewer mostly reads the weight."""


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    settings: LossSettings,
    rows: int | None,
) -> Tensor:
    """The loss of scores `hidden @ weight.T + bias`.

    Args:
        hidden: of shape (positions, width).
        target: class numbers of any shape with as many numbers; "none" gives losses of that shape.
        rows: positions in a block; None for so many that its scores are as large as hidden.
    """
    flat = target.reshape(-1)
    if rows is None:
        fair = -(-hidden.numel() // max(weight.shape[0], 1))
        rows = max(_FEWEST_ROWS, 1 << max(fair - 1, 0).bit_length())
    if settings.reduction == "none":
        losses = applied(_LinearLosses, hidden, weight, bias, flat, settings, rows)
        return losses.reshape(target.shape)
    weights = settings.weights_of(flat, computed_in(hidden.dtype))
    divisor = weights.sum() if settings.reduction == "mean" else torch.ones_like(weights.sum())
    return applied(_LinearLoss, hidden, weight, bias, flat, settings, rows, divisor, torch.is_grad_enabled())


class _Block(NamedTuple):
    place: slice
    hidden: Tensor
    target: Tensor
    scores: Tensor
    """Of all rows of the weight, in the type the loss is computed in."""


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int) -> Iterator[_Block]:
    for begin in range(0, hidden.shape[0], rows):
        place = slice(begin, begin + rows)
        scores = torch.nn.functional.linear(hidden[place], weight, bias)
        yield _Block(place, hidden[place], target[place], scores.to(computed_in(hidden.dtype)))


class _Gradients:
    """Those of hidden, weight and bias that are wanted, added to block by block."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> None:
        wide = computed_in(hidden.dtype)
        self._weight, self._types = weight, (hidden.dtype, weight.dtype, weight.dtype)
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None

    def add(self, block: _Block, gradient: Tensor) -> None:
        """Add what a block gives.

        Args:
            gradient: of its scores, in the type they are computed in.
        """
        narrow = gradient.to(block.hidden.dtype)
        if self.bias is not None:
            self.bias += gradient.sum(0)
        if self.hidden is not None:
            torch.mm(narrow, self._weight, out=self.hidden[block.place])
        if self.weight is not None and self.weight.dtype == narrow.dtype:
            self.weight.addmm_(narrow.t(), block.hidden)
        elif self.weight is not None:
            self.weight += narrow.t() @ block.hidden

    def all(self) -> tuple[Tensor | None, ...]:
        """Of hidden, weight and bias, in their types."""
        found = (self.hidden, self.weight, self.bias)
        return tuple(
            None if gradient is None else gradient.to(dtype) for gradient, dtype in zip(found, self._types, strict=True)
        )


def _gradient_of(block: _Block, logarithm: Tensor, scale: Tensor, settings: LossSettings) -> Tensor:
    """Written over the block's scores; 0 in those that are padding."""
    block.scores[:, settings.classes :] = 0
    settings.gradient_(block.scores[:, : settings.classes], block.target, logarithm, scale)
    return block.scores


class _LinearLoss(torch.autograd.Function):
    """A mean or sum, whose gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: LossSettings,
        rows: int,
        divisor: Tensor,
        differentiated: bool,
    ) -> Tensor:
        wanted = tuple(needed and differentiated for needed in ctx.needs_input_grad[:3])
        gradients = _Gradients(hidden, weight, bias, wanted)
        total = torch.zeros_like(divisor)
        scale = torch.where(divisor == 0, 0.0, 1 / divisor) * (target != settings.ignore_index)
        for block in _blocks(hidden, weight, bias, target, rows):
            losses, logarithm = settings.losses(block.scores[:, : settings.classes], block.target)
            total += losses.sum()
            if any(wanted):
                gradients.add(block, _gradient_of(block, logarithm, scale[block.place], settings))
        ctx.gradients = gradients.all()
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                'linear_cross_entropy with reduction "mean" or "sum" has one backward pass; take reduction="none" and '
                "its mean, or compute the loss again"
            )
        if upstream.device.type != "cpu" or torch.compiler.is_compiling() or float(upstream) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return (*gradients, None, None, None, None, None)


class _LinearLosses(torch.autograd.Function):
    """Each position's loss; the backward pass makes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: LossSettings, rows: int
    ) -> Tensor:
        losses = torch.empty(target.shape, dtype=computed_in(hidden.dtype), device=hidden.device)
        logarithms = torch.empty_like(losses)
        for block in _blocks(hidden, weight, bias, target, rows):
            found = settings.losses(block.scores[:, : settings.classes], block.target)
            losses[block.place], logarithms[block.place] = found
        ctx.save_for_backward(hidden, weight, bias, target, logarithms)
        ctx.settings, ctx.rows = settings, rows
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, logarithms = ctx.saved_tensors
        settings: LossSettings = ctx.settings
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        scale = torch.where(target == settings.ignore_index, 0.0, upstream)
        with torch.autocast(hidden.device.type, enabled=False):
            for block in _blocks(hidden, weight, bias, target, ctx.rows):
                gradient = _gradient_of(block, logarithms[block.place], scale[block.place], settings)
                gradients.add(block, gradient)
        return (*gradients.all(), None, None, None)
