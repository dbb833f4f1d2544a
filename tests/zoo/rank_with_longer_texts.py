"""Two ranks that train a tiny GPT.

Planted: the second rank gets longer texts in every step, and the first waits for it.
Expected: late-rank
Place: everywhere
Ranks: 2
"""

import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.zoo import command
from tests.zoo.models import GPT

LENGTH = 80


def main() -> None:
    options = command.options(__doc__)
    distributed.init_process_group("gloo")
    lengths = (LENGTH // 2, 3 * LENGTH // 2) if options.fault else (LENGTH, LENGTH)
    length = lengths[distributed.get_rank()]
    model = DistributedDataParallel(GPT(vocabulary=512, length=2 * LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(512, (8, length + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
