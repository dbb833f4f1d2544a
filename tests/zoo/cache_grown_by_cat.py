"""A decoder of its own, with its own cache of keys and values.

Planted: each token appends to the cache by torch.cat, which copies all that is in it.
Expected: growing-work
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import command

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 3, 2048
PROMPT, TOKENS, BATCH = 640, 40, 8


class Growing:
    """Keys and values of one layer, copied to a longer tensor for each token."""

    def __init__(self) -> None:
        self.keys, self.values = (
            torch.empty(BATCH, HEADS, 0, WIDTH // HEADS),
            torch.empty(BATCH, HEADS, 0, WIDTH // HEADS),
        )

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=2)  # planted
        self.values = torch.cat([self.values, values], dim=2)  # planted
        return self.keys, self.values


class Preallocated:
    """Keys and values of one layer, in a tensor with room for all tokens."""

    def __init__(self) -> None:
        self.both = torch.empty(2, BATCH, HEADS, PROMPT + TOKENS, WIDTH // HEADS)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        begin, self.length = self.length, self.length + keys.shape[2]
        self.both[0, :, :, begin : self.length] = keys
        self.both[1, :, :, begin : self.length] = values
        return self.both[0, :, :, : self.length], self.both[1, :, :, : self.length]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Growing | Preallocated) -> Tensor:
        batch, length, _ = x.shape
        split = self.into(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        keys, values = cache.extend(split[1], split[2])
        mixed = F.scaled_dot_product_attention(split[0], keys, values, is_causal=length > 1)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, caches: list[Growing] | list[Preallocated]) -> Tensor:
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x[:, -1])


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    model = Decoder().eval()
    kind = Growing if options.fault else Preallocated
    for _ in command.rounds(options):
        tokens = torch.randint(VOCABULARY, (BATCH, PROMPT))
        caches = [kind() for _ in range(LAYERS)]
        for _ in range(TOKENS):
            tokens = model(tokens, caches).argmax(-1, keepdim=True)


if __name__ == "__main__":
    main()
