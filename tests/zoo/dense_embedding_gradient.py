"""A recommender with large tables, of which a batch needs a few rows.

Planted: the tables' gradients are dense, as large as the tables, and all rows are updated.
Expected: large-logits
"""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.zoo import command
from tests.zoo.models import Recommender

ROWS = 40_000
TABLES = 8
BATCH = 512


def main() -> None:
    options = command.options(__doc__)
    model = Recommender(TABLES, ROWS, 64, sparse=not options.fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        numbers, labels = torch.randn(BATCH, 13), torch.randint(2, (BATCH,)).float()
        categories = torch.randint(ROWS, (BATCH, TABLES, 4))
        loss = binary_cross_entropy_with_logits(model(numbers, categories), labels)
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()  # planted


if __name__ == "__main__":
    main()
