#!/usr/bin/env python
"""Find promoters in a genome: a convolutional network on windows of a chromosome, read from FASTA."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BASES = "ACGT"
MOTIF = "TATAAAGGCC"


def write_fasta(path, length, starts, seed=0):
    rng = random.Random(seed)
    bases = rng.choices("ACGTacgt", k=length)
    for start in starts:
        bases[start : start + len(MOTIF)] = MOTIF
    text = "".join(bases)
    with open(path, "w") as file:
        file.write(">chr1 simulated\n")
        for begin in range(0, length, 60):
            file.write(text[begin : begin + 60] + "\n")


class Chromosome:
    """One record of a FASTA file."""

    def __init__(self, path, join_once=False):
        with open(path) as file:
            self.name = next(file)[1:].split()[0]
            self.lines = file.read().splitlines()
        self.joined = self.join() if join_once else None

    def join(self):
        return "".join(self.lines).upper()  # planted

    @property
    def sequence(self):
        return self.joined if self.joined is not None else self.join()  # planted


class Windows(Dataset):
    """One-hot windows of the chromosome; half of them hold a promoter."""

    def __init__(self, chromosome, starts, width, count, length, seed):
        self.chromosome = chromosome
        self.width = width
        rng = random.Random(seed)
        self.items = []
        for number in range(count):
            if number % 2:
                begin = rng.choice(starts) - rng.randrange(width - len(MOTIF))
            else:
                begin = rng.randrange(length - width)
            self.items.append((max(0, min(begin, length - width)), number % 2))
        codes = np.zeros((256, len(BASES)), dtype=np.float32)
        for number, base in enumerate(BASES):
            codes[ord(base), number] = 1
        self.codes = codes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        begin, label = self.items[index]
        window = self.chromosome.sequence[begin : begin + self.width]  # planted
        letters = np.frombuffer(window.encode("ascii"), dtype=np.uint8)
        return torch.from_numpy(self.codes[letters].T.copy()), label


class PromoterNet(nn.Module):
    def __init__(self, filters=64):
        super().__init__()
        self.scan = nn.Conv1d(4, filters, 11, padding=5)
        self.pool = nn.AvgPool1d(4)
        self.context = nn.Conv1d(filters, 2 * filters, 5, padding=2)
        self.dense = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * filters, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        x = self.pool(torch.relu(self.scan(x)))
        x = torch.relu(self.context(x))
        return self.dense(x.max(dim=-1).values)


def accuracy(model, loader):
    model.eval()
    hits = total = 0
    with torch.inference_mode():
        for windows, labels in loader:
            hits += int((model(windows).argmax(dim=1) == labels).sum())
            total += len(labels)
    model.train()
    return hits / total


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1_200_000, help="bases of the chromosome")
    parser.add_argument("--width", type=int, default=400)
    parser.add_argument("--windows", type=int, default=2208)
    parser.add_argument("-b", "--batch-size", type=int, default=48)
    parser.add_argument("-e", "--epochs", type=int, default=1)
    parser.add_argument("--mended", action="store_true", help="join the lines once, when the file is read")
    return parser.parse_args(words)


def main():
    args = parse_arguments()
    torch.manual_seed(1)
    starts = list(range(1000, args.length - 1000, 700))
    with tempfile.TemporaryDirectory() as folder:
        fasta = Path(folder) / "chr1.fa"
        write_fasta(fasta, args.length, starts)
        chromosome = Chromosome(fasta, join_once=args.mended)
    train = Windows(chromosome, starts[:-60], args.width, args.windows, args.length, seed=2)
    held_out = Windows(chromosome, starts[-60:], args.width, 128, args.length, seed=3)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = PromoterNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(args.epochs):
        running = 0.0
        for windows, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(windows), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
        score = accuracy(model, DataLoader(held_out, batch_size=args.batch_size))
        print(f"[{chromosome.name}] epoch {epoch}: loss {running / len(loader):.3f}, held out {score:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
