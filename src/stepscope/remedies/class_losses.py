"""The cross entropy of a block of positions and its gradient, in FP32, written over the block itself.

With scores z, l = log sum exp z, smoothing s over C classes, class weights w (1 where none are given) whose sum is W,
and the target t, a position's loss is

    (1 - s) w_t (l - z_t)  +  s / C (W l - sum_c w_c z_c)  +  z_loss l^2

as in torch.nn.functional.cross_entropy; the last term is that of PaLM (Chowdhery et al., 2022). Its gradient is

    dz_c = ((1 - s) w_t + s / C W + 2 z_loss l) softmax(z)_c  -  s / C w_c  -  (1 - s) w_t [c = t]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Reduction: TypeAlias = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What a loss is made of.

    Attributes:
        classes: how many there are; scores beyond them are padding.
        class_weight: of shape (classes,), in the type the loss is computed in.
    """

    classes: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: Reduction
    class_weight: Tensor | None

    def weights_of(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Each position's weight, 0 where it is ignored; also what a mean is divided by the sum of."""
        counted = target != self.ignore_index
        if self.class_weight is None:
            return counted.to(dtype)
        return torch.where(counted, self.class_weight[self._places(target)], 0.0)

    def losses(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and l, both of shape (positions,), of scores of shape (positions, classes)."""
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
        """Write the gradient over the scores, and return them.

        Args:
            scale: of shape (positions,), by which each position's gradient is multiplied; 0 where it is ignored.
        """
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
        # Not scatter_add_, which torch refuses on a GPU where algorithms have to be deterministic.
        return scores.scatter_(-1, places, scores.gather(-1, places) - (hard * scale).unsqueeze(-1))

    def _weight_sum(self) -> Tensor | int:
        return self.classes if self.class_weight is None else self.class_weight.sum()

    def _places(self, target: Tensor) -> Tensor:
        return torch.where(target == self.ignore_index, 0, target)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """FP32, or the scores' own type where that is wider."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def applied(function: Any, *arguments: Any) -> Tensor:
    """What an autograd function gives; torch's stubs leave its types open."""
    result: Tensor = function.apply(*arguments)
    return result
