"""A small ResNet on packed images.

Planted: the DataLoader has no workers, so that images are unpacked while nothing trains.
Expected: input-bound
"""

import zlib

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from tests.zoo import command
from tests.zoo.models import resnet

BATCH = 32
SIDE = 320


class Packed(Dataset[tuple[Tensor, int]]):
    """Images that are packed in memory, and unpacked and cut to size when they are asked for."""

    def __init__(self, images: int) -> None:
        self.images = images
        flat = (torch.randint(256, (SIDE, SIDE, 3), dtype=torch.uint8) & 0xF0 for _ in range(BATCH))
        self.packed = [zlib.compress(each.numpy().tobytes(), 1) for each in flat]

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed[index % BATCH])), dtype=torch.uint8)  # planted
        image = pixels.view(SIDE, SIDE, 3)[index % 100 :, index % 90 :][:32, :32].permute(2, 0, 1)
        return image.float() / 255, index % 10


def main() -> None:
    options = command.options(__doc__)
    workers = {} if options.fault else {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    loader = DataLoader(Packed(options.steps * BATCH), batch_size=BATCH, **workers)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in loader:  # planted
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
