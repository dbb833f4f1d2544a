"""A recommender that keeps what it has seen as Python objects.

Planted: each step makes so many lists that Python's collector walks again and again through all objects there are.
Expected: garbage-collection
"""

import gc

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.zoo import command
from tests.zoo.models import Recommender

BATCH = 3072
TABLES = 8
PAIRS = 20_000


def main() -> None:
    options = command.options(__doc__)
    model = Recommender(TABLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if not options.fault:
        gc.collect()
        gc.freeze()
        gc.set_threshold(200_000, 50, 100)
    seen: list[list[int]] = []
    for step in range(options.steps):
        numbers, labels = torch.randn(BATCH, 13), torch.randint(2, (BATCH,)).float()
        categories = torch.randint(5000, (BATCH, TABLES, 4))
        seen = [[step, item] for item in range(PAIRS)]  # planted
        loss = binary_cross_entropy_with_logits(model(numbers, categories), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(len(seen))


if __name__ == "__main__":
    main()
