"""Layers of the encoder and decoder."""

import math

import torch
from torch import nn


def sinusoids(length, width):
    """Positions as sines and cosines of many wavelengths, (length, width)."""
    table = torch.zeros(length, width)
    for position in range(length):
        for i in range(0, width, 2):
            angle = position / (10000 ** (i / width))
            table[position, i] = math.sin(angle)
            table[position, i + 1] = math.cos(angle)
    return table


class PositionalEncoding(nn.Module):
    def __init__(self, width, max_length, precompute):
        super().__init__()
        self.width = width
        self.dropout = nn.Dropout(0.1)
        self.precompute = precompute
        if precompute:
            self.register_buffer("table", sinusoids(max_length, width), persistent=False)

    def forward(self, x):
        length = x.shape[1]
        if self.precompute:
            return self.dropout(x + self.table[:length])
        return self.dropout(x + sinusoids(length, self.width).to(x.device))  # planted


class Seq2Seq(nn.Module):
    def __init__(self, vocabulary, width, max_length, precompute):
        super().__init__()
        self.scale = math.sqrt(width)
        self.source_embedding = nn.Embedding(vocabulary, width)
        self.target_embedding = nn.Embedding(vocabulary, width)
        self.position = PositionalEncoding(width, max_length, precompute)
        self.transformer = nn.Transformer(
            width, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=4 * width, batch_first=True
        )
        self.project = nn.Linear(width, vocabulary)
        causal = torch.full((max_length, max_length), float("-inf")).triu(1)
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, source, target):
        length = target.shape[1]
        encoded = self.position(self.source_embedding(source) * self.scale)
        decoded = self.position(self.target_embedding(target) * self.scale)
        mixed = self.transformer(encoded, decoded, tgt_mask=self.causal[:length, :length], tgt_is_causal=True)
        return self.project(mixed)
