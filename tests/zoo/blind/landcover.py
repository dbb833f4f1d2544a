"""Segment aerial images: each pixel's kind of land, from masks that are painted in colors."""

import argparse
import logging

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("landcover")
COLORS = [(red, green, blue) for red in (0, 255) for green in (0, 255) for blue in (0, 255)]
PALETTE = {color: kind for kind, color in enumerate(COLORS)}
CLASSES = len(COLORS)


def paint(count, size, seed):
    """Images and their masks in colors of the palette."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, CLASSES, (count, size // 8, size // 8))
    kinds = coarse.repeat(8, axis=1).repeat(8, axis=2)
    masks = np.array(COLORS, dtype=np.uint8)[kinds]
    noise = generator.integers(0, 40, (count, size, size, 3), dtype=np.uint8)
    return (masks // 2 + noise).astype(np.uint8), masks


class LandCover(Dataset):
    def __init__(self, images, masks, at_once):
        self.images = images
        self.masks = masks
        self.at_once = at_once

    def __len__(self):
        return len(self.images)

    def classes(self, mask):
        if self.at_once:
            return (mask > 127) @ np.array([4, 2, 1])
        kinds = np.zeros(mask.shape[:2], dtype=np.int64)
        for y, row in enumerate(mask.tolist()):  # planted
            for x, color in enumerate(row):  # planted
                kinds[y, x] = PALETTE[tuple(color)]  # planted
        return kinds

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255
        return image, torch.from_numpy(self.classes(self.masks[index]))


class SmallUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = self.block(3, width)
        self.down2 = self.block(width, 2 * width)
        self.bottom = self.block(2 * width, 4 * width)
        self.up2 = self.block(6 * width, 2 * width)
        self.up1 = self.block(3 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def block(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.bottom(F.max_pool2d(two, 2))
        two = self.up2(torch.cat([two, F.interpolate(low, scale_factor=2)], dim=1))
        one = self.up1(torch.cat([one, F.interpolate(two, scale_factor=2)], dim=1))
        return self.out(one)


@torch.no_grad()
def mean_iou(model, loader):
    model.eval()
    shared, either = torch.zeros(CLASSES), torch.zeros(CLASSES)
    for images, classes in loader:
        best = F.one_hot(model(images).argmax(1), CLASSES).bool()
        real = F.one_hot(classes, CLASSES).bool()
        shared += (best & real).sum(dim=(0, 1, 2))
        either += (best | real).sum(dim=(0, 1, 2))
    model.train()
    return (shared / either.clamp(min=1)).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="translate all colors of a mask at once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    train = DataLoader(LandCover(*paint(320, args.size, 0), args.mended), args.batch_size, shuffle=True)
    test = DataLoader(LandCover(*paint(16, args.size, 1), args.mended), args.batch_size)
    model = SmallUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        for step, (images, classes) in enumerate(train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                log.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
        log.info("mean IoU %.3f", mean_iou(model, test))


if __name__ == "__main__":
    main()
