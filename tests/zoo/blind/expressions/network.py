"""A small VGG for grey images."""

from torch import nn

PLAN = (12, "pool", 24, "pool", 40, "pool")


def make_network(classes, plan=PLAN, hidden=128, size=48):
    layers, channels = [], 1
    for entry in plan:
        if entry == "pool":
            layers.append(nn.AvgPool2d(2))
            size //= 2
            continue
        layers += [nn.Conv2d(channels, entry, 3, padding=1), nn.ReLU(inplace=True)]
        channels = entry
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(channels * size * size, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.4),
        nn.Linear(hidden, classes),
    )
