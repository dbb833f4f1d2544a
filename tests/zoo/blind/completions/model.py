"""A small decoder that keeps keys and values of what it has read."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, keys, values, begin):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        end = begin + length
        keys[:, :, begin:end], values[:, :, begin:end] = k, v
        mixed = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Cache:
    """Room for keys and values of a batch."""

    def __init__(self, layers, batch, heads, length, size):
        self.keys = torch.zeros(layers, batch, heads, length, size)
        self.values = torch.zeros(layers, batch, heads, length, size)
        self.used = 0


class Decoder(nn.Module):
    def __init__(self, vocabulary, length, width=160, layers=3, heads=4):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.heads, self.length = heads, length

    def new_cache(self, batch):
        size = self.words.embedding_dim // self.heads
        return Cache(len(self.layers), batch, self.heads, self.length, size)

    def forward(self, ids, cache):
        """Scores of what follows the last of `ids`, whose keys and values go to the cache."""
        begin, end = cache.used, cache.used + ids.shape[1]
        x = self.words(ids) + self.places.weight[begin:end]
        for index, layer in enumerate(self.layers):
            x = layer(x, cache.keys[index], cache.values[index], begin)
        cache.used = end
        return self.head(self.norm(x[:, -1]))
