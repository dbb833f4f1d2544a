"""Two ranks that train an MLP.

Planted: the gradients are exchanged in buckets of 16 kB, one exchange for nearly every layer.
Expected: small-buckets
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
    bucket_mb = 16 / 1024 if options.fault else 1
    model = DistributedDataParallel(mlp(64, 64, 60, 1), bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(options.steps):
        x, y = torch.randn(512, 64), torch.randn(512, 1)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
