"""An MLP that writes figures of its parameters into a table.

Planted: every step writes a row with figures of all gradients and parameters, and waits until it is on the disk.
Expected: frequent-logging
"""

import csv
import os
import tempfile

import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp

EVERY = 50


def main() -> None:
    options = command.options(__doc__)
    model = mlp(64, 96, 40, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        writer = csv.writer(file)
        for step in range(options.steps):
            x, y = torch.randn(128, 64), torch.randn(128, 1)
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if options.fault or step % EVERY == 0:
                row = [step, loss.item()]
                for parameter in model.parameters():
                    row += [parameter.grad.norm().item(), parameter.grad.abs().max().item()]  # planted
                    row += [parameter.mean().item(), parameter.std().item()]  # planted
                writer.writerow(row)
                file.flush()  # planted
                os.fsync(file.fileno())  # planted
            optimizer.step()


if __name__ == "__main__":
    main()
