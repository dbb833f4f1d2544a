"""Classify species whose numbers of sightings differ much, with a weighted loss."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sightings(Dataset):
    """Features of photos and their species, few of which make up most sightings."""

    def __init__(self, count, species, width, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.labels = (species * torch.rand(count, generator=generator) ** 3).long()
        self.centers = torch.randn(species, width, generator=generator)
        self.width = width

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return self.centers[label] + torch.randn(self.width), label


class BalancedLoss(nn.Module):
    """Cross entropy in which rare species weigh more."""

    def __init__(self, labels, species, once):
        super().__init__()
        self.labels = labels
        self.species = species
        self.once = self.weights() if once else None

    def weights(self):
        present, counts = torch.unique(self.labels, return_counts=True)  # planted
        weights = torch.zeros(self.species)  # planted
        weights[present] = 1.0 / counts.float().sqrt()  # planted
        return weights / weights.sum() * self.species

    def forward(self, scores, labels):
        weights = self.weights() if self.once is None else self.once  # planted
        return F.cross_entropy(scores, labels, weight=weights)


class SpeciesNet(nn.Module):
    def __init__(self, width, species, hidden=384):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.BatchNorm1d(hidden),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.GELU(),
            nn.Linear(hidden, species),
        )

    def forward(self, features):
        return self.layers(features)


@torch.no_grad()
def balanced_accuracy(model, loader, species):
    model.eval()
    hits, seen = torch.zeros(species), torch.zeros(species)
    for features, labels in loader:
        right = (model(features).argmax(1) == labels).float()
        hits.index_add_(0, labels, right)
        seen.index_add_(0, labels, torch.ones_like(right))
    model.train()
    return (hits[seen > 0] / seen[seen > 0]).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sightings", type=int, default=400_000)
    parser.add_argument("--species", type=int, default=500)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="count the species once")
    args = parser.parse_args()
    torch.manual_seed(0)

    dataset = Sightings(args.sightings, args.species, args.width)
    loader = DataLoader(dataset, args.batch_size, shuffle=True)
    criterion = BalancedLoss(dataset.labels, args.species, once=args.mended)
    model = SpeciesNet(args.width, args.species)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr * 3, total_steps=args.steps)
    for step, (features, labels) in enumerate(loader, 1):
        loss = criterion(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        if step == args.steps:
            break
    held_out = DataLoader(Sightings(1000, args.species, args.width), 500)
    print(f"balanced accuracy {balanced_accuracy(model, held_out, args.species):.3f}")


if __name__ == "__main__":
    main()
