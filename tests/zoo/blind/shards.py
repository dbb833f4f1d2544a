"""Regress molecule energies from descriptors that lie in compressed shards on disk."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

FEATURES = 512
SHARD_ROWS = 256


def write_shards(folder, count, seed=0):
    """What an earlier job has left."""
    rng = np.random.default_rng(seed)
    paths = []
    for number in range(count):
        features = rng.normal(size=(SHARD_ROWS, FEATURES)).astype(np.float32).round(2)
        path = folder / f"shard_{number:03d}.npz"
        np.savez_compressed(path, features=features, energy=features[:, :16].sum(axis=1))
        paths.append(path)
    return paths


class ShardedMolecules(Dataset):
    """All rows of all shards."""

    def __init__(self, paths, in_memory):
        self.paths = paths
        self.shards = [self.read(path) for path in paths] if in_memory else None

    @staticmethod
    def read(path):
        with np.load(path) as file:  # planted
            return file["features"], file["energy"]  # planted

    def __len__(self):
        return len(self.paths) * SHARD_ROWS

    def __getitem__(self, index):
        shard, row = divmod(index, SHARD_ROWS)
        features, energy = self.shards[shard] if self.shards else self.read(self.paths[shard])  # planted
        return torch.from_numpy(features[row].copy()), torch.tensor(energy[row])


class EnergyNet(nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.output = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = x + block(x)
        return self.output(x).squeeze(-1)


def validate(model, loader):
    model.eval()
    errors = []
    with torch.no_grad():
        for features, energy in loader:
            errors.append((model(features) - energy).abs().mean())
    model.train()
    return torch.stack(errors).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mended", action="store_true", help="read each shard once")
    args = parser.parse_args()
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), args.shards + 1)
        train = DataLoader(ShardedMolecules(paths[1:], args.mended), args.batch_size, shuffle=True)
        valid_set = torch.utils.data.Subset(ShardedMolecules(paths[:1], args.mended), range(64))
        valid = DataLoader(valid_set, args.batch_size)
        model = EnergyNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
        for epoch in range(args.epochs):
            for features, energy in tqdm(train, desc=f"epoch {epoch}", mininterval=1.0):
                loss = nn.functional.mse_loss(model(features), energy)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: mean absolute error {validate(model, valid):.3f}")


if __name__ == "__main__":
    main()
