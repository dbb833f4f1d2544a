"""An MLP on tables of numbers that came from NumPy.

Planted: NumPy's numbers are float64, and the model was made float64 to fit them.
Expected: low-precision
"""

import numpy as np
import torch
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp


def main() -> None:
    options = command.options(__doc__)
    generator = np.random.default_rng(0)
    model = mlp(256, 512, 4, 1)
    if options.fault:
        model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(options.steps):
        table, target = generator.standard_normal((512, 256)), generator.standard_normal((512, 1))
        if options.fault:
            x, y = torch.from_numpy(table), torch.from_numpy(target)
        else:
            x, y = torch.from_numpy(table).float(), torch.from_numpy(target).float()
        loss = mse_loss(model(x), y)  # planted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
