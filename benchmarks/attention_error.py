"""How far attention in bfloat16 is off, exact and with the fast softmax, from the formula in float64.

    python benchmarks/attention_error.py

An error is the norm of the difference over the norm of what is right, of the outputs and of the gradients together.
Queries, keys and values are normal; the scores' standard deviation is 1, as after initialisation, and 4, as where
attention has become sharp. The fast softmax is the CPU's; on CUDA both columns are the exact kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepscope.remedies import attention

HEADS, SIZE = 8, 64
LENGTHS = (128, 512, 2048)
DEVIATIONS = (1, 4)


def formula(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    scores = query @ key.mT * SIZE**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1) @ value


def relative(found: list[Tensor], right: list[Tensor]) -> float:
    """Norm of all differences over the norm of all that is right."""
    off = sum((a.double() - b).square().sum() for a, b in zip(found, right, strict=True))
    return float((off / sum(each.square().sum() for each in right)).sqrt())


def errors(length: int, deviation: int, causal: bool) -> list[float]:
    """Of the outputs exact and fast, of the gradients exact and fast."""
    given = [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]
    given = [(each * deviation**0.5 if number < 2 else each).bfloat16() for number, each in enumerate(given)]
    inputs = [each.double().requires_grad_() for each in given]
    right = formula(*inputs, causal)
    direction = torch.randn_like(right)
    right.backward(direction)
    found: list[list[float]] = []
    for mode in ("exact", "fast"):
        own = [each.clone().requires_grad_() for each in given]
        output = attention(*own, is_causal=causal, softmax_mode=mode, recompute=False)
        output.backward(direction.bfloat16())
        wanted = [each.grad for each in inputs if each.grad is not None]
        gradients = [each.grad for each in own if each.grad is not None]
        found.append([relative([output.detach()], [right.detach()]), relative(gradients, wanted)])
    return [found[mode][kind] for kind in (0, 1) for mode in (0, 1)]


def main() -> None:
    torch.manual_seed(0)
    print("| Scores deviate by | Length | Causal | output, exact | output, fast | gradients, exact | gradients, fast |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    for deviation in DEVIATIONS:
        for length in LENGTHS:
            for causal in (False, True):
                numbers = " | ".join(f"{100 * each:.2f} %" for each in errors(length, deviation, causal))
                print(f"| {deviation} | {length:,} | {'yes' if causal else 'no'} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
