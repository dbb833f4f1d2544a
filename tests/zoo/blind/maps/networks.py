"""Generator and discriminator after Isola et al. (2017), small."""

import torch
from torch import nn


def down(inputs, outputs, normalized=True):
    layers = [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=not normalized)]
    if normalized:
        layers.append(nn.BatchNorm2d(outputs))
    return nn.Sequential(*layers, nn.LeakyReLU(0.2, inplace=True))


def up(inputs, outputs):
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class UNetGenerator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.down1 = down(3, width, normalized=False)
        self.down2 = down(width, 2 * width)
        self.down3 = down(2 * width, 4 * width)
        self.up3 = up(4 * width, 2 * width)
        self.up2 = up(4 * width, width)
        self.up1 = nn.Sequential(nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh())

    def forward(self, image):
        fine = self.down1(image)
        middle = self.down2(fine)
        coarse = self.up3(self.down3(middle))
        coarse = self.up2(torch.cat([coarse, middle], 1))
        return self.up1(torch.cat([coarse, fine], 1))


class PatchDiscriminator(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.layers = nn.Sequential(
            down(6, width, normalized=False), down(width, 2 * width), nn.Conv2d(2 * width, 1, 4, 1, 1)
        )

    def forward(self, condition, image):
        return self.layers(torch.cat([condition, image], 1))


def set_requires_grad(network, wanted):
    for parameter in network.parameters():
        parameter.requires_grad_(wanted)
