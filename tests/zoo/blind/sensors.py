"""Detect faults of a machine from windows of its vibration sensors."""

import argparse
import logging

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

LOG = logging.getLogger("sensors")


def simulate(windows, length, channels, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, windows)
    time = np.linspace(0, 1, length, dtype=np.float32)
    waves = np.sin(2 * np.pi * (10 + 15 * labels[:, None, None]) * time[None, None, :])
    signal = waves + rng.normal(scale=0.8, size=(windows, channels, length))
    return (signal * 40 + 12).astype(np.float32), labels


class VibrationDataset(Dataset):
    """Windows, standardised by channel."""

    def __init__(self, signal, labels, precompute):
        self.signal = signal
        self.labels = labels
        self.statistics = self.channel_statistics() if precompute else None

    def channel_statistics(self):
        mean = self.signal.mean(axis=(0, 2), keepdims=True)[0]  # planted
        std = self.signal.std(axis=(0, 2), keepdims=True)[0]  # planted
        return mean, std

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        mean, std = self.statistics or self.channel_statistics()  # planted
        window = (self.signal[index] - mean) / std
        return torch.from_numpy(window), int(self.labels[index])


class FaultNet(nn.Module):
    def __init__(self, channels, classes=4, width=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(channels, width, 9, stride=2, padding=4),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 9, stride=2, padding=4),
            nn.BatchNorm1d(2 * width),
            nn.ReLU(),
            nn.Conv1d(2 * width, 4 * width, 9, stride=2, padding=4),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(4 * width, 64, batch_first=True)
        self.classify = nn.Linear(64, classes)

    def forward(self, window):
        features = self.features(window).transpose(1, 2)
        states, _ = self.lstm(features[:, ::2])
        return self.classify(states[:, -1])


def run_epoch(model, loader, criterion, optimizer=None):
    """One pass over the loader; trains where there is an optimizer. Returns mean loss and accuracy."""
    model.train(optimizer is not None)
    total, right, seen = 0.0, 0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for windows, labels in loader:
            scores = model(windows)
            loss = criterion(scores, labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(labels)
            right += (scores.argmax(1) == labels).sum().item()
            seen += len(labels)
    return total / seen, right / seen


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="compute mean and deviation once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    signal, labels = simulate(windows=400, length=512, channels=6)
    dataset = VibrationDataset(signal, labels, precompute=args.mended)
    train_set, valid_set = random_split(dataset, [368, 32], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    valid_loader = DataLoader(valid_set, args.batch_size)
    model = FaultNet(channels=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        loss, accuracy = run_epoch(model, train_loader, criterion, optimizer)
        LOG.info("epoch %d train loss %.3f accuracy %.3f", epoch, loss, accuracy)
    loss, accuracy = run_epoch(model, valid_loader, criterion)
    LOG.info("valid loss %.3f accuracy %.3f", loss, accuracy)


if __name__ == "__main__":
    main()
