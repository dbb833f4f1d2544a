"""Facial expressions in a CSV file whose column `pixels` holds the image as numbers with spaces between."""

import csv

import numpy as np
import torch
from torch.utils.data import Dataset

EMOTIONS = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
SIZE = 48


def write_csv(path, count, seed=0):
    """Simulated faces with the columns of the well-known file."""
    rng = np.random.default_rng(seed)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["emotion", "pixels", "Usage"])
        for number in range(count):
            emotion = int(rng.integers(len(EMOTIONS)))
            face = rng.integers(60, 200, (SIZE, SIZE))
            face[30 + emotion : 34 + emotion, 12:36] = 20 + 10 * emotion
            usage = "Training" if number % 10 else "PublicTest"
            writer.writerow([emotion, " ".join(map(str, face.ravel())), usage])


def read_rows(path, usage):
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["Usage"] == usage]


def parse_pixels(text):
    numbers = [int(number) for number in text.split()]  # planted
    return np.array(numbers, dtype=np.uint8).reshape(SIZE, SIZE)  # planted


class Expressions(Dataset):
    """Images from -1 to 1, mirrored at random in training."""

    def __init__(self, path, usage, augment, in_memory=False):
        self.rows = read_rows(path, usage)
        self.augment = augment
        self.images = np.stack([parse_pixels(row["pixels"]) for row in self.rows]) if in_memory else None
        self.labels = [int(row["emotion"]) for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def image(self, index):
        if self.images is not None:
            return self.images[index]
        return parse_pixels(self.rows[index]["pixels"])  # planted

    def __getitem__(self, index):
        image = torch.from_numpy(self.image(index)).float().div_(127.5).sub_(1)
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.unsqueeze(0), self.labels[index]
