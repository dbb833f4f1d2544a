"""A deep, narrow network of residual layers with a normalisation that is written out.

Planted: LayerNorm as mean, variance and a chain of element-wise operators.
Expected: fusible-chain
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.zoo import command

ROWS = 4096
WIDTH = 48


class WrittenOut(nn.Module):
    """LayerNorm from its definition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)  # planted
        variance = (centred**2).mean(-1, keepdim=True)  # planted
        return self.weight * (centred / torch.sqrt(variance + 1e-5)) + self.bias  # planted


class Layer(nn.Module):
    """A normalised layer around a shortcut."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def main() -> None:
    options = command.options(__doc__)
    norm = WrittenOut if options.fault else nn.LayerNorm
    model = nn.Sequential(*[Layer(norm) for _ in range(10)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
