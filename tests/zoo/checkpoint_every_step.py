"""An MLP that saves its state.

Planted: it does so in every step.
Expected: checkpoint-in-step
"""

import os
import tempfile

import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp

EVERY = 200


def main() -> None:
    options = command.options(__doc__)
    model = mlp(128, 512, 4, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, options.steps + 1):
            x, y = torch.randn(512, 128), torch.randn(512, 1)
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.fault or step % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(folder, "latest.pt"))  # planted


if __name__ == "__main__":
    main()
