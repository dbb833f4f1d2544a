"""PointNet on laser scans: tell tables, chairs, lamps from large point clouds."""

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = 5


def make_scan(kind, points, rng):
    """A noisy ellipsoid whose axes depend on the class."""
    direction = rng.normal(size=(points, 3)).astype(np.float32)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    axes = np.array([1 + 0.3 * kind, 1.0, 1.5 - 0.2 * kind], dtype=np.float32)
    return direction * axes + rng.normal(scale=0.02, size=(points, 3)).astype(np.float32)


class Scans(Dataset):
    """Gives a few points of a scan, other ones each time, turned around the vertical axis."""

    def __init__(self, scans, points, views, sample, fast, seed=0):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, CLASSES, scans)
        self.clouds = [make_scan(kind, points, rng) for kind in self.labels]
        self.views = views
        self.sample = sample
        self.fast = fast
        self.rng = rng
        np.random.seed(seed)

    def __len__(self):
        return self.views * len(self.clouds)

    def choose(self, cloud):
        if self.fast:
            return self.rng.choice(len(cloud), self.sample, replace=False, shuffle=False)
        return np.random.choice(len(cloud), self.sample, replace=False)  # planted

    def __getitem__(self, index):
        number = index % len(self.clouds)
        cloud = self.clouds[number]
        points = cloud[self.choose(cloud)]
        angle = self.rng.uniform(0, 2 * np.pi)
        cos, sin = np.cos(angle), np.sin(angle)
        turn = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], dtype=np.float32)
        return torch.from_numpy(points @ turn), int(self.labels[number])


class PointNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.per_point = nn.Sequential(
            nn.Linear(3, width),
            nn.ReLU(),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, 4 * width),
            nn.ReLU(),
        )
        self.classify = nn.Sequential(nn.Linear(4 * width, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, CLASSES))

    def forward(self, points):
        return self.classify(self.per_point(points).max(dim=1).values)


class Trainer:
    def __init__(self, model, lr, epochs):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)

    def fit(self, loader):
        self.model.train()
        total = 0.0
        for points, labels in loader:
            loss = F.cross_entropy(self.model(points), labels)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        self.scheduler.step()
        return total / len(loader)

    @torch.no_grad()
    def test(self, loader):
        self.model.eval()
        hits = [(self.model(points).argmax(-1) == labels).float().mean() for points, labels in loader]
        return torch.stack(hits).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scans", type=int, default=40)
    parser.add_argument("--points", type=int, default=80_000, help="of a scan")
    parser.add_argument("--sample", type=int, default=512, help="points that the network sees")
    parser.add_argument("--views", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="draw without shuffling the whole scan")
    args = parser.parse_args()
    torch.manual_seed(0)

    data = Scans(args.scans, args.points, args.views, args.sample, fast=args.mended)
    test = Scans(10, args.points, 4, args.sample, fast=args.mended, seed=1)
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    trainer = Trainer(PointNet(), args.lr, args.epochs)
    for epoch in range(args.epochs):
        start = time.time()
        loss = trainer.fit(loader)
        print(f"epoch {epoch}: loss {loss:.3f}, {time.time() - start:.1f} s")
    print(f"test accuracy {trainer.test(DataLoader(test, args.batch_size)):.2f}")


if __name__ == "__main__":
    main()
