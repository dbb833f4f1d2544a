"""Segment pictures of streets, whose labels are pictures too, with a colour for each class."""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

COLOURS = np.array(
    [
        (128, 64, 128),  # road
        (244, 35, 232),  # pavement
        (70, 70, 70),  # building
        (190, 153, 153),  # fence
        (250, 170, 30),  # traffic light
        (220, 220, 0),  # traffic sign
        (107, 142, 35),  # vegetation
        (70, 130, 180),  # sky
        (220, 20, 60),  # person
        (0, 0, 142),  # car
    ],
    dtype=np.uint8,
)


def scene(height: int, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A picture and its label, both with three channels of bytes."""
    classes = np.zeros((height, width), dtype=np.int64)
    horizon = height // 2 + rng.integers(-8, 9)
    classes[:horizon] = 7
    for left in range(0, width, 16):
        top = rng.integers(4, horizon)
        classes[top:horizon, left : left + rng.integers(8, 17)] = rng.choice([2, 2, 3, 6])
    classes[horizon:, : rng.integers(6, 24)] = 1
    for kind in rng.choice([4, 5, 8, 9, 9], 4):
        y, x = rng.integers(horizon - 14, height - 12), rng.integers(0, width - 20)
        tall, wide = {4: (10, 4), 5: (6, 6), 8: (14, 5), 9: (9, 18)}[int(kind)]
        classes[y : y + tall, x : x + wide] = kind
    label = COLOURS[classes]
    shades = 0.6 * label[..., [1, 2, 0]] + 50 + rng.normal(0, 25, label.shape)
    return shades.clip(0, 255).astype(np.uint8), label


def classes_by_comparison(label: np.ndarray) -> np.ndarray:
    """Each colour compared with all pixels."""
    classes = np.zeros(label.shape[:2], dtype=np.int64)  # planted
    for number, colour in enumerate(COLOURS):  # planted
        classes[(label == colour).all(axis=2)] = number  # planted
    return classes  # planted


def _key(pixels: np.ndarray) -> np.ndarray:
    """A number for each colour: red and green are enough to tell those of COLOURS apart."""
    return pixels[..., 0].astype(np.int32) * 256 + pixels[..., 1]


CLASS_OF = np.zeros(256 * 256, dtype=np.int64)
CLASS_OF[_key(COLOURS)] = np.arange(len(COLOURS))


def classes_by_table(label: np.ndarray) -> np.ndarray:
    """Each pixel looked up in a table of colours."""
    return CLASS_OF[_key(label)]


class Streets(Dataset):
    def __init__(self, count, height, width, classes_of, seed, augment):
        rng = np.random.default_rng(seed)
        self.scenes = [scene(height, width, rng) for _ in range(count)]
        self.classes_of = classes_of
        self.augment = augment

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        picture, label = self.scenes[index]
        image = torch.from_numpy(picture).permute(2, 0, 1)
        classes = torch.from_numpy(self.classes_of(label))
        if self.augment and torch.rand(()) < 0.5:
            image, classes = image.flip(2), classes.flip(1)
        return image, classes


def conv(inputs, outputs, stride=1, dilation=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class SegmentationNet(nn.Module):
    def __init__(self, classes, width=24):
        super().__init__()
        self.stem = conv(3, width, stride=2)
        self.body = nn.Sequential(
            conv(width, 2 * width, stride=2),
            conv(2 * width, 2 * width, dilation=2),
            conv(2 * width, 2 * width, dilation=4),
        )
        self.skip = nn.Conv2d(width, classes, 1)
        self.head = nn.Conv2d(2 * width, classes, 1)

    def forward(self, image):
        fine = self.stem(image)
        scores = F.interpolate(self.head(self.body(fine)), scale_factor=2, mode="bilinear") + self.skip(fine)
        return F.interpolate(scores, scale_factor=2, mode="bilinear")


def scaled(image):
    """Bytes to numbers from -1 to 1."""
    return image.float() / 127.5 - 1


@torch.no_grad()
def mean_iou(model, loader):
    model.eval()
    confusion = torch.zeros(len(COLOURS), len(COLOURS), dtype=torch.long)
    for image, classes in loader:
        pairs = classes * len(COLOURS) + model(scaled(image)).argmax(1)
        confusion += pairs.flatten().bincount(minlength=len(COLOURS) ** 2).view_as(confusion)
    model.train()
    both = confusion.diag()
    return (both / (confusion.sum(0) + confusion.sum(1) - both).clamp(min=1)).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=640)
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--mended", action="store_true", help="look the colours up in a table")
    args = parser.parse_args()
    torch.manual_seed(0)
    classes_of = classes_by_table if args.mended else classes_by_comparison
    train_set = Streets(args.scenes, args.height, args.width, classes_of, seed=0, augment=True)
    valid_set = Streets(64, args.height, args.width, classes_of, seed=1, augment=False)
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    model = SegmentationNet(len(COLOURS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for epoch in range(args.epochs):
        for step, (image, classes) in enumerate(loader):
            loss = F.cross_entropy(model(scaled(image)), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
        print(f"epoch {epoch} mean IoU {mean_iou(model, DataLoader(valid_set, args.batch_size)):.3f}")


if __name__ == "__main__":
    main()
