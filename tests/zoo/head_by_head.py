"""A tiny GPT whose attention goes through its heads one by one.

Planted: a Python loop over the heads, each with its own projections.
Expected: loop-in-step
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import command
from tests.zoo.models import GPT, Attention

HEADS = 16
LENGTH = 64


class HeadByHead(nn.Module):
    """Attention with a Linear layer for every head, query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.ModuleList(nn.Linear(width, width // heads) for _ in range(heads))
        self.key = nn.ModuleList(nn.Linear(width, width // heads) for _ in range(heads))
        self.value = nn.ModuleList(nn.Linear(width, width // heads) for _ in range(heads))
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = []
        for head in range(HEADS):
            query, key, value = self.query[head](x), self.key[head](x), self.value[head](x)  # planted
            mixed.append(F.scaled_dot_product_attention(query, key, value, is_causal=True))  # planted
        return self.projection(torch.cat(mixed, dim=-1))


def main() -> None:
    options = command.options(__doc__)
    model = GPT(heads=HEADS, length=LENGTH, attention=HeadByHead if options.fault else Attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(1024, (4, LENGTH + 1))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
