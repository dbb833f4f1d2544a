"""Segment kinds of cells under the microscope, with a Dice loss over all classes."""

import argparse
import logging
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LOGGER = logging.getLogger("cells")
KINDS = ("background", "lymphocyte", "neutrophil", "plasma", "epithelial", "connective", "mitosis", "debris", "other")


def draw_cells(count, size, seed):
    """Images with discs, and the kind of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = 0.2 * torch.randn(count, 3, size, size, generator=generator)
    kinds = torch.zeros(count, size, size, dtype=torch.long)
    for number in range(count):
        for _ in range(8):
            kind, radius = rng.randrange(1, len(KINDS)), rng.randrange(4, 10)
            disc = (rows - rng.randrange(size)) ** 2 + (columns - rng.randrange(size)) ** 2 < radius**2
            kinds[number][disc] = kind
            images[number, kind % 3][disc] += 0.3 + 0.1 * kind
    return TensorDataset(images, kinds)


def dice_loss(scores, kinds, smooth=1.0):
    """1 minus the mean Dice coefficient of images and classes."""
    probabilities = scores.softmax(dim=1)
    batch, classes = scores.shape[:2]
    loss = 0.0
    for image in range(batch):  # planted
        for kind in range(classes):  # planted
            found = probabilities[image, kind].flatten()  # planted
            true = (kinds[image] == kind).float().flatten()  # planted
            overlap = (found * true).sum()  # planted
            loss = loss + 1 - (2 * overlap + smooth) / (found.sum() + true.sum() + smooth)  # planted
    return loss / (batch * classes)


def dice_loss_at_once(scores, kinds, smooth=1.0):
    probabilities = scores.softmax(dim=1).flatten(2)
    true = torch.zeros_like(probabilities).scatter_(1, kinds.flatten(1).unsqueeze(1), 1.0)
    overlap = (probabilities * true).sum(-1)
    return (1 - (2 * overlap + smooth) / (probabilities.sum(-1) + true.sum(-1) + smooth)).mean()


class Segmenter(nn.Module):
    """Dilated convolutions at half the resolution."""

    def __init__(self, classes, width=40):
        super().__init__()
        self.down = nn.Conv2d(3, width, 4, stride=2, padding=1)
        self.body = nn.ModuleList([nn.Conv2d(width, width, 3, padding=rate, dilation=rate) for rate in (1, 2, 4)])
        self.up = nn.ConvTranspose2d(width, classes, 2, stride=2)

    def forward(self, x):
        x = F.relu(self.down(x))
        for layer in self.body:
            x = x + F.relu(layer(x))
        return self.up(x)


def pixel_accuracy(model, loader):
    model.eval()
    right, seen = 0, 0
    with torch.no_grad():
        for images, kinds in loader:
            right += (model(images).argmax(1) == kinds).sum().item()
            seen += kinds.numel()
    model.train()
    return right / seen


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dice-weight", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mended", action="store_true", help="compute the Dice loss of all classes at once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    train_loader = DataLoader(draw_cells(args.images, args.size, 0), args.batch_size, shuffle=True)
    valid_loader = DataLoader(draw_cells(16, args.size, 1), args.batch_size)
    model = Segmenter(len(KINDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    dice = dice_loss_at_once if args.mended else dice_loss
    best = 0.0
    with TemporaryDirectory() as folder:
        for epoch in range(args.epochs):
            for step, (images, kinds) in enumerate(train_loader):
                scores = model(images)
                loss = F.cross_entropy(scores, kinds) + args.dice_weight * dice(scores, kinds)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 20 == 0:
                    LOGGER.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
            accuracy = pixel_accuracy(model, valid_loader)
            LOGGER.info("epoch %d accuracy %.3f", epoch, accuracy)
            if accuracy > best:
                best = accuracy
                torch.save(model.state_dict(), Path(folder) / "best.pt")


if __name__ == "__main__":
    main()
