"""A compiled text classifier on texts of many lengths.

Planted: compiled for fixed shapes, it is compiled anew for every length that comes.
Expected: recompilation
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import Encoder


def main() -> None:
    options = command.options(__doc__)
    torch._dynamo.config.recompile_limit = 1000
    model = Encoder()

    def scores(texts: Tensor) -> Tensor:  # planted
        return model(texts)

    compiled = torch.compile(scores, backend="eager", dynamic=not options.fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(options.steps):
        length = 20 + step * 7 % 41
        tokens, labels = torch.randint(1, 2000, (32, length)), torch.randint(4, (32,))
        loss = cross_entropy(compiled(tokens), labels)  # planted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
