"""A small ResNet that follows its loss on a few images that it is not trained on.

Planted: the losses are kept as tensors with their graph, and with it the activations of all steps.
Expected: memory-growth
Saves: memory
"""

import torch
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import resnet


def main() -> None:
    options = command.options(__doc__)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    probe, probe_labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    history = []
    for _ in range(options.steps):
        images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.fault:
            history.append(cross_entropy(model(probe), probe_labels))  # planted
        else:
            with torch.no_grad():
                history.append(cross_entropy(model(probe), probe_labels))


if __name__ == "__main__":
    main()
