"""Train a denoising diffusion model on small made-up images."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def shapes(count, size=16):
    """Squares of random place, size and brightness."""
    generator = torch.Generator().manual_seed(0)
    images = -torch.ones(count, 1, size, size)
    for image in images:
        top, left, side = torch.randint(2, size // 2, (3,), generator=generator).tolist()
        image[:, top : top + side, left : left + side] = torch.rand((), generator=generator)
    return images


class NoiseSchedule:
    """The share of signal that is left after each of the steps (Nichol and Dhariwal's cosine schedule)."""

    def __init__(self, steps, keep):
        self.steps = steps
        self.kept = self.signal_shares() if keep else None

    def signal_shares(self):
        shares = []
        share = 1.0
        for t in range(self.steps):
            now = math.cos((t / self.steps + 0.008) / 1.008 * math.pi / 2) ** 2
            following = math.cos(((t + 1) / self.steps + 0.008) / 1.008 * math.pi / 2) ** 2
            beta = torch.tensor(min(1 - following / now, 0.999))  # planted
            share = share * (1 - beta)  # planted
            shares.append(share)
        return torch.stack(shares)  # planted

    def add_noise(self, images, noise, t):
        shares = self.signal_shares() if self.kept is None else self.kept  # planted
        share = shares[t].view(-1, 1, 1, 1)
        return share.sqrt() * images + (1 - share).sqrt() * noise


class TimeBlock(nn.Module):
    def __init__(self, inputs, outputs, time_width):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x, time):
        x = F.silu(self.conv1(x)) + self.time(time)[:, :, None, None]
        return F.silu(self.norm(self.conv2(x)))


class UNet(nn.Module):
    def __init__(self, width=24, time_width=64):
        super().__init__()
        self.time_width = time_width
        self.time_mlp = nn.Sequential(nn.Linear(time_width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.down1 = TimeBlock(1, width, time_width)
        self.down2 = TimeBlock(width, 2 * width, time_width)
        self.middle = TimeBlock(2 * width, 2 * width, time_width)
        self.up = TimeBlock(3 * width, width, time_width)
        self.out = nn.Conv2d(width, 1, 1)
        rates = torch.exp(-math.log(10000.0) * torch.arange(time_width // 2) / (time_width // 2))
        self.register_buffer("rates", rates)

    def forward(self, x, t):
        angles = t[:, None].float() * self.rates
        time = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=1))
        high = self.down1(x, time)
        low = self.middle(self.down2(F.avg_pool2d(high, 2), time), time)
        return self.out(self.up(torch.cat([high, F.interpolate(low, scale_factor=2)], dim=1), time))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--timesteps", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--mended", action="store_true", help="compute the noise schedule once")
    args = parser.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(TensorDataset(shapes(args.images)), args.batch_size, shuffle=True, drop_last=True)
    schedule = NoiseSchedule(args.timesteps, keep=args.mended)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        history = []
        for (images,) in tqdm(loader, mininterval=1.0):
            noise = torch.randn_like(images)
            t = torch.randint(args.timesteps, (len(images),))
            loss = F.mse_loss(model(schedule.add_noise(images, noise, t), t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(history).mean().item():.4f}")


if __name__ == "__main__":
    main()
