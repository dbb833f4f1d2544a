"""Predict whether an advert is clicked, from categories with many values such as the site and the device's model."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn

SIZES = {"site": 900, "advertiser": 500, "device": 400, "city": 300, "hour": 24, "slot": 12}


def impressions(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the categories, in columns, and clicks. The first values of a category are the most frequent."""
    rng = np.random.default_rng(seed)
    weights = np.random.default_rng(99)
    codes, score = [], np.full(count, -1.5)
    for size in SIZES.values():
        column = np.minimum((size * rng.random(count) ** 2).astype(np.int64), size - 1)
        score += weights.normal(0, 0.8, size)[column]
        codes.append(column)
    clicks = rng.random(count) < 1 / (1 + np.exp(-score))
    return np.stack(codes, axis=1), clicks.astype(np.float32)


class OneHot:
    """A column of zeros and ones for each value of each category."""

    def __init__(self) -> None:
        self.offsets = np.cumsum([0, *SIZES.values()])

    def __call__(self, codes: np.ndarray) -> torch.Tensor:
        columns = np.zeros((len(codes), self.offsets[-1]), dtype=np.float32)  # planted
        np.put_along_axis(columns, codes + self.offsets[:-1], 1.0, axis=1)  # planted
        return torch.from_numpy(columns)  # planted


class Codes(OneHot):
    """The numbers of the columns that would be one."""

    def __call__(self, codes: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(codes + self.offsets[:-1])


class ClickNet(nn.Module):
    """The first layer's weights have a row for each value of each category."""

    def __init__(self, width: int, looked_up: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(0.05 * torch.randn(sum(SIZES.values()), width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.looked_up = looked_up
        self.hidden = nn.Sequential(
            nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.out = nn.Linear(width, 1)

    def first(self, features: torch.Tensor) -> torch.Tensor:
        if self.looked_up:
            return nn.functional.embedding_bag(features, self.weights, mode="sum") + self.bias
        return features @ self.weights + self.bias  # planted

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.first(features))).squeeze(1)


@torch.no_grad()
def log_loss(model: ClickNet, encode: OneHot, codes: np.ndarray, clicks: np.ndarray) -> float:
    model.eval()
    parts = [model(encode(part)) for part in np.array_split(codes, 8)]
    model.train()
    return nn.functional.binary_cross_entropy_with_logits(torch.cat(parts), torch.from_numpy(clicks)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impressions", type=int, default=65536)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--mended", action="store_true", help="look the categories' weights up by their codes")
    args = parser.parse_args()
    torch.manual_seed(0)
    codes, clicks = impressions(args.impressions, seed=0)
    held_out = impressions(4096, seed=1)
    encode = Codes() if args.mended else OneHot()
    model = ClickNet(args.width, looked_up=args.mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    rng = np.random.default_rng(2)
    for epoch in range(args.epochs):
        order = rng.permutation(len(codes))
        for step in range(len(codes) // args.batch_size):
            rows = order[step * args.batch_size : (step + 1) * args.batch_size]
            scores = model(encode(codes[rows]))
            loss = nn.functional.binary_cross_entropy_with_logits(scores, torch.from_numpy(clicks[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 32 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} held out {log_loss(model, encode, *held_out):.4f}")


if __name__ == "__main__":
    main()
