"""Recognise vehicles again on other cameras: an embedding trained with triplets of photos."""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

CROP = 128


def write_photos(folder, vehicles, photos, size=160):
    """A folder of JPEG files for each vehicle."""
    rng = np.random.default_rng(0)
    for vehicle in range(vehicles):
        paint = rng.integers(40, 216, (4, 4, 3))
        coarse = np.kron(paint, np.ones((size // 4, size // 4, 1)))
        (folder / f"{vehicle:03}").mkdir()
        for photo in range(photos):
            light = rng.uniform(0.7, 1.2)
            pixels = np.clip(coarse * light + rng.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{vehicle:03}" / f"{photo}.jpg", quality=92)


def pil_loader(path):
    with open(path, "rb") as file, Image.open(file) as image:
        return image.convert("RGB")  # planted


def random_crop(pixels):
    """A square of the pixels."""
    top, left = (random.randint(0, side - CROP) for side in pixels.shape[:2])
    return torch.from_numpy(pixels[top : top + CROP, left : left + CROP])


class TripletFolder(Dataset):
    """Anchor, another photo of the same vehicle, a photo of another."""

    def __init__(self, root, in_memory):
        self.paths = [sorted(folder.glob("*.jpg")) for folder in sorted(root.iterdir())]
        self.anchors = [(vehicle, photo) for vehicle, own in enumerate(self.paths) for photo in range(len(own))]
        self.pixels = [[np.array(pil_loader(path)) for path in own] for own in self.paths] if in_memory else None

    def __len__(self):
        return len(self.anchors)

    def load(self, vehicle, photo):
        if self.pixels is not None:
            return random_crop(self.pixels[vehicle][photo])
        return random_crop(np.array(pil_loader(self.paths[vehicle][photo])))  # planted

    def __getitem__(self, index):
        vehicle, photo = self.anchors[index]
        other = (vehicle + random.randrange(1, len(self.paths))) % len(self.paths)
        same = random.randrange(len(self.paths[vehicle]))
        return self.load(vehicle, photo), self.load(vehicle, same), self.load(other, photo)


def block(inputs, outputs, stride=2):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, stride + 1, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Embedder(nn.Module):
    def __init__(self, outputs=64):
        super().__init__()
        self.body = nn.Sequential(block(3, 24, 4), block(24, 48), block(48, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(96, outputs)

    def forward(self, pixels):
        x = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).sub_(128).div_(64)
        return nn.functional.normalize(self.head(self.body(x)), dim=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vehicles", type=int, default=48)
    parser.add_argument("--photos", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--mended", action="store_true", help="decode each photo once and keep its pixels")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        write_photos(Path(name), args.vehicles, args.photos)
        dataset = TripletFolder(Path(name), in_memory=args.mended)
        loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
        model = Embedder()
        criterion = nn.TripletMarginLoss(margin=0.3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        for epoch in range(args.epochs):
            losses = []
            for photos in loader:
                anchor, positive, negative = model(torch.cat(photos)).chunk(3)
                loss = criterion(anchor, positive, negative)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}")


if __name__ == "__main__":
    main()
