"""A small ResNet on a small data set, with many short epochs.

Planted: the loader's workers end with every epoch and start anew.
Expected: loader-restart
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from tests.zoo import command
from tests.zoo.models import resnet

BATCH = 32
EPOCH = 5


class Images(Dataset[tuple[Tensor, int]]):
    """Random images, normalised when they are asked for."""

    def __init__(self) -> None:
        self.images = torch.randint(256, (EPOCH * BATCH, 3, 32, 32), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].float()
        return (image - image.mean()) / image.std(), index % 10


def main() -> None:
    options = command.options(__doc__, steps=30)
    loader = DataLoader(Images(), BATCH, shuffle=True, num_workers=2, persistent_workers=not options.fault)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(options.steps // EPOCH):
        for images, labels in loader:  # planted
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
