"""A tiny GPT whose loss is summed position by position.

Planted: a Python loop computes the cross-entropy of one position after another.
Expected: loop-in-step
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import GPT

LENGTH = 64


def loss_by_position(logits: Tensor, targets: Tensor) -> Tensor:
    loss = torch.zeros(())
    for position in range(LENGTH):
        loss = loss + cross_entropy(logits[:, position], targets[:, position])  # planted
    return loss / LENGTH


def loss_of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    options = command.options(__doc__)
    model = GPT(length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    loss_of = loss_by_position if options.fault else loss_of_all
    for _ in range(options.steps):
        tokens = torch.randint(1024, (4, LENGTH + 1))
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
