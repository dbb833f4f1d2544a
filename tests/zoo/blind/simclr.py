"""Self-supervised pretraining of images after SimCLR: two views of each, and a contrastive loss."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    """Images of one random texture each, as two noisy crops."""

    def __init__(self, count, size, seed=0):
        self.images = torch.rand(count, 3, size + 8, size + 8, generator=torch.Generator().manual_seed(seed))
        self.size = size

    def __len__(self):
        return len(self.images)

    def crop(self, image):
        top, left = torch.randint(9, (2,)).tolist()
        view = image[:, top : top + self.size, left : left + self.size]
        return view + 0.05 * torch.randn_like(view)

    def __getitem__(self, index):
        image = self.images[index]
        return self.crop(image), self.crop(image)


class Encoder(nn.Module):
    def __init__(self, width=32, projection=64):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(4 * width, 128), nn.ReLU(), nn.Linear(128, projection))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent_pairs(first, second, temperature):
    """Normalised temperature-scaled cross entropy, written as in the paper's formula."""
    z = torch.cat([first, second])
    count = len(first)
    loss = torch.zeros(())
    for i in range(2 * count):
        partner = (i + count) % (2 * count)
        similarities = []
        for j in range(2 * count):
            if j != i:
                similarities.append(torch.dot(z[i], z[j]) / temperature)  # planted
        positive = torch.dot(z[i], z[partner]) / temperature
        loss = loss - positive + torch.logsumexp(torch.stack(similarities), dim=0)  # planted
    return loss / (2 * count)


def nt_xent_matrix(first, second, temperature):
    """The same as one matrix product and a cross entropy."""
    z = torch.cat([first, second])
    count = len(first)
    similarities = (z @ z.T / temperature).masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
    partners = (torch.arange(2 * count) + count) % (2 * count)
    return F.cross_entropy(similarities, partners)


def alignment(first, second):
    """Mean distance of the two views of an image, to log."""
    return (first - second).pow(2).sum(dim=1).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="all similarities as one matrix product")
    args = parser.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(TwoViews(args.images, args.size), args.batch_size, shuffle=True, drop_last=True)
    encoder = Encoder()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=args.lr, weight_decay=1e-4, fused=True)
    contrast = nt_xent_matrix if args.mended else nt_xent_pairs
    for epoch in range(args.epochs):
        for step, (first, second) in enumerate(loader):
            one, other = encoder(first), encoder(second)
            loss = contrast(one, other, args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f} align {alignment(one, other).item():.3f}")


if __name__ == "__main__":
    main()
