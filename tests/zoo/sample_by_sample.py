"""A small ResNet that is fed one image after another.

Planted: the model is called for each image of the batch by itself.
Expected: loop-in-step
"""

import torch
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import resnet

BATCH = 40


def main() -> None:
    options = command.options(__doc__)
    model = resnet(width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(options.steps):
        images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
        if options.fault:
            scores = torch.cat([model(image.unsqueeze(0)) for image in images])  # planted
        else:
            scores = model(images)
        loss = cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
