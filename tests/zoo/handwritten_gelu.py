"""The feed-forward layers of a transformer with an activation that is written out.

Planted: GELU as a chain of element-wise operators.
Expected: fusible-chain
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.zoo import command

ROWS = 4096
WIDTH = 64


class WrittenOut(nn.Module):
    """GELU, as the paper writes it."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))  # planted
        return 0.5 * x * (1.0 + torch.tanh(inner))  # planted


class Fused(nn.GELU):
    """The same in one operator."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


def main() -> None:
    options = command.options(__doc__)
    activation = WrittenOut() if options.fault else Fused()
    layers = [nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH)]
    model = nn.Sequential(*layers, *copy.deepcopy(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
