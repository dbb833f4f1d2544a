"""Predict clicks from a log that is a file of JSON lines."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIELDS = {"user": 2000, "ad": 500, "site": 100, "hour": 24, "device": 8}


def write_log(path, lines, seed=0):
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(lines):
            event = {field: rng.randrange(size) for field, size in FIELDS.items()}
            event["price"] = round(rng.expovariate(1.0), 3)
            event["clicked"] = int(rng.random() < 0.05 + 0.3 * (event["ad"] % 3 == event["user"] % 3))
            file.write(json.dumps(event) + "\n")


class ClickLog(Dataset):
    """The events of the file."""

    def __init__(self, path, indexed):
        self.path = path
        self.offsets = []
        with path.open("rb") as file:
            position = 0
            for line in file:
                self.offsets.append(position)
                position += len(line)
        self.file = path.open("rb") if indexed else None

    def __len__(self):
        return len(self.offsets)

    def read_line(self, index):
        if self.file is not None:
            self.file.seek(self.offsets[index])
            return self.file.readline()
        with self.path.open() as file:  # planted
            for number, line in enumerate(file):  # planted
                if number == index:  # planted
                    return line
        raise IndexError(index)

    def __getitem__(self, index):
        event = json.loads(self.read_line(index))
        categories = torch.tensor([event[field] for field in FIELDS])
        return categories, torch.tensor(event["price"]), torch.tensor(float(event["clicked"]))


class DeepFM(nn.Module):
    """Factorisation machine and MLP over shared embeddings."""

    def __init__(self, width=32, hidden=512):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in FIELDS.values())
        self.linear = nn.ModuleList(nn.Embedding(size, 1) for size in FIELDS.values())
        self.mlp = nn.Sequential(
            nn.Linear(width * len(FIELDS) + 1, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, categories, price):
        vectors = torch.stack([table(categories[:, i]) for i, table in enumerate(self.embeddings)], dim=1)
        first = torch.stack([table(categories[:, i]) for i, table in enumerate(self.linear)], dim=1).sum(dim=(1, 2))
        second = 0.5 * (vectors.sum(dim=1).pow(2) - vectors.pow(2).sum(dim=1)).sum(dim=1)
        deep = self.mlp(torch.cat([vectors.flatten(1), price.unsqueeze(1)], dim=1)).squeeze(1)
        return first + second + deep


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mended", action="store_true", help="go to an event's line in the open file")
    args = parser.parse_args()
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.jsonl"
        write_log(path, args.events)
        loader = DataLoader(ClickLog(path, indexed=args.mended), args.batch_size, shuffle=True)
        model = DeepFM()
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
        criterion = nn.BCEWithLogitsLoss()
        for epoch in range(args.epochs):
            total = torch.zeros(())
            for step, (categories, price, clicked) in enumerate(loader):
                optimizer.zero_grad()
                loss = criterion(model(categories, price), clicked)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                if step % 10 == 9:
                    print(f"epoch {epoch} step {step + 1} loss {total.item() / 10:.4f}")
                    total.zero_()


if __name__ == "__main__":
    main()
