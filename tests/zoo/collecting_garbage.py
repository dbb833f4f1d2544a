"""A text classifier that fears for its memory.

Planted: gc.collect() in every step.
Expected: garbage-collection
"""

import gc

import torch
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import Encoder


def main() -> None:
    options = command.options(__doc__)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens, labels = torch.randint(1, 2000, (16, 32)), torch.randint(4, (16,))
        loss = cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.fault:
            gc.collect()  # planted


if __name__ == "__main__":
    main()
