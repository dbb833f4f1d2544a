"""Cross entropy in blocks of positions: no second tensor as large as the scores, or no scores held at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepscope.remedies.settings import autocast_type

Reduction: TypeAlias = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings of a cross-entropy loss.

    Attributes:
        classes: number of classes; scores beyond them are padding.
        class_weight: of shape (classes,), in the dtype the loss is computed in.
    """

    classes: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: Reduction
    class_weight: Tensor | None

    def weights_of(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Each position's weight, 0 if it is ignored; a mean is divided by their sum."""
        counted = target != self.ignore_index
        if self.class_weight is None:
            return counted.to(dtype)
        return torch.where(counted, self.class_weight[self._places(target)], 0.0)

    def losses(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and log-sum-exp, both of shape (positions,), of scores of shape (positions, classes)."""
        logarithm = torch.logsumexp(scores, -1)
        weights = self.weights_of(target, scores.dtype)
        chosen = scores.gather(-1, self._places(target).unsqueeze(-1)).squeeze(-1)
        losses = (1 - self.label_smoothing) * weights * (logarithm - chosen)
        if self.label_smoothing:
            weighted = scores.sum(-1) if self.class_weight is None else scores @ self.class_weight
            losses = losses + self.label_smoothing / self.classes * (self._weight_sum() * logarithm - weighted)
        if self.z_loss:
            losses = losses + self.z_loss * logarithm**2
        return torch.where(target != self.ignore_index, losses, 0.0), logarithm

    def gradient_(self, scores: Tensor, target: Tensor, logarithm: Tensor, scale: Tensor) -> Tensor:
        """Overwrite the scores with the gradient times `scale` (positions,), which is 0 at ignored positions."""
        hard = (1 - self.label_smoothing) * self.weights_of(target, scores.dtype)
        factor = hard
        smooth = self.label_smoothing / self.classes
        if smooth:
            factor = factor + smooth * self._weight_sum()
        if self.z_loss:
            factor = factor + 2 * self.z_loss * logarithm
        scores.sub_(logarithm.unsqueeze(-1)).exp_().mul_((factor * scale).unsqueeze(-1))
        if smooth and self.class_weight is not None:
            scores.addcmul_((smooth * scale).unsqueeze(-1), self.class_weight, value=-1)
        elif smooth:
            scores.sub_((smooth * scale).unsqueeze(-1))
        places = self._places(target).unsqueeze(-1)
        # Not scatter_add_, which torch refuses on a GPU under deterministic algorithms.
        return scores.scatter_(-1, places, scores.gather(-1, places) - (hard * scale).unsqueeze(-1))

    def _weight_sum(self) -> Tensor | int:
        return self.classes if self.class_weight is None else self.class_weight.sum()

    def _places(self, target: Tensor) -> Tensor:
        return torch.where(target == self.ignore_index, 0, target)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """FP32, or the scores' own dtype if that is wider."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def applied(function: Any, *arguments: Any) -> Tensor:
    """Call an autograd function; torch's stubs leave its types open."""
    result: Tensor = function.apply(*arguments)
    return result


_FEWEST_ROWS: Final = 128
"""Fewest positions in a block: a smaller matrix product spends its time reading the weight."""


def linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: LossSettings, rows: int | None
) -> Tensor:
    """Compute the loss of scores `hidden @ weight.T + bias`.

    Args:
        hidden: of shape (positions, width).
        target: class numbers, of any shape with `positions` elements; "none" gives losses of that shape.
        rows: positions in a block; None makes a block's scores as large as hidden.
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
    """`scores` cover all rows of the weight, in the dtype the loss is computed in."""

    place: slice
    hidden: Tensor
    target: Tensor
    scores: Tensor


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int) -> Iterator[_Block]:
    for begin in range(0, hidden.shape[0], rows):
        place = slice(begin, begin + rows)
        scores = torch.nn.functional.linear(hidden[place], weight, bias)
        yield _Block(place, hidden[place], target[place], scores.to(computed_in(hidden.dtype)))


class _Gradients:
    """The required gradients of hidden, weight and bias, accumulated block by block."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> None:
        wide = computed_in(hidden.dtype)
        self._weight, self._types = weight, (hidden.dtype, weight.dtype, weight.dtype)
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None

    def add(self, block: _Block, gradient: Tensor) -> None:
        """Add a block's gradients, given the gradient of its scores in the dtype they are computed in."""
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
        found = zip((self.hidden, self.weight, self.bias), self._types, strict=True)
        return tuple(None if gradient is None else gradient.to(dtype) for gradient, dtype in found)


def _gradient_of(block: _Block, logarithm: Tensor, scale: Tensor, settings: LossSettings) -> Tensor:
    """Overwrites the block's scores; 0 at those that are padding."""
    block.scores[:, settings.classes :] = 0
    settings.gradient_(block.scores[:, : settings.classes], block.target, logarithm, scale)
    return block.scores


class _LinearLoss(torch.autograd.Function):
    """A mean or sum, whose gradients are computed in the forward pass."""

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
    """Each position's loss; the backward pass recomputes the scores."""

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


_BLOCK_ON_A_CPU: Final = 2**20
"""Scores in a block: of 16,000 classes on one core, half as many took 2 % longer, and four times as many no less."""
_BLOCK: Final = 2**24
"""Scores in a block that keep a large device busy."""


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    classes: int | None = None,
    keep_logits: bool = False,
) -> Tensor:
    """Cross entropy whose backward pass writes the gradient over the logits, block by block.

    `torch.nn.functional.cross_entropy` holds the log probabilities from the forward to the backward pass, then their
    gradient: two more tensors of the logits' size, and a third in FP32 if the logits are narrower. This holds only the
    logits. **After `backward()` the logits hold their gradient**: read predictions from them before, or pass
    `keep_logits=True`, which costs a tensor of their size. If another operator needs them for its own backward pass,
    torch raises an error.

    Computed in FP32 (float64 for float64). In FP32 the loss is torch's to 1e-6 and gradients to 1e-5; in bf16 and fp16
    they are those of FP32, rounded once.

    Args:
        logits: of shape (..., classes).
        target: class numbers, of shape (...).
        weight: of shape (classes,): each class's weight.
        ignore_index: positions with this target count neither in the loss nor in its mean.
        reduction: "mean" (divided by the weights of the positions that count), "sum" or "none".
        label_smoothing: 0 to 1.
        z_loss: coefficient of the squared log-sum-exp that is added to each position's loss.
        chunk_size: positions in a block; by default as many as keep the device busy.
        classes: number of logits that are classes; later ones are padding and left out of the loss.
        keep_logits: leave the logits as they are in the backward pass.

    Returns:
        The loss, in FP32 or wider; of target's shape for "none".

    Raises:
        TypeError: for targets that are not class numbers, such as probabilities.
        ValueError: for shapes that do not fit, or options outside of their range.
    """
    target = _checked_target(target, logits.shape[:-1], "logits")
    _check_classes(classes, logits.shape[-1], "logits")
    _check_chunk(chunk_size)
    counted = logits.shape[-1] if classes is None else classes
    settings = _settings(counted, logits, weight, ignore_index, reduction, label_smoothing, z_loss)
    keep = keep_logits or logits.is_leaf or _overlaps(logits)
    rows = chunk_size or max(1, (_BLOCK_ON_A_CPU if logits.device.type == "cpu" else _BLOCK) // logits.shape[-1])
    with torch.autocast(logits.device.type, enabled=False):
        losses = applied(_ChunkedLoss, logits, target, settings, rows, keep)
    return _reduced(losses, target, settings)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    classes: int | None = None,
) -> Tensor:
    """Compute `cross_entropy(linear(hidden, weight, bias), target)` without holding the scores of all positions.

    Scores are computed for a block of positions, turned into their gradient at once, and freed: with "mean" and "sum"
    the gradients of `hidden`, `weight` and `bias` are computed in the forward pass, with the usual number of matrix
    products; with "none", or for a second backward pass, the scores are computed twice. Gradients of the weight are
    summed in FP32. Such a loss has one backward pass ("none": any number), and no second derivative.

    In FP32 the loss is torch's to 1e-5 and gradients to 1e-4; in bf16 and fp16, scores are rounded as `linear` rounds
    them, and everything after is FP32. Under autocast `hidden` and `weight` are cast as `linear` would cast them.

    Args:
        hidden: of shape (..., width).
        weight: of shape (classes, width), such as `model.lm_head.weight`.
        target: class numbers, of shape (...).
        bias: of shape (classes,).
        class_weight: of shape (classes,): each class's weight in the loss.
        classes: rows of `weight` that are classes; later ones are padding and left out of the loss.
        chunk_size: positions in a block; by default a block's scores are as large as `hidden`, with 128 positions at
            least.
        ignore_index, reduction, label_smoothing, z_loss: see `chunked_cross_entropy`.

    Returns:
        The loss, in FP32 or wider; of target's shape for "none".

    Raises:
        TypeError: for targets that are not class numbers, such as probabilities.
        ValueError: for shapes or types that do not fit, or options outside of their range.
    """
    target = _checked_target(target, hidden.shape[:-1], "hidden")
    _check_linear(hidden, weight, bias, classes)
    _check_chunk(chunk_size)
    narrow = autocast_type(hidden.device.type)
    if narrow is not None:
        hidden, weight = hidden.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    if len({tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}) > 1:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}{f', bias {bias.dtype}' if bias is not None else ''}; "
            "convert them to one type, or call this under torch.autocast"
        )
    rows = weight.shape[0] if classes is None else classes
    settings = _settings(rows, hidden, class_weight, ignore_index, reduction, label_smoothing, z_loss)
    flat = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_loss(flat, weight, bias, target, settings, chunk_size)


