"""Aerial pictures with boxes of vehicles, as JPEG files and a list of labels."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

COLOURS = ((220, 40, 40), (40, 60, 220), (240, 220, 60))


def grainy(picture, rng):
    """The picture with a camera's noise."""
    noise = rng.integers(-12, 13, (*picture.size, 3), dtype=np.int16)
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))


def write_pictures(folder, count, size, seed):
    """Pictures of fields with up to six vehicles each, and labels.json."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    labels = []
    for number in range(count):
        ground = rng.integers(60, 160, (size // 16, size // 16, 3), dtype=np.uint8)
        picture = Image.fromarray(ground).resize((size, size), Image.Resampling.BICUBIC)
        draw, boxes = ImageDraw.Draw(picture), []
        for _ in range(rng.integers(1, 7)):
            kind = int(rng.integers(len(COLOURS)))
            width, height = rng.integers(size // 12, size // 6, 2).tolist()
            left, top = rng.integers(0, size - size // 6, 2).tolist()
            draw.rectangle((left, top, left + width, top + height), COLOURS[kind])
            boxes.append((kind, left, top, width, height))
        picture = grainy(picture, rng)
        picture.save(folder / f"{number:05}.jpg", quality=92)
        labels.append({"file": f"{number:05}.jpg", "size": size, "boxes": boxes})
    (folder / "labels.json").write_text(json.dumps(labels))


def centre_targets(boxes, size, cells):
    """Whether a vehicle of each kind is centred in each cell, and the sizes of the boxes there."""
    present = torch.zeros(len(COLOURS), cells, cells)
    extent = torch.zeros(2, cells, cells)
    for kind, left, top, width, height in boxes:
        x, y = (left + width / 2) * cells / size, (top + height / 2) * cells / size
        present[kind, int(y), int(x)] = 1
        extent[:, int(y), int(x)] = torch.tensor([width / size, height / size])
    return present, extent


class Pictures(Dataset):
    def __init__(self, folder, size, cells, augment, use_ram_cache):
        self.folder = Path(folder)
        self.size = size
        self.augment = augment
        labels = json.loads((self.folder / "labels.json").read_text())
        self.files = [label["file"] for label in labels]
        self.targets = [centre_targets(label["boxes"], label["size"], cells) for label in labels]
        self.pixels = [self.decoded(file) for file in self.files] if use_ram_cache else None

    def decoded(self, file):
        """Pixels of a picture at the detector's size, as (3, size, size) bytes."""
        with Image.open(self.folder / file) as picture:
            small = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if self.pixels is not None:
            pixels = self.pixels[index]
        else:
            pixels = self.decoded(self.files[index])  # planted
        image = pixels.float().div_(255)
        present, extent = self.targets[index]
        if self.augment and torch.rand(()) < 0.5:
            image, present, extent = image.flip(-1), present.flip(-1), extent.flip(-1)
        return image, present, extent
