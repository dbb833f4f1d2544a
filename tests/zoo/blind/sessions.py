"""Predict purchases from the click streams of a web shop, which are kept as JSON lines."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

PAGES = ("home", "search", "category", "product", "reviews", "cart", "shipping", "help", "account", "offers")
BROWSERS = ("Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101", "Mozilla/5.0 (Windows NT 10.0; Win64) AppleWebKit/537.36")


def write_sessions(path, count, length, seed):
    """A file with one visit a line, as the shop's tracking exports it."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            eager = rng.random()
            events = []
            clock = 1_700_000_000.0
            for position in range(length):
                clock += rng.expovariate(0.05)
                page = rng.choice(PAGES[:5]) if rng.random() > eager / 2 else rng.choice(PAGES[3:7])
                events.append(
                    {
                        "at": round(clock, 3),
                        "page": page,
                        "url": f"https://shop.example/{page}?ref={rng.getrandbits(40):x}&pos={position}",
                        "scroll": round(rng.random(), 4),
                        "view": {"width": 1280, "height": 720, "zoom": 1.0, "dark": rng.random() < 0.3},
                        "tests": {f"variant_{test}": rng.random() < 0.5 for test in range(14)},
                    }
                )
            visit = {"visit": number, "browser": rng.choice(BROWSERS), "events": events, "bought": eager > 0.6}
            file.write(json.dumps(visit) + "\n")


class Visits(Dataset):
    def __init__(self, path):
        self.lines = path.read_text().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        visit = json.loads(self.lines[index])  # planted
        events = visit["events"]
        pages = torch.tensor([PAGES.index(event["page"]) for event in events])
        times = torch.tensor([[event["at"] - events[0]["at"], event["scroll"]] for event in events])
        times[:, 0] = torch.log1p(times[:, 0])
        return pages, times, torch.tensor(float(visit["bought"]))


def in_memory(visits):
    """The same as tensors of the whole file."""
    pages, times, bought = zip(*(visits[index] for index in range(len(visits))), strict=True)
    return TensorDataset(torch.stack(pages), torch.stack(times), torch.stack(bought))


class PurchaseModel(nn.Module):
    def __init__(self, width=112):
        super().__init__()
        self.page = nn.Embedding(len(PAGES), 32)
        self.mix = nn.Sequential(nn.Linear(34, width), nn.ReLU())
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, pages, times):
        x = self.mix(torch.cat([self.page(pages), times], dim=-1))
        states, last = self.gru(x)
        return self.head(torch.cat([states.mean(dim=1), last[0]], dim=-1)).squeeze(-1)


def evaluate(model, loader):
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for pages, times, bought in loader:
            right += ((model(pages, times) > 0) == bought.bool()).sum().item()
            seen += len(bought)
    model.train()
    return right / seen


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=int, default=1920)
    parser.add_argument("--events", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mended", action="store_true", help="parse the file once")
    args = parser.parse_args()
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        train_file, test_file = Path(folder) / "train.jsonl", Path(folder) / "test.jsonl"
        write_sessions(train_file, args.visits, args.events, seed=0)
        write_sessions(test_file, 192, args.events, seed=1)
        train_set, test_set = Visits(train_file), Visits(test_file)
        if args.mended:
            train_set, test_set = in_memory(train_set), in_memory(test_set)
        loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
        test_loader = DataLoader(test_set, args.batch_size)
        model = PurchaseModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
        for epoch in range(args.epochs):
            for step, (pages, times, bought) in enumerate(loader):
                loss = F.binary_cross_entropy_with_logits(model(pages, times), bought)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 20 == 0:
                    print(f"epoch {epoch} step {step:3d} loss {loss.item():.4f}")
            print(f"epoch {epoch} test accuracy {evaluate(model, test_loader):.3f}")
        torch.save({"model": model.state_dict(), "args": vars(args)}, Path(folder) / "purchase.pt")


if __name__ == "__main__":
    main()
