"""A feed-forward network that keeps its activations in half precision between layers.

Planted: every layer's input is cast to float32 and its output to bfloat16 again.
Expected: repeated-casts
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.zoo import command

WIDTH = 48


class Network(nn.Module):
    """Layers, each followed by a ReLU."""

    def __init__(self, casting: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.casting = casting

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.casting:
                x = torch.relu(layer(x.float()).to(torch.bfloat16).float()).to(torch.bfloat16)  # planted
            else:
                x = torch.relu(layer(x))
        return x.float()


def main() -> None:
    options = command.options(__doc__)
    model = Network(casting=options.fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        x, y = torch.randn(4096, WIDTH), torch.randn(4096, WIDTH)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
