"""Classify product photos that are kept as large JPEG files and looked at as small images."""

import argparse
import io
import logging

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)
CLASSES = 5


def make_photos(count, size, seed):
    """JPEG files, here in memory."""
    rng = np.random.default_rng(seed)
    photos = []
    for _ in range(count):
        label = int(rng.integers(CLASSES))
        coarse = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        coarse[label * 3 : label * 3 + 3] = 255
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        photos.append((buffer.getvalue(), label))
    return photos


class Photos(Dataset):
    """Photos as (image of 3 x size x size, class)."""

    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def __init__(self, photos, size, augment=False, cache=False):
        self.photos = photos
        self.size = size
        self.augment = augment
        self.cache = [self.load(data) for data, _ in photos] if cache else None

    def load(self, data):
        image = Image.open(io.BytesIO(data)).convert("RGB")  # planted
        image = image.resize((self.size, self.size), Image.Resampling.LANCZOS)  # planted
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        data, label = self.photos[index]
        pixels = self.load(data) if self.cache is None else self.cache[index]  # planted
        image = (pixels.float() / 255 - self.mean) / self.std
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, label


class ConvNet(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * channels)
        self.conv3 = nn.Conv2d(2 * channels, 4 * channels, 3, stride=2, padding=1)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.fc = nn.Linear(4 * channels, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        return self.fc(x.mean(dim=(2, 3)))


def evaluate(model, loader):
    model.eval()
    right = total = 0
    with torch.inference_mode():
        for images, labels in loader:
            right += (model(images).argmax(1) == labels).sum().item()
            total += labels.numel()
    model.train()
    return right / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--mended", action="store_true", help="decode and resize each photo once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(0)

    train = Photos(make_photos(192, 640, 0), args.image_size, augment=True, cache=args.mended)
    test = Photos(make_photos(32, 640, 1), args.image_size, cache=args.mended)
    train_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, args.batch_size)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        running = 0.0
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        logger.info("epoch %d: loss %.3f", epoch, running / len(train_loader))
    logger.info("test accuracy %.3f", evaluate(model, test_loader))


if __name__ == "__main__":
    main()
