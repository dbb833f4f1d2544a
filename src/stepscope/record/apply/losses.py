"""Losses over many classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stepscope.record.apply.flags import Flag
from stepscope.record.apply.patching import Applying, compiling, in_a_line, users_place

FLAGS: Final = (
    Flag(
        "chunked-loss",
        "computes cross entropy over many classes in blocks of positions, without a second tensor of all scores",
        "no cross entropy over 2,000 classes or more was computed",
        "Only scores of shape (positions, classes) with class numbers as targets, and not inside a compiled model. The "
        "scores stay as they are, which costs a tensor that `stepscope.remedies.chunked_cross_entropy` can save.",
    ),
)
_FEWEST_CLASSES: Final = 2000
"""From which on the rule large-logits takes classes for many."""
_FEWEST_SCORES: Final = 2**18
"""Fewer are one block on a CPU, and gain nothing."""


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Put `stepscope.remedies.chunked_cross_entropy` in the place of torch's for large scores, in modules too."""
    import torch

    from stepscope.remedies import chunked_cross_entropy

    is_compiling = compiling()

    def loss(
        original: Any,
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        def as_it_was() -> Any:
            return original(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)

        if is_compiling() or not _is_large(input, target) or not (size_average is reduce is None):
            return as_it_was()
        place = users_place() or "an unknown place"
        try:
            found = chunked_cross_entropy(
                input,
                target,
                weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                keep_logits=True,
            )
        except (TypeError, ValueError, RuntimeError) as error:
            applying.could_not("chunked-loss", f"the loss at {place}: {in_a_line(error)}")
            return as_it_was()
        applying.did("chunked-loss", f"the loss over {input.shape[1]:,} classes at {place} is computed in blocks")
        return found

    applying.wrap(torch.nn.functional, "cross_entropy", loss)


def _is_large(scores: Any, target: Any) -> bool:
    """Whether the remedy takes them, and they are worth it."""
    return bool(
        scores.dim() == 2
        and scores.shape[1] >= _FEWEST_CLASSES
        and scores.numel() >= _FEWEST_SCORES
        and not target.is_floating_point()
    )
