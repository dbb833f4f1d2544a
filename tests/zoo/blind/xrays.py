"""Tell healthy from ill in made-up X-ray images, with augmentation against overfitting."""

import argparse
import logging
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("xrays")


def add_salt_and_pepper(image, share, rng):
    """Single pixels become black or white, as on old films."""
    noisy = image.copy()
    height, width = noisy.shape
    for y in range(height):  # planted
        for x in range(width):  # planted
            chance = rng.random()  # planted
            if chance < share / 2:  # planted
                noisy[y, x] = 0.0
            elif chance < share:  # planted
                noisy[y, x] = 1.0
    return noisy


def add_salt_and_pepper_at_once(image, share, generator):
    chance = generator.random(image.shape, dtype=np.float32)
    return np.where(chance < share / 2, 0.0, np.where(chance < share, 1.0, image)).astype(np.float32)


class Augment:
    def __init__(self, share, vectorized):
        self.share = share
        self.vectorized = vectorized
        self.rng = random.Random(0)
        self.generator = np.random.default_rng(0)

    def __call__(self, image):
        if self.rng.random() < 0.5:
            image = image[:, ::-1]
        if self.vectorized:
            return add_salt_and_pepper_at_once(image, self.share, self.generator)
        return add_salt_and_pepper(image, self.share, self.rng)


class XRays(Dataset):
    def __init__(self, count, size, augment, seed):
        generator = np.random.default_rng(seed)
        self.images = generator.random((count, size, size), dtype=np.float32) * 0.6
        self.labels = generator.integers(0, 2, count)
        spot = slice(size // 3, size // 2)
        self.images[self.labels == 1, spot, spot] += 0.3
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment is not None:
            image = self.augment(image)
        return torch.from_numpy(np.ascontiguousarray(image)).unsqueeze(0), int(self.labels[index])


def make_model(width=6):
    def stage(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )

    return nn.Sequential(
        stage(1, width),
        stage(width, 2 * width),
        stage(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 2),
    )


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--mended", action="store_true", help="draw the noise of an image at once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    augment = Augment(args.noise, vectorized=args.mended)
    train_loader = DataLoader(XRays(320, args.size, augment, 0), args.batch_size, shuffle=True)
    test_loader = DataLoader(XRays(32, args.size, None, 1), args.batch_size)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(args.epochs):
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        log.info("epoch %d loss %.3f accuracy %.3f", epoch, loss.item(), evaluate(model, test_loader))


if __name__ == "__main__":
    main()
