"""A tiny GPT whose attention is written out.

Planted: scores, mask, softmax and product as operators of their own, each as large as the length squared.
Expected: unfused-attention
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import GPT, Attention

LENGTH = 256


class WrittenOut(Attention):
    """Attention as the paper writes it."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # planted
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))  # planted
        weights = torch.softmax(scores, dim=-1)  # planted
        return self.merge(weights @ value)  # planted


def main() -> None:
    options = command.options(__doc__)
    attention = WrittenOut if options.fault else Attention
    model = GPT(length=LENGTH, vocabulary=512, layers=2, heads=8, attention=attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(512, (2, LENGTH + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
