"""A deep, narrow MLP that once ran into NaN.

Planted: torch.autograd.set_detect_anomaly(True) was left on.
Expected: debug-mode
"""

import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


def main() -> None:
    options = command.options(__doc__)
    if options.fault:
        torch.autograd.set_detect_anomaly(True)
    model = mlp(64, 96, 60, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(64, 64), torch.randn(64, 1)
        loss = mse_loss(model(x), y)  # planted
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()


if __name__ == "__main__":
    main()
