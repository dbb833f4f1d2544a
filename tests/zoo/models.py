"""Models of the usual kinds, small enough for a processor: a GPT, a ResNet, a recommender, an MLP, a text encoder."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, each (batch, heads, length, width of a head)."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        return tuple(split.permute(2, 0, 3, 1, 4))

    def merge(self, mixed: Tensor) -> Tensor:
        """The heads side by side again, projected."""
        return self.projection(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, attention: nn.Module, activation: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm_1 = norm(width)
        self.attention = attention
        self.norm_2 = norm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class GPT(nn.Module):
    """A decoder in the manner of nanoGPT; parts of it can be replaced by others."""

    def __init__(
        self,
        vocabulary: int = 1024,
        width: int = 128,
        heads: int = 4,
        layers: int = 3,
        length: int = 128,
        attention: type[nn.Module] = Attention,
        activation: type[nn.Module] = nn.GELU,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, attention(width, heads), activation(), norm) for _ in range(layers))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        """What stands before the head; (batch, length, width)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity() if stride == 1 and channels == out else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.first(x)))
        return F.relu(self.norm_2(self.second(y)) + self.shortcut(x))


def resnet(classes: int = 10, width: int = 16) -> nn.Module:
    """A small ResNet for images of 32 by 32."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def mlp(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    sizes = [inputs, *[width] * layers]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Recommender(nn.Module):
    """In the manner of DLRM: embeddings of categories, a network for numbers, and their products."""

    def __init__(self, tables: int = 8, rows: int = 5000, width: int = 32, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = mlp(13, 128, 2, width)
        self.top = mlp(width + (tables + 1) * tables // 2, 256, 2, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Scores; `numbers` is (batch, 13), `categories` (batch, tables, lookups)."""
        dense = self.bottom(numbers)
        looked_up = []
        for index, table in enumerate(self.tables):
            looked_up.append(table(categories[:, index]))  # planted: dense_embedding_gradient
        stacked = torch.stack([dense, *looked_up], dim=1)
        products = stacked @ stacked.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


class Encoder(nn.Module):
    """A text classifier: an encoder of transformer layers, its mean, a score for each class."""

    def __init__(self, vocabulary: int = 2000, width: int = 128, layers: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Scores (batch, classes); `padding` is true where a token is none."""
        embedded = self.embedding(tokens)
        encoded = self.encoder(embedded, src_key_padding_mask=padding)  # planted: padded_batches
        return self.head(encoded.mean(1))
