"""Many small layers, whose optimizer updates one parameter after another.

Planted: AdamW with foreach=False, several operators for each of its many small tensors.
Expected: single-tensor-optimizer
"""

import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


def main() -> None:
    options = command.options(__doc__)
    model = mlp(64, 96, 60, 1)
    if options.fault:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)  # planted
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(256, 64), torch.randn(256, 1)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # planted


if __name__ == "__main__":
    main()
