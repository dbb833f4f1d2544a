"""A small ResNet that writes to TensorBoard.

Planted: every step writes a histogram of each parameter and flushes.
Expected: frequent-logging
"""

import tempfile

import torch
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

from tests.zoo import command
from tests.zoo.models import resnet

EVERY = 50


def main() -> None:
    options = command.options(__doc__)
    model = resnet(width=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for step in range(options.steps):
            images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.fault or step % EVERY == 0:
                writer.add_scalar("loss", loss.item(), step)  # planted
                for name, parameter in model.named_parameters():
                    writer.add_histogram(name, parameter, step)  # planted
                writer.flush()  # planted


if __name__ == "__main__":
    main()
