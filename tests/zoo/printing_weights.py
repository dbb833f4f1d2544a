"""An MLP that tells how its training goes.

Planted: in every step a part of a layer's weights is printed, where now and then the loss would do.
Expected: frequent-logging
"""

import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


def main() -> None:
    options = command.options(__doc__)
    torch.set_printoptions(threshold=5000)
    model = mlp(64, 512, 3, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for step in range(options.steps):
        x, y = torch.randn(512, 64), torch.randn(512, 1)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.fault:
            print(step, loss.item(), model[0].weight[:64])  # planted
        elif step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
