"""Faults of the device's memory."""

from __future__ import annotations

import itertools

import torch

from tests.zoo.gpu.setting import Setting, Step, training_step
from tests.zoo.models import mlp


def cache_emptied(at: Setting) -> Step:
    width, rows = at.size(1024, 16), at.size(4096, 8)
    batch = torch.randn(rows, width)
    train = training_step(mlp(width, width, 8, 1), lambda: batch)

    def step() -> None:
        train()
        if at.fault:
            torch.cuda.empty_cache()  # planted

    return step


def memory_from_driver(at: Setting) -> Step:
    width, rows = at.size(1024, 16), at.size(4096, 8)
    batch = torch.randn(rows, width)
    train = training_step(mlp(width, width, 4, 1), lambda: batch)
    block, added = at.size(64 << 20, 1 << 10), at.size(4 << 20, 64)
    numbers = itertools.count()

    def step() -> None:
        train()
        number = next(numbers) if at.fault else 0
        scratch = torch.empty(block + added * number, dtype=torch.uint8, device=at.device)  # planted
        scratch.fill_(1)

    return step
