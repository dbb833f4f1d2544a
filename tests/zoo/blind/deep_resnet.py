"""Train a very deep residual network of bottlenecks on small images."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Bottleneck(nn.Module):
    """Pre-activation bottleneck."""

    def __init__(self, width, inner):
        super().__init__()
        self.norm1, self.reduce = nn.BatchNorm2d(width), nn.Conv2d(width, inner, 1, bias=False)
        self.norm2, self.conv = nn.BatchNorm2d(inner), nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.norm3, self.expand = nn.BatchNorm2d(inner), nn.Conv2d(inner, width, 1)

    def forward(self, x):
        out = self.reduce(F.relu(self.norm1(x)))
        out = self.conv(F.relu(self.norm2(out)))
        return x + self.expand(F.relu(self.norm3(out)))


class DeepResNet(nn.Module):
    def __init__(self, classes, blocks, widths=(16, 32), inner=8):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False)
        stages = []
        for index, width in enumerate(widths):
            if index:
                stages.append(nn.Conv2d(widths[index - 1], width, 3, stride=2, padding=1, bias=False))
            stages += [Bottleneck(width, inner) for _ in range(blocks)]
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.stages(self.stem(x)))).mean((2, 3)))


def make_images(count, size, classes, seed):
    """Blobs of noise around a pattern for each class."""
    patterns = torch.randn(classes, 3, size, size, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    images = 0.5 * patterns[labels] + torch.randn(count, 3, size, size, generator=generator)
    return TensorDataset(images, labels)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    model.train()
    return hits.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=768)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=28, help="in each of the two stages")
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mended", action="store_true", help="update all parameters in one fused call")
    args = parser.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(make_images(args.images, args.size, args.classes, 0), args.batch_size, shuffle=True)
    held_out = DataLoader(make_images(256, args.size, args.classes, 1), 64)
    model = DeepResNet(args.classes, args.blocks)
    print(f"{sum(1 for _ in model.parameters())} parameter tensors")
    if args.mended:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)  # planted
    for epoch in range(args.epochs):
        begin, losses = time.time(), []
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()
        print(f"epoch {epoch} loss {mean:.3f} accuracy {accuracy(model, held_out):.3f} in {time.time() - begin:.1f} s")


if __name__ == "__main__":
    main()
