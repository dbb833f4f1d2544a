"""A small GPT for inference, with an optional cache of keys and values."""

import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, past=None):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), (k, v)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x, past=None):
        mixed, present = self.attention(self.ln1(x), past)
        x = x + mixed
        return x + self.mlp(self.ln2(x)), present


class GPT(nn.Module):
    def __init__(self, vocabulary=1000, width=192, heads=6, layers=4, context=256):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, past=None):
        begin = 0 if past is None else past[0][0].shape[2]
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        presents = []
        for number, block in enumerate(self.blocks):
            x, present = block(x, None if past is None else past[number])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents
