"""A small ResNet with large feature maps.

Planted: the C library gives every large block back to the operating system and asks for it again in the next step.
Expected: host-allocator
Place: everywhere
"""

import torch
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import resnet


def main() -> None:
    options = command.options(__doc__, keep_memory=False)
    if not options.fault:
        torch.empty(command.LARGE_BLOCK, dtype=torch.uint8)  # freed at once, and glibc keeps such blocks from now on
    model = resnet(width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(options.steps):
        images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
        loss = cross_entropy(model(images), labels)  # planted
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()


if __name__ == "__main__":
    main()
