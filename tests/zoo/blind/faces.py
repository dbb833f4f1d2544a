"""Several tasks on one network: age, gender and smile of made-up faces."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Faces(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.age = torch.rand(count, generator=generator)
        self.gender = torch.randint(2, (count,), generator=generator)
        self.smile = torch.randint(2, (count,), generator=generator).float()
        self.images = torch.randn(count, 3, 32, 32, generator=generator) * 0.2
        self.images[:, 0] += self.age[:, None, None]
        self.images[:, 1] += self.gender[:, None, None]
        self.images[:, 2] += self.smile[:, None, None]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], {"age": self.age[index], "gender": self.gender[index], "smile": self.smile[index]}


class SharedNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 64, 64),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict({"age": nn.Linear(64, 1), "gender": nn.Linear(64, 2), "smile": nn.Linear(64, 1)})

    def forward(self, images):
        shared = self.trunk(images)
        return {name: head(shared) for name, head in self.heads.items()}


def task_losses(scores, targets):
    return {
        "age": F.mse_loss(scores["age"].squeeze(1), targets["age"]),
        "gender": F.cross_entropy(scores["gender"], targets["gender"]),
        "smile": F.binary_cross_entropy_with_logits(scores["smile"].squeeze(1), targets["smile"]),
    }


def backward_each(losses, weights):
    """Add up the gradients of the tasks."""
    for name, loss in losses.items():
        (weights[name] * loss).backward(retain_graph=True)  # planted


def backward_sum(losses, weights):
    """The same gradients, of the sum."""
    sum(weights[name] * loss for name, loss in losses.items()).backward()


@torch.no_grad()
def report(model, loader):
    model.eval()
    totals = {}
    for images, targets in loader:
        for name, loss in task_losses(model(images), targets).items():
            totals[name] = totals.get(name, 0.0) + loss.item() / len(loader)
    model.train()
    return ", ".join(f"{name} {value:.3f}" for name, value in totals.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faces", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--age-weight", type=float, default=2.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="differentiate the sum of the losses once")
    args = parser.parse_args()
    torch.manual_seed(0)

    train = DataLoader(Faces(args.faces, 0), args.batch_size, shuffle=True)
    valid = DataLoader(Faces(64, 1), args.batch_size)
    model = SharedNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    weights = {"age": args.age_weight, "gender": 1.0, "smile": 1.0}
    backward = backward_sum if args.mended else backward_each
    for epoch in range(args.epochs):
        for step, (images, targets) in enumerate(train):
            losses = task_losses(model(images), targets)
            optimizer.zero_grad()
            backward(losses, weights)
            optimizer.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step}:", {name: round(loss.item(), 3) for name, loss in losses.items()})
        print(f"epoch {epoch} valid: {report(model, valid)}")


if __name__ == "__main__":
    main()
