"""Read number plates: a training that counts steps, not epochs."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LETTERS = 36
LENGTH = 6


def make_plates(count, seed=0):
    """Patterns of 16 x 48 that depend on the letters."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(LETTERS, (count, LENGTH), generator=generator)
    glyphs = torch.randint(256, (LETTERS, 16, 8), generator=torch.Generator().manual_seed(9), dtype=torch.uint8)
    images = glyphs[letters].permute(0, 2, 1, 3).reshape(count, 1, 16, 8 * LENGTH)
    return TensorDataset(images, letters)


class PlateReader(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.rows = nn.AdaptiveAvgPool2d((4, LENGTH))
        self.head = nn.Linear(8 * width, LETTERS)

    def forward(self, images):
        features = self.rows(self.features(images.float() / 255))
        return self.head(features.flatten(1, 2).transpose(1, 2))


def forever(loader):
    """Epoch after epoch."""
    while True:
        yield from loader


@torch.no_grad()
def accuracy(model, images, letters):
    model.eval()
    best = model(images).argmax(-1)
    model.train()
    return (best == letters).all(dim=1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plates", type=int, default=150_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mended", action="store_true", help="keep the loader's iterator between steps")
    args = parser.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(make_plates(args.plates), batch_size=args.batch_size, shuffle=True)
    valid = make_plates(128, seed=1).tensors
    model = PlateReader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    endless = forever(loader)
    begin = time.time()
    for step in range(1, args.steps + 1):
        if args.mended:
            images, letters = next(endless)
        else:
            images, letters = next(iter(loader))  # planted
        loss = F.cross_entropy(model(images).flatten(0, 1), letters.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0:
            rate = args.log_every / (time.time() - begin)
            print(f"step {step}: loss {loss.item():.3f}, {rate:.1f} steps/s, plates {accuracy(model, *valid):.2%}")
            begin = time.time()


if __name__ == "__main__":
    main()
