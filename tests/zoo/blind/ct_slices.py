"""Segment lungs in computed tomography, slice by slice, with a small U-Net."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


def phantom(slices, size, rng):
    """A body with two dark lungs, in Hounsfield units, and the lungs' mask."""
    z, y, x = np.meshgrid(np.linspace(-1, 1, slices), *[np.linspace(-1, 1, size)] * 2, indexing="ij")
    volume = np.where(x**2 + y**2 < 0.8, 40, -1000) + rng.normal(0, 30, z.shape)
    mask = np.zeros(z.shape, dtype=bool)
    for side in (-0.4, 0.4):
        reach = rng.uniform(0.2, 0.3)
        mask |= ((x - side) / reach) ** 2 + (y / 0.5) ** 2 + (z / 0.9) ** 2 < 1
    volume[mask] -= 800
    return volume.astype(np.int16), mask


def lung_window(values, low=-1000.0, high=200.0):
    """Hounsfield units to numbers from 0 to 1."""
    return (np.clip(values.astype(np.float32), low, high) - low) / (high - low)  # planted


class SliceDataset(Dataset):
    def __init__(self, patients, slices, size, window_slice, seed):
        rng = np.random.default_rng(seed)
        self.scans = [phantom(slices, size, rng) for _ in range(patients)]
        self.index = [(patient, z) for patient in range(patients) for z in range(slices)]
        self.window_slice = window_slice

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        patient, z = self.index[i]
        volume, mask = self.scans[patient]
        if self.window_slice:
            image = lung_window(volume[z])
        else:
            image = lung_window(volume)[z]  # planted
        return torch.from_numpy(image)[None], torch.from_numpy(mask[z])[None].float()


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, base=8):
        super().__init__()
        self.first = DoubleConv(1, base)
        self.second = DoubleConv(base, 2 * base)
        self.third = DoubleConv(2 * base, 4 * base)
        self.up2 = nn.ConvTranspose2d(4 * base, 2 * base, 2, 2)
        self.merge2 = DoubleConv(4 * base, 2 * base)
        self.up1 = nn.ConvTranspose2d(2 * base, base, 2, 2)
        self.merge1 = DoubleConv(2 * base, base)
        self.last = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        fine = self.first(x)
        middle = self.second(F.max_pool2d(fine, 2))
        coarse = self.third(F.max_pool2d(middle, 2))
        middle = self.merge2(torch.cat([middle, self.up2(coarse)], 1))
        return self.last(self.merge1(torch.cat([fine, self.up1(middle)], 1)))


def soft_dice(scores, mask):
    probability = scores.sigmoid()
    overlap = (probability * mask).sum()
    return 1 - (2 * overlap + 1) / (probability.sum() + mask.sum() + 1)


@torch.no_grad()
def intersection_over_union(model, loader):
    both = either = 0
    for image, mask in loader:
        found, mask = model(image) > 0, mask.bool()
        both += (found & mask).sum().item()
        either += (found | mask).sum().item()
    return both / max(either, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patients", type=int, default=2)
    parser.add_argument("--slices", type=int, default=168)
    parser.add_argument("--size", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mended", action="store_true", help="take the slice first, then window it")
    args = parser.parse_args()
    torch.manual_seed(0)

    train_set = SliceDataset(args.patients, args.slices, args.size, args.mended, seed=0)
    valid_set = SliceDataset(1, args.slices, args.size, args.mended, seed=1)
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    step = 0
    for epoch in range(args.epochs):
        for image, mask in loader:
            scores = model(image)
            loss = F.binary_cross_entropy_with_logits(scores, mask) + soft_dice(scores, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.3f}")
        score = intersection_over_union(model, DataLoader(valid_set, args.batch_size))
        print(f"epoch {epoch} intersection over union {score:.3f}")


if __name__ == "__main__":
    main()
