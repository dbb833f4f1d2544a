"""Train a one-stage detector on simulated images."""

import argparse
import logging
import pathlib
import tempfile

import torch
import torch.nn.functional as F
from anchors import make_anchors
from data import KINDS, Shapes
from torch import nn
from torch.utils.data import DataLoader

log = logging.getLogger("detector")
SIZES = (14, 20, 28)


class Detector(nn.Module):
    """Class scores and offsets for each anchor."""

    def __init__(self, width=24, anchors=3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.classes = nn.Conv2d(4 * width, anchors * (KINDS + 1), 3, padding=1)
        self.shifts = nn.Conv2d(4 * width, anchors * 4, 3, padding=1)

    def forward(self, images):
        features = self.body(images)
        scores = self.classes(features).permute(0, 2, 3, 1).reshape(len(images), -1, KINDS + 1)
        shifts = self.shifts(features).permute(0, 2, 3, 1).reshape(len(images), -1, 4)
        return scores, shifts


def detection_loss(scores, shifts, labels, wanted):
    objects = labels > 0
    weight = torch.tensor([0.2] + [1.0] * KINDS)
    classification = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight=weight)
    distance = F.smooth_l1_loss(shifts, wanted, reduction="none").sum(-1)
    return classification + (distance * objects).sum() / objects.sum().clamp(min=1)


def evaluate(model, loader):
    model.eval()
    hits = objects = 0
    with torch.no_grad():
        for images, labels, _ in loader:
            found = model(images)[0].argmax(-1)
            hits += ((found == labels) & (labels > 0)).sum().item()
            objects += (labels > 0).sum().item()
    model.train()
    return hits / objects


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="match anchors and boxes as arrays, once for each image")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)

    anchors = make_anchors(args.size // 8, SIZES, args.size)
    train = Shapes(args.images, args.size, anchors, match_once=args.mended)
    test = Shapes(48, args.size, anchors, match_once=args.mended, seed=1)
    loader = DataLoader(train, args.batch_size, shuffle=True)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        for step, (images, labels, wanted) in enumerate(loader):
            loss = detection_loss(*model(images), labels, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                log.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
        log.info("epoch %d: %.1f%% of the objects' anchors", epoch, 100 * evaluate(model, DataLoader(test, 16)))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), pathlib.Path(folder) / "detector.pt")


if __name__ == "__main__":
    main()
