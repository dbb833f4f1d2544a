"""Two ranks that train a deep MLP.

Planted: find_unused_parameters=True, although all are used.
Expected: unused-parameters
Ranks: 2
"""

import torch
from torch import distributed
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.zoo import command
from tests.zoo.models import mlp


def main() -> None:
    options = command.options(__doc__)
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(mlp(64, 32, 300, 1), bucket_cap_mb=0.5, find_unused_parameters=options.fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(256, 64), torch.randn(256, 1)
        loss = mse_loss(model(x), y)  # planted
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
