"""Attention of long documents: each word looks at its neighbours, a few random words and the first ones."""

import random

import torch
import torch.nn.functional as F
from torch import nn


class SparsePattern:
    """Which words see which: a window, the first words, and random links that are the same in each call."""

    def __init__(self, window, first, links, longest, seed):
        rng = random.Random(seed)
        self.window = window
        self.first = first
        self.links = [[rng.randrange(longest) for _ in range(links)] for _ in range(longest)]

    def mask(self, length):
        """True where a word (row) may look at another (column)."""
        allowed = torch.zeros(length, length, dtype=torch.bool)
        for word in range(length):  # planted
            allowed[word, max(0, word - self.window) : word + self.window + 1] = True  # planted
            for other in self.links[word]:  # planted
                if other < length:
                    allowed[word, other] = True  # planted
        allowed[:, : self.first] = True
        allowed[: self.first] = True
        return allowed


class SparseAttention(nn.Module):
    def __init__(self, width, heads, pattern, keep_mask):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.pattern = pattern
        self.keep_mask = keep_mask
        self.masks = {}

    def allowed(self, length):
        if not self.keep_mask:
            return self.pattern.mask(length)  # planted
        if length not in self.masks:
            self.masks[length] = self.pattern.mask(length)
        return self.masks[length]

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed(length))
        return self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads, pattern, keep_mask):
        super().__init__()
        self.attend = SparseAttention(width, heads, pattern, keep_mask)
        self.think = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x):
        x = x + self.attend(self.norms[0](x))
        return x + self.think(self.norms[1](x))
