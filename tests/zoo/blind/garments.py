"""Classify small grey pictures of clothes with a multilayer perceptron."""

import argparse
import time

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES, SIDE = 10, 28
MEAN, STD = 0.286, 0.353


def pictures(count, seed):
    """Blurred shapes, one for each class, as bytes."""
    shapes = np.random.default_rng(42).random((CLASSES, 7, 7)) > 0.55
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    images = np.kron(shapes[labels], np.ones((1, 4, 4))) * rng.uniform(10, 80, (count, 1, 1))
    images = images + rng.normal(0, 90, images.shape)
    return np.clip(images, 0, 255).astype(np.uint8), labels


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image, dtype=np.float32)).div_(255)[None]  # planted


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, tensor):
        return (tensor - self.mean) / self.std  # planted


class Garments(Dataset):
    """As torchvision's: gives pictures through a transform."""

    def __init__(self, count, seed, transform):
        self.images, self.labels = pictures(count, seed)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index])  # planted
        return self.transform(image), int(self.labels[index])  # planted


class GarmentTensors:
    """All pictures normalised at once; gives shuffled batches."""

    def __init__(self, count, seed, batch_size):
        images, labels = pictures(count, seed)
        self.images = torch.from_numpy(images).float().div_(255).sub_(MEAN).div_(STD)[:, None]
        self.labels = torch.from_numpy(labels)
        self.batch_size = batch_size

    def __iter__(self):
        for chosen in torch.randperm(len(self.labels)).split(self.batch_size):
            yield self.images[chosen], self.labels[chosen]


def build_model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 384), nn.ReLU(), nn.Linear(384, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def train(model, batches, criterion, optimizer):
    model.train()
    total, seen = torch.zeros(()), 0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
        seen += len(labels)
    return total.item() / seen


@torch.no_grad()
def test(model, batches):
    model.eval()
    hits = [model(images).argmax(dim=1) == labels for images, labels in batches]
    return torch.cat(hits).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=20_480)
    parser.add_argument("--mended", action="store_true", help="normalise all pictures once, before the training")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.mended:
        batches = GarmentTensors(args.images, 0, args.batch_size)
    else:
        transform = Compose(ToTensor(), Normalize(MEAN, STD))
        batches = DataLoader(Garments(args.images, 0, transform), args.batch_size, shuffle=True)
    held_out = GarmentTensors(2000, 1, 1000)
    model = build_model()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    for epoch in range(args.epochs):
        begin = time.time()
        loss = train(model, batches, criterion, optimizer)
        seconds = time.time() - begin
        print(f"epoch {epoch}: {seconds:.2f} s, loss {loss:.4f}, accuracy {test(model, held_out):.3f}")


if __name__ == "__main__":
    main()