class _ChunkedLoss(torch.autograd.Function):
    """Losses of shape (...) of logits of shape (..., classes)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, settings: LossSettings, rows: int, keep: bool) -> Tensor:
        dtype = computed_in(logits.dtype)
        losses = torch.empty(target.shape, dtype=dtype, device=logits.device)
        logarithms = torch.empty_like(losses)
        for scores, wanted, loss, logarithm in _losses_blocks(rows, logits, target, losses, logarithms):
            found = settings.losses(scores[..., : settings.classes].to(dtype), wanted)
            loss.copy_(found[0])
            logarithm.copy_(found[1])
        ctx.save_for_backward(logits, target, logarithms)
        ctx.settings, ctx.rows, ctx.keep = settings, rows, keep
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        try:
            logits, target, logarithms = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                "the logits of chunked_cross_entropy were overwritten before its backward pass, by a second backward "
                "pass or another change in place; pass keep_logits=True, and do not change them in place"
            ) from error
        settings: LossSettings = ctx.settings
        gradient = torch.empty_like(logits) if ctx.keep else logits.detach()
        scale = torch.where(target == settings.ignore_index, 0.0, upstream)
        for parts in _losses_blocks(ctx.rows, logits.detach(), gradient, target, logarithms, scale):
            scores, written, wanted, logarithm, scales = parts
            exact = scores.to(logarithms.dtype)
            if ctx.keep and exact.data_ptr() == scores.data_ptr():
                exact = written.copy_(scores)
            exact[..., settings.classes :] = 0
            settings.gradient_(exact[..., : settings.classes], wanted, logarithm, scales)
            if exact.data_ptr() != written.data_ptr():
                written.copy_(exact)
        return gradient, None, None, None, None


def _losses_blocks(rows: int, first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of at most `rows` positions of all tensors, which have the leading dimensions of the first; no copies."""
    leading = first.dim() - 1
    if leading == 0:
        yield tuple(tensor.unsqueeze(0) for tensor in (first, *others))
    elif leading == 1:
        for begin in range(0, first.shape[0], rows):
            yield tuple(tensor[begin : begin + rows] for tensor in (first, *others))
    else:
        for index in range(first.shape[0]):
            yield from _losses_blocks(rows, first[index], *(tensor[index] for tensor in others))


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory: an expanded dimension, or less memory than elements."""
    dimensions = list(zip(tensor.shape, tensor.stride(), strict=True))
    places = 1 + sum((size - 1) * stride for size, stride in dimensions)
    return places < tensor.numel() or any(size > 1 and not stride for size, stride in dimensions)


def _reduced(losses: Tensor, target: Tensor, settings: LossSettings) -> Tensor:
    if settings.reduction == "none":
        return losses
    total = losses.sum()
    if settings.reduction == "sum":
        return total
    divisor = settings.weights_of(target, losses.dtype).sum()
    return applied(_Mean, total, divisor)


class _Mean(torch.autograd.Function):
    """A sum over its divisor; if that is 0 the mean is NaN and its gradient 0, as in torch."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, divisor: Tensor) -> Tensor:
        ctx.save_for_backward(divisor)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (divisor,) = ctx.saved_tensors
        return torch.where(divisor == 0, 0.0, upstream / divisor), None


