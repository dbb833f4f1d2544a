"""Scaled losses for training in float16, whose small gradients would be zero otherwise.

As torch.amp.GradScaler does it, for a program that knows nothing of it: a backward pass begins with a larger gradient,
and each parameter's is divided again before it is added up. What the program reads, clips and averages is unscaled,
with several backward passes a step, and in DistributedDataParallel, too. A step whose gradients overflowed is left out
and the scale halved; after many good ones it is doubled. Source: P. Micikevicius et al., Mixed Precision Training,
ICLR 2018, with the figures of GradScaler's documentation.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

from stepscope.capture.applying.patching import Applying

_FIRST_SCALE: Final = 2.0**16
_GOOD_STEPS: Final = 2000
"""Without an overflow, after which the scale is doubled."""
_PASSES_SEARCHED: Final = 2
"""Backward passes in which parameters are looked for that no optimizer has."""


class LossScaling:
    """Scales the backward passes of one process, from `start` on.

    Attributes:
        scale: of the next backward pass.
        left_out, steps: how many optimizers' steps were left out, of how many.
    """

    def __init__(self, applying: Applying) -> None:
        import torch

        self.scale = _FIRST_SCALE
        self.left_out = self.steps = 0
        self._applying = applying
        self._is_on = False
        self._is_scaled = False
        self._passes = 0
        self._good = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._kinds: set[type] = set()
        self._hooked: dict[int, weakref.ref[Any]] = {}
        applying.wrap(torch.optim.Optimizer, "__init__", self._made)

    def start(self) -> None:
        """The program trains in float16: scale its backward passes from now on."""
        import torch

        if not self._is_on:
            self._is_on = True
            self._applying.wrap(torch.autograd, "backward", self._backward)

    def _made(self, original: Any, optimizer: Any, *positional: Any, **named: Any) -> None:
        original(optimizer, *positional, **named)
        self._optimizers[optimizer] = 0
        self._guard(type(optimizer))  # at once: a schedule keeps the step that it finds

    def _backward(self, original: Any, tensors: Any, grad_tensors: Any = None, *positional: Any, **named: Any) -> None:
        import torch

        later = bool(positional[1:2] and positional[1]) or bool(named.get("create_graph"))
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors or (None,) * len(roots)
        is_whole = len(roots) == len(given)
        is_plain = is_whole and not (
            positional[2:] or named.get("inputs") is not None or named.get("grad_variables") is not None
        )
        if self._is_scaled or later or not is_plain or any(map(_is_missing, roots, given)):
            original(tensors, grad_tensors, *positional, **named)  # inside another one, or not into .grad of all
            return
        self._passes += 1
        self._hook(
            each for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]
        )
        if self._passes <= _PASSES_SEARCHED:
            self._hook(leaves(roots))
        scaled = [
            torch.full_like(root, self.scale) if gradient is None else gradient * self.scale
            for root, gradient in zip(roots, given, strict=True)
        ]
        self._is_scaled = True
        try:
            original(roots, scaled, *positional, **named)
        finally:
            self._is_scaled = False

    def _hook(self, parameters: Iterable[Any]) -> None:
        """Have the gradient of each divided before it is added up."""
        for parameter in parameters:
            known = self._hooked.get(id(parameter))
            if parameter.requires_grad and parameter.is_leaf and (known is None or known() is not parameter):
                self._hooked[id(parameter)] = weakref.ref(parameter)
                self._applying.on_remove(functools.partial(self._unhook, parameter.register_hook(self._divided)))

    def _unhook(self, handle: Any) -> None:
        if not self._is_scaled:  # else a pass is under way, whose gradients must still be divided
            handle.remove()

    def _divided(self, gradient: Any) -> Any:
        return gradient * (1.0 / self.scale) if self._is_scaled else gradient

    def _guard(self, kind: Any) -> None:
        """Leave out the steps of a class's optimizers whose gradients overflowed."""
        if kind in self._kinds or any(
            each in self._kinds for each in kind.__mro__ if getattr(each, "step", None) is kind.step
        ):
            return
        self._kinds.add(kind)

        def guarded(step: Any, optimizer: Any, *positional: Any, **named: Any) -> Any:
            if (
                self._optimizers.get(optimizer, 0) == self._passes
            ):  # no scaled pass since, or a class's step in another's
                return step(optimizer, *positional, **named)
            self._optimizers[optimizer] = self._passes
            self.steps += 1
            if not _are_finite(optimizer):
                self.left_out += 1
                self.scale, self._good = self.scale / 2, 0
                return None
            self._good += 1
            if self._good % _GOOD_STEPS == 0:
                self.scale *= 2
            return step(optimizer, *positional, **named)

        self._applying.wrap(kind, "step", guarded)


def leaves(roots: Iterable[Any]) -> Iterator[Any]:
    """The tensors into whose `.grad` a backward pass from the roots writes."""
    waiting = [root.grad_fn for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


def _is_missing(root: Any, gradient: Any) -> bool:
    """Whether torch itself is to say that a gradient must be given."""
    return gradient is None and root.numel() != 1


def _are_finite(optimizer: Any) -> bool:
    """Whether all gradients that an optimizer is about to use are finite; waits for the device."""
    import torch

    found = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in found]
    largest = [torch.linalg.vector_norm(each.detach(), math.inf) for each in dense if each.numel()]
    return not largest or bool(torch.stack([each.to(largest[0].device) for each in largest]).isfinite().all())
