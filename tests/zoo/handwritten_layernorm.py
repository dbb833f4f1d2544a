"""A tiny GPT with a normalisation that is written out.

Planted: LayerNorm as mean, variance and a chain of element-wise operators.
Expected: fusible-chain
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import GPT

LENGTH = 64


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


def main() -> None:
    options = command.options(__doc__)
    norm = WrittenOut if options.fault else nn.LayerNorm
    model = GPT(length=LENGTH, vocabulary=256, width=32, layers=6, norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(256, (32, LENGTH + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