def _settings(
    classes: int,
    scores: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    z_loss: float,
) -> LossSettings:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"z_loss must be 0 or more, not {z_loss}")
    if class_weight is not None:
        if tuple(class_weight.shape) != (classes,):
            raise ValueError(f"class weights of shape {tuple(class_weight.shape)} for {classes} classes")
        class_weight = class_weight.detach().to(device=scores.device, dtype=computed_in(scores.dtype))
    return LossSettings(classes, ignore_index, label_smoothing, z_loss, reduction, class_weight)


def _checked_target(target: Tensor, shape: torch.Size, name: str) -> Tensor:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(
            f"target has to hold class numbers, not {target.dtype}; for probabilities of classes there is "
            "torch.nn.functional.cross_entropy"
        )
    if target.shape != shape:
        raise ValueError(
            f"target of shape {tuple(target.shape)} does not fit {name} of {tuple(shape)} positions, which are all "
            "dimensions but the last one; for classes in dimension 1 pass logits.movedim(1, -1)"
        )
    return target.long()


def _check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: int | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} does not fit hidden of shape {tuple(hidden.shape)}; it has to be "
            f"(classes, {hidden.shape[-1]}), as torch.nn.Linear holds it"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias of shape {tuple(bias.shape)} for {weight.shape[0]} classes")
    _check_classes(classes, weight.shape[0], "rows of weight")


def _check_classes(classes: int | None, size: int, name: str) -> None:
    if classes is not None and not 0 < classes <= size:
        raise ValueError(f"classes must be from 1 to the {size} {name}, not {classes}")


def _check_chunk(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be 1 or more, not {chunk_size}")
