"""A compiled MLP with a warm-up of its noise.

Planted: the model counts its calls in an attribute that the compiled code uses, and is compiled anew for every count.
Expected: recompilation
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


class Noisy(nn.Module):
    """An MLP whose input gets noise, less of it from call to call."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.layers = mlp(64, 256, 8, 1)
        if as_tensor:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, x: Tensor) -> Tensor:  # planted
        self.calls += 1  # planted
        return self.layers(x + torch.randn_like(x) / (1 + self.calls))


def main() -> None:
    options = command.options(__doc__)
    torch._dynamo.config.recompile_limit = 1000
    model = Noisy(as_tensor=not options.fault)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(1024, 64), torch.randn(1024, 1)
        loss = mse_loss(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
