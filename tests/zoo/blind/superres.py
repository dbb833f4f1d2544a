"""Double the resolution of images with a residual network and a convolution of its own."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ScaledConv2d(nn.Module):
    """A convolution whose weights have unit variance in each filter and a learned gain."""

    unfolded = True

    def __init__(self, inputs, outputs, kernel=3):
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.gain = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.scale = 1 / math.sqrt(inputs * kernel * kernel)

    def standardised(self):
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return (self.weight - mean) * torch.rsqrt(variance + 1e-6) * (self.scale * self.gain[:, None, None, None])

    def forward(self, x):
        weight = self.standardised()
        if not self.unfolded:
            return F.conv2d(x, weight, self.bias, padding=self.kernel // 2)
        patches = F.unfold(x, self.kernel, padding=self.kernel // 2)  # planted
        out = weight.flatten(1) @ patches + self.bias[:, None]  # planted
        return out.view(x.shape[0], -1, x.shape[2], x.shape[3])


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = ScaledConv2d(width, width)
        self.second = ScaledConv2d(width, width)

    def forward(self, x):
        return x + 0.2 * self.second(F.relu(self.first(x)))


class SuperResolution(nn.Module):
    def __init__(self, width=24, blocks=3, factor=2):
        super().__init__()
        self.factor = factor
        self.head = ScaledConv2d(3, width)
        self.blocks = nn.Sequential(*[ResidualBlock(width) for _ in range(blocks)])
        self.tail = ScaledConv2d(width, 3 * factor**2)

    def forward(self, small):
        features = self.head(small)
        detail = F.pixel_shuffle(self.tail(self.blocks(features)), self.factor)
        return detail + F.interpolate(small, scale_factor=self.factor, mode="bilinear", align_corners=False)


def make_images(count, size, seed):
    """Pairs of small and large images of waves."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 2 * math.pi, size)
    waves = torch.rand(count, 3, 2, generator=generator) * 6
    large = torch.sin(waves[..., :1, None] * grid[:, None] + waves[..., 1:, None] * grid)
    return TensorDataset(F.avg_pool2d(large, 2), large)


def psnr(model, loader):
    model.eval()
    with torch.no_grad():
        errors = torch.stack([F.mse_loss(model(small), large) for small, large in loader])
    model.train()
    return (10 * torch.log10(4 / errors.mean())).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--size", type=int, default=64, help="of the large images")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="convolve with F.conv2d")
    args = parser.parse_args()
    torch.manual_seed(0)

    ScaledConv2d.unfolded = not args.mended
    model = SuperResolution(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    train_loader = DataLoader(make_images(args.images, args.size, 0), args.batch_size, shuffle=True)
    test_loader = DataLoader(make_images(12, args.size, 1), args.batch_size)
    for epoch in range(args.epochs):
        for i, (small, large) in enumerate(train_loader):
            loss = F.l1_loss(model(small), large)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 0:
                print(f"[{epoch}:{i:03d}] l1 {loss.item():.4f}")
        print(f"[{epoch}] psnr {psnr(model, test_loader):.2f} dB")


if __name__ == "__main__":
    main()
