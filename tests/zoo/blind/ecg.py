"""Detect arrhythmia in twelve-lead electrocardiograms with a one-dimensional residual network."""

import argparse
import logging
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)
LEADS = 12
RHYTHMS = ["sinus", "fibrillation", "flutter"]


def simulate_recording(seconds, rate, rhythm, rng):
    """Leads x samples: beats at intervals that depend on the rhythm."""
    signal = rng.normal(scale=0.1, size=(LEADS, seconds * rate)).astype(np.float32)
    spread = [0.02, 0.3, 0.1][rhythm]
    position = 0.3
    while position < seconds - 0.2:
        begin = int(position * rate)
        signal[:, begin : begin + rate // 25] += 1.0
        position += max(0.25, [0.9, 0.7, 0.4][rhythm] + rng.normal(scale=spread))
    return signal


class ECGDataset(Dataset):
    def __init__(self, recordings, window, crops, seed, train):
        self.window = window
        self.crops = crops
        self.train = train
        self.rng = np.random.default_rng(seed)
        self.rhythms = self.rng.integers(0, len(RHYTHMS), recordings)
        self.signals = [simulate_recording(20, 100, rhythm, self.rng) for rhythm in self.rhythms]

    def __len__(self):
        return len(self.signals) * self.crops

    def __getitem__(self, index):
        signal = self.signals[index // self.crops]
        begin = int(self.rng.integers(signal.shape[1] - self.window)) if self.train else 0
        crop = signal[:, begin : begin + self.window]
        if self.train:
            crop = crop * np.float32(self.rng.uniform(0.8, 1.2))
        return crop, self.rhythms[index // self.crops]


def collate(batch):
    signals = [signal for signal, _ in batch]
    rhythms = [rhythm for _, rhythm in batch]
    return torch.tensor(signals), torch.tensor(rhythms)  # planted


def collate_arrays(batch):
    signals, rhythms = zip(*batch, strict=True)
    return torch.from_numpy(np.stack(signals)), torch.from_numpy(np.array(rhythms))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(inputs, outputs, 7, stride, 3, bias=False),
            nn.BatchNorm1d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv1d(outputs, outputs, 7, 1, 3, bias=False),
            nn.BatchNorm1d(outputs),
        )
        self.shortcut = nn.Conv1d(inputs, outputs, 1, stride)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet1d(nn.Module):
    def __init__(self, widths=(48, 72, 96)):
        super().__init__()
        channels = [LEADS, *widths]
        self.blocks = nn.Sequential(*[Block(a, b, 3) for a, b in pairwise(channels)])
        self.head = nn.Linear(channels[-1], len(RHYTHMS))

    def forward(self, signal):
        return self.head(self.blocks(signal).mean(-1))


def train_one_epoch(model, loader, optimizer, criterion, epoch):
    model.train()
    for step, (signal, rhythm) in enumerate(loader):
        output = model(signal)
        loss = criterion(output, rhythm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            logger.info("Epoch %d [%d/%d] loss %.4f", epoch, step, len(loader), loss.item())


@torch.no_grad()
def validate(model, loader):
    model.eval()
    confusion = torch.zeros(len(RHYTHMS), len(RHYTHMS), dtype=torch.long)
    for signal, rhythm in loader:
        predicted = model(signal).argmax(1)
        confusion += torch.bincount(rhythm * len(RHYTHMS) + predicted, minlength=9).view(3, 3)
    return confusion


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=int, default=120)
    parser.add_argument("--window", type=int, default=500)
    parser.add_argument("--crops", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--mended", action="store_true", help="stack the arrays before they become a tensor")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.manual_seed(7)

    together = collate_arrays if args.mended else collate
    train_data = ECGDataset(args.recordings, args.window, args.crops, seed=0, train=True)
    val_data = ECGDataset(32, args.window, 1, seed=1, train=False)
    train_loader = DataLoader(train_data, args.batch_size, shuffle=True, collate_fn=together)
    val_loader = DataLoader(val_data, args.batch_size, collate_fn=together)
    model = ResNet1d()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    criterion = nn.CrossEntropyLoss()
    with TemporaryDirectory() as folder:
        for epoch in range(args.epochs):
            train_one_epoch(model, train_loader, optimizer, criterion, epoch)
            confusion = validate(model, val_loader)
            logger.info("Epoch %d accuracy %.3f", epoch, confusion.diag().sum() / confusion.sum())
            torch.save(model.state_dict(), Path(folder) / f"epoch{epoch}.pt")


if __name__ == "__main__":
    main()
