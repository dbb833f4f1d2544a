"""Evaluate how well a frozen network's features tell species of plankton apart, at several levels of noise."""

import argparse
import logging
import time

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger("plankton")


def plankton(count, species, size, seed):
    """Grey pictures of rings with rays; a species has its radius and number of rays."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 2, indexing="ij")
    labels = torch.randint(species, (count,), generator=generator)
    turn = 6.3 * torch.rand(count, 1, 1, generator=generator)
    radius = (0.3 + 0.5 * (labels % 4) / 4)[:, None, None]
    rays = (2 + labels // 4 * 2)[:, None, None]
    distance, angle = (x**2 + y**2).sqrt(), torch.atan2(y, x)
    pictures = torch.exp(-(((distance - radius) / 0.15) ** 2)) * (1 + torch.cos(rays * angle + turn))
    return pictures[:, None], labels


def layer(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.GELU())


class Backbone(nn.Sequential):
    """Features of pictures, mostly at their full resolution, since the rays are thin."""

    def __init__(self, width=24, layers=4):
        super().__init__(
            layer(1, width),
            *[layer(width, width) for _ in range(layers - 1)],
            nn.Conv2d(width, 4 * width, 8, 8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
        )


class CentroidClassifier:
    """The species whose mean features are nearest."""

    def __init__(self, backbone, pictures, labels, species):
        self.backbone = backbone
        with torch.no_grad():
            features = torch.cat([backbone(part) for part in pictures.split(8)])
            self.mean, self.deviation = features.mean(0), features.std(0) + 1e-6
            scaled = (features - self.mean) / self.deviation
            self.centroids = torch.stack([scaled[labels == one].mean(0) for one in range(species)])

    def scores(self, pictures):
        scaled = (self.backbone(pictures) - self.mean) / self.deviation
        return -torch.cdist(scaled, self.centroids)


def evaluate_batch(classifier, pictures, labels, tracked):
    """Loss and hits of a batch."""
    with torch.set_grad_enabled(tracked):  # planted
        scores = classifier.scores(pictures)
        return F.cross_entropy(scores, labels), (scores.argmax(1) == labels).sum()


def evaluate(classifier, pictures, labels, noise, size, tracked):
    """Mean loss and share of hits."""
    generator = torch.Generator().manual_seed(4)
    losses, hits = [], []
    for part, own in zip(pictures.split(size), labels.split(size), strict=True):
        noisy = part + noise * torch.randn(part.shape, generator=generator)
        loss, hit = evaluate_batch(classifier, noisy, own, tracked)
        losses.append(loss)
        hits.append(hit)
    return torch.stack(losses).mean().item(), torch.stack(hits).sum().item() / len(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=240)
    parser.add_argument("--species", type=int, default=16)
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--noise", type=float, nargs="+", default=[level / 20 for level in range(24)])
    parser.add_argument("--mended", action="store_true", help="evaluate without recording for gradients")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    classifier = CentroidClassifier(
        Backbone().eval(), *plankton(320, args.species, args.size, seed=0), species=args.species
    )
    pictures, labels = plankton(args.pictures, args.species, args.size, seed=1)
    for noise in args.noise:
        begin = time.time()
        loss, accuracy = evaluate(classifier, pictures, labels, noise, args.batch_size, tracked=not args.mended)
        log.info("noise %.2f loss %.3f accuracy %.3f (%.1f s)", noise, loss, accuracy, time.time() - begin)


if __name__ == "__main__":
    main()
