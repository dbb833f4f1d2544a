"""Many small layers, whose gradients are clipped one by one.

Planted: the norm of every gradient is read with .item() and the gradients scaled one after another.
Expected: gradient-clipping
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


def clip_one_by_one(parameters: Iterable[nn.Parameter], limit: float) -> None:
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    total = sum(parameter.grad.detach().norm().item() ** 2 for parameter in parameters) ** 0.5  # planted
    scale = min(1.0, limit / (total + 1e-6))
    for parameter in parameters:
        parameter.grad.detach().mul_(scale)  # planted


def main() -> None:
    options = command.options(__doc__)
    model = mlp(64, 32, 160, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(64, 64), torch.randn(64, 1)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if options.fault:
            clip_one_by_one(model.parameters(), 1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
