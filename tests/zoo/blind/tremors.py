"""Find tremors in long recordings of a seismometer: a network sees windows of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn

CHANNELS = 3


def recordings(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with waves that fade, and where they are."""
    rng = np.random.default_rng(seed)
    signals = rng.normal(0, 1, (count, length, CHANNELS)).astype(np.float32)
    labels = np.zeros((count, length), dtype=np.float32)
    time = np.arange(160)
    for signal, label in zip(signals, labels, strict=True):
        for begin in rng.integers(0, length - len(time), length // 700):
            wave = 2.5 * np.exp(-time / 80) * np.sin(time * rng.uniform(0.3, 0.6))
            signal[begin : begin + len(time)] += wave[:, None] * rng.uniform(0.5, 1.2, CHANNELS).astype(np.float32)
            label[begin : begin + len(time)] = 1
    return signals, labels


def windows_by_index(signal: np.ndarray, length: int) -> np.ndarray:
    """All windows of a recording: windows, times, channels."""
    begins = np.arange(len(signal) - length + 1)[:, None]  # planted
    return signal[begins + np.arange(length)[None]]  # planted


def windows_by_strides(signal: np.ndarray, length: int) -> np.ndarray:
    """The same as a view."""
    return sliding_window_view(signal, length, axis=0).swapaxes(1, 2)


class Sampler:
    """Batches of windows; each batch takes some from each of a few recordings."""

    def __init__(self, signals, labels, length, windows_of, seed):
        self.signals, self.labels, self.length = signals, labels, length
        self.windows_of = windows_of
        self.rng = np.random.default_rng(seed)

    def draw(self, recording: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        windows = self.windows_of(self.signals[recording], self.length)
        begins = self.rng.integers(0, len(windows), count)
        return windows[begins], self.labels[recording, begins + self.length // 2]

    def batches(self, steps: int, size: int, spread: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(steps):
            chosen = self.rng.choice(len(self.signals), spread, replace=False)
            parts, labels = zip(*[self.draw(recording, size // spread) for recording in chosen], strict=True)
            yield torch.from_numpy(np.concatenate(parts)), torch.from_numpy(np.concatenate(labels))


class TremorNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(CHANNELS, width, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(2 * width, 2 * width, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(8 * width, 1),
        )

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self.layers(windows.transpose(1, 2)).squeeze(1)


@torch.no_grad()
def f1_score(model: nn.Module, sampler: Sampler) -> float:
    model.eval()
    found, true = zip(*[(model(x) > 0, y > 0.5) for x, y in sampler.batches(4, 256, 4)], strict=True)
    model.train()
    found, true = torch.cat(found), torch.cat(true)
    return (2 * (found & true).sum() / (found.sum() + true.sum()).clamp(min=1)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=int, default=48)
    parser.add_argument("--length", type=int, default=7000)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--spread", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--mended", action="store_true", help="make the windows as a view of the recording")
    args = parser.parse_args()
    torch.manual_seed(0)
    windows_of = windows_by_strides if args.mended else windows_by_index
    sampler = Sampler(*recordings(args.recordings, args.length, 0), args.window, windows_of, seed=2)
    held_out = Sampler(*recordings(8, args.length, 1), args.window, windows_of, seed=3)
    model = TremorNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for step, (windows, labels) in enumerate(sampler.batches(args.steps, args.batch_size, args.spread), 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(windows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} F1 {f1_score(model, held_out):.3f}")


if __name__ == "__main__":
    main()
