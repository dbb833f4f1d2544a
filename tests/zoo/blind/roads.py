"""Find roads on aerial pictures: a small segmentation network on random crops of large pictures."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


def aerial_picture(size, rng):
    """Fields of some colour with noise, crossed by straight grey roads, and the roads' mask."""
    fields = rng.integers(60, 180, (4, 4, 3))
    image = np.kron(fields, np.ones((size // 4, size // 4, 1))) + rng.normal(0, 12, (size, size, 3))
    y, x = np.mgrid[0:size, 0:size]
    mask = np.zeros((size, size), dtype=bool)
    for _ in range(12):
        angle, width = rng.uniform(0, np.pi), rng.uniform(3, 8)
        px, py = rng.integers(0, size, 2)
        mask |= np.abs((x - px) * np.sin(angle) - (y - py) * np.cos(angle)) < width
    image[mask] = 130 + rng.normal(0, 12, (mask.sum(), 1))
    return np.clip(image, 0, 255).astype(np.uint8), mask


class HorizontalFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image, mask, rng):
        if rng.random() < self.p:
            return image[:, ::-1], mask[:, ::-1]
        return image, mask


class BrightnessContrast:
    """Adds to all values and stretches them, through a table of the 256 results."""

    def __init__(self, limit=0.2):
        self.limit = limit

    def __call__(self, image, mask, rng):
        alpha = 1 + rng.uniform(-self.limit, self.limit)
        beta = 255 * rng.uniform(-self.limit, self.limit)
        table = np.clip(np.arange(256) * alpha + beta, 0, 255).astype(np.uint8)
        return table[image], mask


class RandomCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image, mask, rng):
        top, left = (rng.integers(0, side - self.size + 1) for side in mask.shape)
        rows, columns = slice(top, top + self.size), slice(left, left + self.size)
        return image[rows, columns], mask[rows, columns]


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, image, mask, rng):
        for transform in self.transforms:
            image, mask = transform(image, mask, rng)
        return image, mask


class Roads(Dataset):
    def __init__(self, pictures, size, transform, crops=1, seed=0):
        rng = np.random.default_rng(seed)
        self.pictures = [aerial_picture(size, rng) for _ in range(pictures)]
        self.transform, self.crops = transform, crops
        self.rng = np.random.default_rng(seed + 1)

    def __len__(self):
        return len(self.pictures) * self.crops

    def __getitem__(self, index):
        image, mask = self.transform(*self.pictures[index % len(self.pictures)], self.rng)
        return torch.from_numpy(np.ascontiguousarray(image)), torch.from_numpy(np.ascontiguousarray(mask))


class RoadNet(nn.Module):
    def __init__(self, base=16):
        super().__init__()
        self.down1 = nn.Conv2d(3, base, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(base, 2 * base, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * base, 2 * base, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * base, base, 2, stride=2)
        self.out = nn.Conv2d(base, 1, 3, padding=1)

    def forward(self, images):
        x = images.permute(0, 3, 1, 2).float().div(255).sub(0.5)
        fine = self.down1(x).relu()
        coarse = self.middle(self.down2(fine).relu()).relu()
        scores = self.out(self.up(coarse).relu() + fine)
        return F.interpolate(scores, scale_factor=2, mode="bilinear").squeeze(1)


@torch.no_grad()
def overlap(model, loader):
    model.eval()
    both = either = 0
    for images, masks in loader:
        found = model(images) > 0
        both += (found & masks).sum().item()
        either += (found | masks).sum().item()
    model.train()
    return both / max(either, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--crop", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--mended", action="store_true", help="crop before all else")
    args = parser.parse_args()
    torch.manual_seed(0)
    crop = RandomCrop(args.crop)
    if args.mended:
        transform = Compose(crop, HorizontalFlip(), BrightnessContrast())
    else:
        transform = Compose(HorizontalFlip(), BrightnessContrast(), crop)  # planted
    train_set = Roads(args.pictures, args.size, transform, crops=12)
    valid_set = Roads(16, args.size, crop, seed=5)
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    model = RoadNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for epoch in range(args.epochs):
        losses = []
        for images, masks in loader:
            loss = F.binary_cross_entropy_with_logits(model(images), masks.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        score = overlap(model, DataLoader(valid_set, args.batch_size))
        print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}, overlap {score:.3f}")


if __name__ == "__main__":
    main()
