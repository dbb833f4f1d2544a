"""Embeddings of the categories beside the numbers, and an MLP."""

import torch
from data import CATEGORICAL, NUMERIC
from torch import nn


class TabularNet(nn.Module):
    def __init__(self, width=512, depth=3, embedding=16, dropout=0.1):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, embedding) for size in CATEGORICAL.values())
        layers, inputs = [], len(NUMERIC) + embedding * len(CATEGORICAL)
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
            inputs = width
        self.body = nn.Sequential(*layers)
        self.out = nn.Linear(width, 1)

    def forward(self, numbers, categories):
        embedded = [embedding(categories[:, index]) for index, embedding in enumerate(self.embeddings)]
        return self.out(self.body(torch.cat([numbers, *embedded], dim=1))).squeeze(1)
