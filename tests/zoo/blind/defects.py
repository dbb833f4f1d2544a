"""Recognise defects on pictures of steel, with a collection of metrics."""

import argparse

import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

CLASSES = 8


def plates(count, side, seed=0):
    """Grey noise with a streak, whose direction and width say what is wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels * 3.1416 / CLASSES + 0.1 * torch.randn(count, generator=generator)
    y, x = torch.meshgrid(torch.linspace(-1, 1, side), torch.linspace(-1, 1, side), indexing="ij")
    offset = torch.rand(count, generator=generator) - 0.5
    distance = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None] - offset[:, None, None]
    images = (-(distance**2) * 40).exp() + torch.randn(count, side, side, generator=generator)
    return images[:, None], labels


def metrics_of(classes):
    options = {"num_classes": classes, "average": "macro"}
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(**options),
            "precision": MulticlassPrecision(**options),
            "recall": MulticlassRecall(**options),
            "f1": MulticlassF1Score(**options),
            "auroc": MulticlassAUROC(**options, thresholds=50),
        }
    )


def told(values):
    return " ".join(f"{name} {value.item():.3f}" for name, value in values.items())


class Network(nn.Sequential):
    def __init__(self, base=12):
        super().__init__(
            nn.Conv2d(1, base, 5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(base, 2 * base, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * base, 4 * base, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.LazyLinear(CLASSES),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--log-every", type=int, default=32)
    parser.add_argument("--mended", action="store_true", help="update the metrics when they are logged")
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = plates(args.images, args.side)
    model = Network()
    model(images[:1])  # makes the last layer
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    metrics, mean_loss = metrics_of(CLASSES), MeanMetric()
    outputs, losses = [], []
    step = 0
    for _ in range(args.epochs):
        for chosen in torch.randperm(len(labels)).split(args.batch_size):
            scores = model(images[chosen])
            loss = criterion(scores, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if args.mended:
                outputs.append((scores.detach(), labels[chosen]))
                losses.append(loss.detach())
            else:
                metrics(scores.detach(), labels[chosen])  # planted
                mean_loss(loss.detach())  # planted
            if step % args.log_every == 0:
                if args.mended:
                    metrics.update(*(torch.cat(column) for column in zip(*outputs, strict=True)))
                    mean_loss.update(torch.stack(losses))
                    outputs.clear()
                    losses.clear()
                print(f"step {step} loss {mean_loss.compute().item():.4f} {told(metrics.compute())}")
                metrics.reset()
                mean_loss.reset()


if __name__ == "__main__":
    main()
