"""A mixture of experts that runs one expert after another.

Planted: a Python loop over the experts, each with two small matrix products of its own.
Expected: loop-in-step
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import command

EXPERTS = 64
CAPACITY = 8
WIDTH = 64


class Experts(nn.Module):
    """Two layers for each expert; tokens come sorted by expert, CAPACITY for each."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)
        self.one_by_one = one_by_one

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_by_one:
            return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)
        results = []
        for expert in range(EXPERTS):
            results.append(F.gelu(x[expert] @ self.up[expert]) @ self.down[expert])  # planted
        return torch.stack(results)


class Mixture(nn.Module):
    """Input layer, two layers of experts, output layer."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(256, WIDTH)
        self.layers = nn.ModuleList(Experts(one_by_one) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def main() -> None:
    options = command.options(__doc__)
    model = Mixture(one_by_one=options.fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        x, targets = torch.randn(EXPERTS, CAPACITY, 256), torch.randint(1000, (EXPERTS, CAPACITY))
        loss = F.cross_entropy(model(x).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
