"""Large layers and a small batch, whose gradients are filled with zeros.

Planted: zero_grad(set_to_none=False), so that gradients are written once more and then added to.
Expected: zero-grad
"""

import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


def main() -> None:
    options = command.options(__doc__)
    model = mlp(1024, 2048, 3, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(2, 1024), torch.randn(2, 16)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad(set_to_none=not options.fault)  # planted
        loss.backward()  # planted
        optimizer.step()


if __name__ == "__main__":
    main()
