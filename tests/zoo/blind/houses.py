"""Estimate prices of houses with a residual MLP."""

import argparse
import logging

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("houses")


def load_table(rows, columns=80, seed=0):
    """Features and prices, the way a CSV reader gives them: float64."""
    generator = np.random.default_rng(seed)
    features = generator.lognormal(size=(rows, columns))
    weights = generator.normal(size=columns)
    prices = np.log1p(np.abs(features @ weights)) + generator.normal(scale=0.1, size=rows)
    return features, prices


def standardize(features, mean=None, std=None):
    mean = features.mean(axis=0) if mean is None else mean
    std = features.std(axis=0) if std is None else std
    return (features - mean) / std, mean, std


class ResidualBlock(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))  # planted


class PriceNet(nn.Module):
    def __init__(self, columns, width=256, depth=3, dropout=0.1):
        super().__init__()
        self.inputs = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width, dropout) for _ in range(depth)))
        self.output = nn.Linear(width, 1)

    def forward(self, features):
        return self.output(self.blocks(self.inputs(features))).squeeze(1)  # planted


def evaluate(model, features, prices):
    model.eval()
    with torch.no_grad():
        result = (model(features) - prices).pow(2).mean().sqrt().item()
    model.train()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_240)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="train in single precision")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    features, prices = load_table(args.rows + 512)
    train_features, mean, std = standardize(features[: args.rows])
    valid_features, _, _ = standardize(features[args.rows :], mean, std)
    tensors = [torch.from_numpy(a) for a in (train_features, prices[: args.rows], valid_features, prices[args.rows :])]
    model = PriceNet(features.shape[1])
    if args.mended:
        tensors = [tensor.float() for tensor in tensors]
    else:
        # else "mat1 and mat2 must have the same dtype"
        model = model.double()  # planted
    x, y, valid_x, valid_y = tensors
    loader = DataLoader(TensorDataset(x, y), args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        total = 0.0
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.huber_loss(model(batch), target)  # planted
            loss.backward()
            optimizer.step()
            total += loss.item()
        log.info("epoch %d train %.4f valid %.4f", epoch, total / len(loader), evaluate(model, valid_x, valid_y))


if __name__ == "__main__":
    main()
