"""Name the animals on photos of camera traps; reports loss and accuracy while it trains."""

import argparse
import math
import tempfile
import time
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def camera_photos(count, animals, size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(animals, (count,), generator=generator)
    photos = torch.randn(count, 3, size, size, generator=generator)
    stripes = torch.sin(torch.arange(size) * 2 * math.pi / (2 + torch.arange(animals)[:, None]))
    photos += stripes[labels][:, None, None, :]
    return TensorDataset(photos, labels)


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // 4, 1),
            nn.ReLU(),
            nn.Conv2d(channels // 4, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return x * self.gate(x)


def conv_stage(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
        SqueezeExcite(outputs),
    )


class AnimalNet(nn.Module):
    def __init__(self, animals):
        super().__init__()
        self.stages = nn.Sequential(conv_stage(3, 24), conv_stage(24, 48), conv_stage(48, 96))
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(96, animals)

    def forward(self, x):
        return self.out(self.dropout(self.stages(x).mean((2, 3))))


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean().item()


def accuracy_of(model, images, target):
    """Without dropout."""
    model.eval()
    with torch.no_grad():
        output = model(images)  # planted
    model.train()
    return accuracy(output, target)


def training_accuracy(model, images, output, target, args):
    if args.mended:
        return accuracy(output.detach(), target)
    return accuracy_of(model, images, target)  # planted


def train_epoch(loader, model, criterion, optimizer, epoch, args):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        top1.update(training_accuracy(model, images, output, target, args), images.size(0))
        if i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(loader)}]\tTime {time.time() - end:.2f}\t"
                f"Loss {losses.avg:.4f}\tAcc@1 {top1.avg:.3f}"
            )
            end = time.time()


def validate(loader, model):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            top1.update(accuracy(model(images), target), images.size(0))
    return top1.avg


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=640)
    parser.add_argument("--animals", type=int, default=10)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("-p", "--print-freq", type=int, default=20)
    parser.add_argument("--mended", action="store_true", help="take the accuracy from the output of the loss")
    args = parser.parse_args()
    torch.manual_seed(0)

    train_loader = DataLoader(camera_photos(args.photos, args.animals, args.size, 0), args.batch_size, shuffle=True)
    val_loader = DataLoader(camera_photos(64, args.animals, args.size, 1), args.batch_size)
    model = AnimalNet(args.animals)
    optimizer = optim.Adam(model.parameters(), args.lr, fused=True)
    best = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(args.epochs):
            train_epoch(train_loader, model, nn.CrossEntropyLoss(), optimizer, epoch, args)
            acc = validate(val_loader, model)
            print(f" * Acc@1 {acc:.3f}")
            if acc >= best:
                best = acc
                torch.save({"epoch": epoch, "state_dict": model.state_dict()}, Path(folder) / "model_best.pth.tar")


if __name__ == "__main__":
    main()
