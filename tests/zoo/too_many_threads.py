"""A tiny GPT on more threads than the machine has processors.

Planted: torch.set_num_threads(32), as copied from a larger machine.
Expected: thread-oversubscription
Place: everywhere
"""

import os

import torch
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import GPT

LENGTH = 64


def main() -> None:
    processors = len(os.sched_getaffinity(0))
    options = command.options(__doc__, threads=processors)
    if options.fault:
        torch.set_num_threads(16 * processors)
    model = GPT(length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(1024, (8, LENGTH + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())  # planted
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()


if __name__ == "__main__":
    main()
