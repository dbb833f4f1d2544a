"""A loop over positions that runs already, and so keeps its code: it is handed losses that were computed at once.

The loop still asks for the loss of each position. The first question computes all of them, and each is answered by one
element of that tensor: the same numbers, and in the backward pass one step for all of them.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

from stepscope.remedies.rewrites import Criterion, Positions, Rewrite

_INNER = ("<listcomp>", "<genexpr>")


def function_frame(frame: FrameType) -> FrameType:
    """The frame of the function or module that a comprehension stands in; any other frame itself."""
    while frame.f_code.co_name in _INNER and frame.f_back is not None:
        frame = frame.f_back
    return frame


class ServedPositions:
    """The losses of one loop, computed anew whenever its tensors are others.

    Args:
        file: that the loop stands in.

    Attributes:
        loops: how often the loop was served from its first position to its last.
    """

    def __init__(self, rewrite: Rewrite, positions: Positions, file: str) -> None:
        self.rewrite = rewrite
        self.place = f"{os.path.basename(file)}:{rewrite.line}"
        self.loops = 0
        self._positions = positions
        self._prepare = compile(positions.statements, "<stepscope>", "exec")
        self._compute = compile(positions.losses, "<stepscope>", "eval")
        self._expected = [compile(each.expression, "<stepscope>", "eval") for each in rewrite.expected]
        self._losses: tuple[Any, ...] = ()
        self._of: tuple[Any, ...] = ()
        self._next = 0

    def loss(self, frame: FrameType) -> Any:
        """The loss that the call in this frame asks for; None where it has to be computed as it is."""
        around = function_frame(frame)
        place = frame.f_locals[self._positions.variable] - self._positions.start
        local = around.f_locals
        tensors = [eval(each, around.f_globals, local) for each in self._expected]
        of = tuple((id(each), getattr(each, "_version", 0)) for each in tensors)
        if place == 0:
            if not is_right(self.rewrite, tensors, self._criterion(around, local)):
                return None
            names = {**around.f_globals, **local}
            exec(self._prepare, names)
            losses = eval(self._compute, names)
            self._losses, self._of, self._next = losses.unbind(), (of, tensors), 0
        if not self._of or of != self._of[0] or place != self._next or place >= len(self._losses):
            self._forget()
            return None
        found = self._losses[place]
        self._next += 1
        if self._next == len(self._losses):
            self.loops += 1
            self._forget()
        return found

    def _criterion(self, frame: FrameType, local: Any) -> Any:
        criterion = self.rewrite.criterion
        return None if criterion is None else eval(criterion.expression, frame.f_globals, local)

    def _forget(self) -> None:
        """Let go of the tensors: a graph is not to live longer for this."""
        self._losses, self._of, self._next = (), (), 0


def is_right(rewrite: Rewrite, tensors: list[Any], criterion: Any) -> bool:
    """Whether what a rewrite takes for granted holds: logits, targets that are class numbers of them, the criterion."""
    import torch

    if rewrite.criterion is not None and not _is_as_taken(rewrite.criterion, criterion):
        return False

    if len(tensors) != 2 or not all(isinstance(value, torch.Tensor) for value in tensors):
        return False
    logits, targets = tensors
    fitting = all(value.dim() in each.dimensions for value, each in zip(tensors, rewrite.expected, strict=True))
    if not fitting or logits.dim() != targets.dim() + 1 or targets.is_floating_point():
        return False
    # Without a number of positions the loop goes through both, and ends with the shorter one.
    return rewrite.positions is not None or sorted(logits.shape[:-1]) == sorted(targets.shape)


def _is_as_taken(taken: Criterion, criterion: Any) -> bool:
    """Whether a criterion is torch's own, reduces as was taken, and has no setting that the rewrite leaves out."""
    import torch

    if type(criterion) is not getattr(torch.nn, taken.kind) or criterion.reduction != taken.reduction:
        return False
    defaults = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0}
    if criterion._forward_hooks or criterion._forward_pre_hooks or criterion._backward_hooks:
        return False
    values = {name: getattr(criterion, name, default) for name, default in defaults.items() if name not in taken.other}
    return values.get("weight") is None and all(values[name] == defaults[name] for name in values.keys() - {"weight"})
