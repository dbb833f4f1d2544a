"""A ConvNeXt-like network whose blocks change the layout of the image to and fro.

Planted: permute and contiguous before and after the layers that work on channels.
Expected: layout-conversion
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.zoo import command

WIDTH = 32


class Block(nn.Module):
    """A convolution for each channel, then a layer over the channels."""

    def __init__(self, copying: bool) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.channels = nn.Linear(WIDTH, WIDTH) if copying else nn.Conv2d(WIDTH, WIDTH, 1)
        self.copying = copying

    def forward(self, x: Tensor) -> Tensor:
        y = self.spatial(x)
        if self.copying:
            y = y.permute(0, 2, 3, 1).contiguous()  # planted
            y = torch.relu(self.channels(y))
            y = y.permute(0, 3, 1, 2).contiguous()  # planted
        else:
            y = torch.relu(self.channels(y))
        return x + y


def main() -> None:
    options = command.options(__doc__)
    blocks = [Block(copying=options.fault) for _ in range(4)]
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 4, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(options.steps):
        images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
