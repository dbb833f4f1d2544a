"""A recommender whose batches are put together from records.

Planted: the collate function goes through the records number by number.
Expected: slow-input-function
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset

from tests.zoo import command
from tests.zoo.models import Recommender

BATCH = 1024
TABLES = 8
Record = tuple[Tensor, Tensor]


class Clicks(Dataset[Record]):
    """Made-up records: 13 numbers, and four categories for each table."""

    def __init__(self, records: int) -> None:
        self.numbers = torch.randn(records, 13)
        self.categories = torch.randint(5000, (records, TABLES, 4))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Record:
        return self.numbers[index], self.categories[index]


def collate_numbers(records: list[Record]) -> Record:  # planted
    numbers, categories = torch.empty(len(records), 13), torch.empty(len(records), TABLES, 4, dtype=torch.int64)
    for row, (own_numbers, own_categories) in enumerate(records):  # planted
        for column, value in enumerate(own_numbers):  # planted
            numbers[row, column] = value  # planted
        for column, own in enumerate(own_categories):  # planted
            categories[row, column] = own  # planted
    return numbers, categories


def collate(records: list[Record]) -> Record:
    numbers, categories = zip(*records, strict=True)
    return torch.stack(numbers), torch.stack(categories)


def main() -> None:
    options = command.options(__doc__)
    loader = DataLoader(
        Clicks(options.steps * BATCH),
        batch_size=BATCH,
        num_workers=1,
        persistent_workers=True,
        collate_fn=collate_numbers if options.fault else collate,
    )
    model = Recommender(TABLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for numbers, categories in loader:
        loss = binary_cross_entropy_with_logits(model(numbers, categories), (numbers[:, 0] > 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
