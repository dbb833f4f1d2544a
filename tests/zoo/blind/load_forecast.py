"""Forecast the electricity load of the next day from the last two weeks, hour by hour."""

import argparse
import math
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HISTORY = 336
HORIZON = 24
CHANNELS = 8


def make_series(hours, seed=0):
    """Readings of several meters as a list of rows, the way a CSV reader gives them."""
    rng = random.Random(seed)
    rows = []
    for hour in range(hours):
        daily = math.sin(2 * math.pi * hour / 24)
        weekly = math.sin(2 * math.pi * hour / 168)
        rows.append([daily * (meter + 1) + weekly + rng.gauss(0, 0.1) for meter in range(CHANNELS)])
    return rows


class Windows(Dataset):
    """History and future of each hour."""

    def __init__(self, series, as_tensor):
        self.series = torch.tensor(series) if as_tensor else series
        self.as_tensor = as_tensor

    def __len__(self):
        return len(self.series) - HISTORY - HORIZON

    def __getitem__(self, start):
        middle = start + HISTORY
        history = self.series[start:middle]
        future = self.series[middle : middle + HORIZON]
        if self.as_tensor:
            return history, future
        return torch.tensor(history), torch.tensor(future)  # planted


class Forecaster(nn.Module):
    """Dilated convolutions in time, then one linear layer for all hours of the horizon."""

    def __init__(self, width=24, levels=4):
        super().__init__()
        self.inputs = nn.Conv1d(CHANNELS, width, 1)
        self.levels = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**level, dilation=2**level) for level in range(levels)
        )
        self.outputs = nn.Linear(width, CHANNELS * HORIZON)

    def forward(self, history):
        x = self.inputs(history.transpose(1, 2))
        for level in self.levels:
            x = x + torch.relu(level(x))
        return self.outputs(x[:, :, -1]).view(-1, HORIZON, CHANNELS)


def evaluate(model, loader, criterion):
    model.eval()
    with torch.no_grad():
        losses = [criterion(model(history), future) for history, future in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=24 * 130)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="keep the series as a tensor")
    args = parser.parse_args()
    torch.manual_seed(0)

    series = make_series(args.hours)
    split = len(series) - 24 * 28
    train_loader = DataLoader(Windows(series[:split], args.mended), args.batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(Windows(series[split:], args.mended), args.batch_size)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4, fused=True)
    criterion = nn.SmoothL1Loss()
    for epoch in range(args.epochs):
        total, batches = 0.0, 0
        for history, future in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(history), future)
            loss.backward()
            optimizer.step()
            total += loss.item()
            batches += 1
        print(f"epoch {epoch}: train {total / batches:.4f}, valid {evaluate(model, valid_loader, criterion):.4f}")


if __name__ == "__main__":
    main()
