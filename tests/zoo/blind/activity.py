"""Recognise what a person does from a watch's sensors, with linear attention over the samples."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVITIES = ["sit", "walk", "run", "cycle", "climb"]


@dataclass
class Settings:
    samples: int = 160
    sensors: int = 6
    width: int = 96
    heads: int = 4
    layers: int = 2
    batch: int = 6
    steps: int = 45
    lr: float = 1e-3


class LinearAttention(nn.Module):
    """Attention whose cost grows with the length, not with its square (Katharopoulos et al., 2020)."""

    def __init__(self, width: int, heads: int, contract: bool) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.contract = contract

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.contract:
            summary = k.transpose(-2, -1) @ v
        else:
            summary = (k.unsqueeze(-1) * v.unsqueeze(-2)).sum(dim=2)  # planted
        total = q @ k.sum(dim=2, keepdim=True).transpose(-2, -1)
        mixed = (q @ summary) / (total + 1e-6)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, contract: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = LinearAttention(width, heads, contract)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ActivityNet(nn.Module):
    def __init__(self, settings: Settings, contract: bool) -> None:
        super().__init__()
        self.embed = nn.Conv1d(settings.sensors, settings.width, 5, padding=2)
        self.blocks = nn.Sequential(*[Block(settings.width, settings.heads, contract) for _ in range(settings.layers)])
        self.head = nn.Linear(settings.width, len(ACTIVITIES))

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(signal).transpose(1, 2)).mean(dim=1))


def record(count: int, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    """Simulated signals as (count, sensors, samples), and what was done."""
    generator = torch.Generator().manual_seed(seed)
    activity = torch.randint(len(ACTIVITIES), (count,), generator=generator)
    time = torch.linspace(0, 8, settings.samples)
    phase = torch.rand(count, settings.sensors, 1, generator=generator) * 6.28
    swing = torch.sin((1 + 2 * activity)[:, None, None] * time + phase)
    return swing + 0.5 * torch.randn(swing.shape, generator=generator), activity


def fit(model: nn.Module, signals: Tensor, activities: Tensor, settings: Settings) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(settings.steps):
        chosen = torch.randint(len(signals), (settings.batch,), generator=generator)
        loss = F.cross_entropy(model(signals[chosen]), activities[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 14:
            print(f"step {step + 1}/{settings.steps}: {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--mended", action="store_true", help="sum keys and values by a matrix product")
    args = vars(parser.parse_args())
    contract = args.pop("mended")
    settings = Settings(**args)
    torch.manual_seed(0)

    model = ActivityNet(settings, contract)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    fit(model, *record(600, settings, seed=0), settings)
    model.eval()
    signals, activities = record(32, settings, seed=1)
    with torch.no_grad():
        accuracy = (model(signals).argmax(1) == activities).float().mean()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
