"""Tell protein families from windows of contact maps that are kept in a columnar table."""

import argparse

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 10


def make_table(count, families, seed):
    """Families and maps of `frames` x SIDE x SIDE numbers, with as many frames as the protein needs."""
    motifs = np.random.default_rng(42).normal(size=(families, 1, SIDE, SIDE))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, families, count)
    frames = rng.integers(20, 41, count)
    maps = [
        (rng.normal(size=(size, SIDE, SIDE)) + 0.4 * motifs[label]).astype(np.float32).ravel()
        for label, size in zip(labels, frames, strict=True)
    ]
    schema = {"family": pl.Int64, "frames": pl.Int64, "map": pl.List(pl.Float32)}
    return pl.DataFrame({"family": labels, "frames": frames, "map": maps}, schema=schema)


def as_python(values):
    """A cell of the table as a list of numbers."""
    return values.to_list()  # planted


def as_numpy(values):
    """A cell of the table as an array that shares its memory."""
    return values.to_numpy()


class ContactMaps(Dataset):
    def __init__(self, table, window, formatted):
        self.families = table["family"].to_torch()
        self.frames = table["frames"].to_list()
        self.maps = table["map"]
        self.window = window
        self.formatted = formatted

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, index):
        cells = self.formatted(self.maps[index])
        frames = torch.tensor(cells).view(-1, SIDE, SIDE)  # planted
        begin = int(torch.randint(0, self.frames[index] - self.window + 1, ()))
        return frames[begin : begin + self.window], self.families[index]


class MapNet(nn.Module):
    def __init__(self, window, families, width=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(window, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(9 * width, families),
        )

    def forward(self, maps):
        return self.body(maps)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(maps).argmax(1) == families).sum() for maps, families in loader)
    model.train()
    return hits.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proteins", type=int, default=3200)
    parser.add_argument("--families", type=int, default=12)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mended", action="store_true", help="take cells as arrays, not as lists")
    args = parser.parse_args()
    torch.manual_seed(6)

    formatted = as_numpy if args.mended else as_python
    train_set = ContactMaps(make_table(args.proteins, args.families, 0), args.window, formatted)
    test_set = ContactMaps(make_table(320, args.families, 1), args.window, formatted)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, 80)
    model = MapNet(args.window, args.families)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for epoch in range(args.epochs):
        losses = []
        for maps, families in loader:
            loss = F.cross_entropy(model(maps), families)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.3f} accuracy {accuracy(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
