"""Images with rectangles of several kinds, and targets for each anchor."""

import numpy as np
import torch
from anchors import match, match_arrays, offsets
from torch.utils.data import Dataset

KINDS = 3


class Shapes(Dataset):
    def __init__(self, count, size, anchors, threshold=0.4, match_once=False, seed=0):
        self.size = size
        self.anchors = anchors
        self.threshold = threshold
        self.rng = np.random.default_rng(seed)
        self.items = [self.draw() for _ in range(count)]
        self.kept = [self.targets(match_arrays, *item[1:]) for item in self.items] if match_once else None

    def draw(self):
        image = self.rng.normal(0, 0.2, (3, self.size, self.size)).astype(np.float32)
        boxes, kinds = [], []
        for _ in range(self.rng.integers(1, 5)):
            width, height = self.rng.integers(10, 32, 2)
            x, y = self.rng.integers(0, self.size - width), self.rng.integers(0, self.size - height)
            kind = self.rng.integers(KINDS)
            image[kind, y : y + height, x : x + width] += 1
            boxes.append((x, y, x + width, y + height))
            kinds.append(kind)
        return image, np.array(boxes, dtype=np.float32), np.array(kinds)

    def targets(self, how, boxes, kinds):
        """Kind of each anchor's object, 0 for background, and its offsets."""
        matches = how(self.anchors, boxes, self.threshold)  # planted
        labels = np.where(matches >= 0, kinds[matches] + 1, 0)
        return torch.from_numpy(labels), torch.from_numpy(offsets(self.anchors, boxes, matches))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        image, boxes, kinds = self.items[index]
        labels, shifts = self.kept[index] if self.kept else self.targets(match, boxes, kinds)  # planted
        return torch.from_numpy(image), labels, shifts
