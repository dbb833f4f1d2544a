"""A compiled stack of small layers.

Planted: between the layers, a value is read with .item() inside the compiled function, which breaks the graph there.
Expected: graph-break
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.zoo import command

WIDTH = 16


class Stack(nn.Module):
    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("limit", torch.ones(()))
        self.fault = fault

    def checked(self, x: Tensor) -> Tensor:
        if self.fault and self.limit.item() < 0:  # planted
            raise ValueError("the limit is negative")
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.checked(self.layers[0](x))  # planted
        x = self.checked(self.layers[1](x))  # planted
        x = self.checked(self.layers[2](x))  # planted
        x = self.checked(self.layers[3](x))  # planted
        x = self.checked(self.layers[4](x))  # planted
        return self.layers[5](x)


def main() -> None:
    options = command.options(__doc__)
    model = Stack(options.fault)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    for _ in range(options.steps):
        loss = mse_loss(compiled(torch.randn(8, WIDTH)), torch.zeros(8, WIDTH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
