"""Real workloads in plain torch, without downloads: written as their users write them, without any remedy.

python -m benchmarks.gpu_campaign.workloads gpt2 --device cuda:0 --steps 50
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import stepscope
from tests.zoo.models import GPT, Encoder, Recommender

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """The device, and the full or a tiny size of anything."""

    device: torch.device
    is_tiny: bool

    def __call__(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full


class Bottleneck(nn.Module):
    """ResNet-50's block: 1x1, 3x3, 1x1 around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(width: int, blocks: tuple[int, ...], classes: int) -> nn.Sequential:
    """ResNet-50 with width 64 and blocks (3, 4, 6, 3)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """Two convolutions with group norms, and what the time step adds between them."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        return torch.as_tensor(self.second(y) + self.shortcut(x))


class UNet(nn.Module):
    """A diffusion model's network: three resolutions, attention at the lowest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.width, time = width, 4 * width
        self.into = nn.Conv2d(4, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.down = nn.ModuleList(Residual(sizes[max(i - 1, 0)], size, time) for i, size in enumerate(sizes))
        self.attention = nn.MultiheadAttention(sizes[-1], 4, batch_first=True)
        self.middle = Residual(sizes[-1], sizes[-1], time)
        joined = [sizes[-1] + sizes[-1], sizes[-1] + sizes[1], sizes[1] + sizes[0]]
        self.up = nn.ModuleList(
            Residual(channels, out, time) for channels, out in zip(joined, (sizes[-1], sizes[1], sizes[0]), strict=True)
        )
        self.out = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        scales = torch.arange(self.width // 2, device=x.device) * (-math.log(1e4) / (self.width // 2))
        angles = times[:, None] * scales.exp()[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype))
        x, kept = self.into(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        flat = x.flatten(2).transpose(1, 2)
        x = x + self.attention(flat, flat, flat)[0].transpose(1, 2).reshape(x.shape)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], dim=1), time)
        return torch.as_tensor(self.out(x))


def _trained(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _gpt2(size: Size) -> GPT:
    words, length = size(50257, 128), size(1024, 32)
    return GPT(words, size(768, 32), size(12, 2), size(12, 1), length=length)


def gpt2(size: Size) -> Step:
    """GPT-2 small in FP32: 8 sequences of 1,024 tokens."""
    model, batch = _gpt2(size), (size(8, 2), size(1024, 32) + 1)
    tokens = [torch.randint(size(50257, 128), batch) for _ in range(4)]
    turns = _endless(tokens)

    def loss() -> Tensor:
        now = next(turns)
        return F.cross_entropy(model(now[:, :-1]).flatten(0, 1), now[:, 1:].flatten())

    return _trained(model, loss)


def gpt2_decoding(size: Size) -> Step:
    """GPT-2 small in bf16 without a cache: the next token of 8 texts of 128 tokens."""
    model = _gpt2(size).to(torch.bfloat16).eval()
    prompt = torch.randint(size(50257, 128), (size(8, 2), size(128, 8)))

    @torch.inference_mode()
    def step() -> Tensor:
        return torch.as_tensor(model(prompt)[:, -1].argmax(-1))

    return step


def resnet50(size: Size) -> Step:
    """ResNet-50 in FP32: 64 images of 224 by 224."""
    model = resnet(size(64, 8), (3, 4, 6, 3) if not size.is_tiny else (1, 1), size(1000, 10))
    side = size(224, 32)
    images, labels = torch.randn(size(64, 2), 3, side, side), torch.randint(size(1000, 10), (size(64, 2),))
    return _trained(model, lambda: F.cross_entropy(model(images), labels))


def encoder(size: Size) -> Step:
    """A Transformer encoder; texts of 32 to 512 tokens are padded to the longest."""
    model = Encoder(size(30000, 64), size(768, 32), size(12, 1))
    length, rows = size(512, 16), size(32, 4)
    lengths = torch.linspace(length // 16, length, rows).long()
    padding = torch.arange(length)[None, :] >= lengths[:, None]
    tokens = torch.randint(1, size(30000, 64), (rows, length)).masked_fill(padding, 0)
    labels = torch.randint(4, (rows,))
    return _trained(model, lambda: F.cross_entropy(model(tokens, padding), labels))


def unet(size: Size) -> Step:
    """A diffusion U-Net in FP32: 16 latents of 64 by 64, noise to be found."""
    model, latents = _unet(size)
    times, noise = torch.rand(len(latents)) * 1000, torch.randn_like(latents)
    return _trained(model, lambda: F.mse_loss(model(latents + noise, times), noise))


def unet_inference(size: Size) -> Step:
    """The U-Net in bf16, one denoising step at a time."""
    model, latents = _unet(size)
    model, latents = model.to(torch.bfloat16).eval(), latents.to(torch.bfloat16)
    times = torch.full((len(latents),), 500.0, dtype=torch.bfloat16)

    @torch.inference_mode()
    def step() -> Tensor:
        return torch.as_tensor(latents - 0.1 * model(latents, times))

    return step


def _unet(size: Size) -> tuple[UNet, Tensor]:
    side = size(64, 8)
    return UNet(size(192, 16)), torch.randn(size(16, 2), 4, side, side)


class Clicks(Dataset[tuple[Tensor, ...]]):
    """Numbers, categories and a click, drawn from the number of the row."""

    def __init__(self, tables: int, rows: int) -> None:
        self.tables, self.rows = tables, rows

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        draw = torch.Generator(device="cpu").manual_seed(index)
        numbers = torch.rand(13, generator=draw, device="cpu")
        categories = torch.randint(self.rows, (self.tables, 4), generator=draw, device="cpu")
        return numbers, categories, (numbers[0] > 0.5).float()


def dlrm(size: Size) -> Step:
    """Embeddings and small networks; a DataLoader with no workers makes batches of 2,048."""
    tables, rows = size(26, 3), size(100_000, 100)
    model = Recommender(tables, rows, size(128, 8))
    with torch.device("cpu"):  # its sampler draws on the host
        loader = DataLoader(Clicks(tables, rows), batch_size=size(2048, 8), num_workers=0)
    batches = _batches(loader)

    def loss() -> Tensor:
        numbers, categories, clicked = (each.to(size.device) for each in next(batches))
        return F.binary_cross_entropy_with_logits(model(numbers, categories), clicked)

    return _trained(model, loss)


def _batches(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    while True:
        yield from loader


def _endless(values: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from values


WORKLOADS: Final[dict[str, Callable[[Size], Step]]] = {
    each.__name__: each for each in (gpt2, resnet50, encoder, unet, dlrm, gpt2_decoding, unet_inference)
}


def built(name: str, size: Size) -> Step:
    """The step of a workload, made on the device."""
    torch.manual_seed(0)
    with size.device:
        return WORKLOADS[name](size)


def main() -> None:
    """Run steps of the workload that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=list(WORKLOADS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time even with steps left")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    step = built(options.name, Size(torch.device(options.device), options.tiny))
    began = time.monotonic()
    for number in range(options.steps):
        if time.monotonic() - began > options.seconds:
            break
        with stepscope.step(number=number):
            step()


if __name__ == "__main__":
    main()
