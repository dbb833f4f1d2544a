"""Faults of copies between host and device, and on the device."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from stepscope.remedies import prefetch_to_device
from tests.zoo.gpu.setting import Setting, Step, training_step
from tests.zoo.models import mlp


def unpinned_copies(at: Setting) -> Step:
    width, rows = at.size(2048, 16), at.size(8192, 8)
    batches = [at.host_batch(rows, width, pinned=not at.fault) for _ in range(4)]
    model = mlp(width, width, 4, 1)
    if not at.fault:
        ahead = iter(prefetch_to_device(itertools.cycle(batches), at.device))
        return training_step(model, lambda: next(ahead))
    endless = itertools.cycle(batches)

    def batch() -> torch.Tensor:
        return next(endless).to(at.device)  # planted

    return training_step(model, batch)


def copies_without_overlap(at: Setting) -> Step:
    width, rows = at.size(2048, 16), at.size(8192, 8)
    batches = [at.host_batch(rows, width, pinned=True) for _ in range(4)]
    model = mlp(width, width, 4, 1)
    if not at.fault:
        ahead = iter(prefetch_to_device(itertools.cycle(batches), at.device))
        return training_step(model, lambda: next(ahead))
    endless = itertools.cycle(batches)

    def batch() -> torch.Tensor:
        return next(endless).to(at.device, non_blocking=True)  # planted

    return training_step(model, batch)


def activations_to_host_and_back(at: Setting) -> Step:
    width, rows = at.size(2048, 16), at.size(4096, 8)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
    batch = torch.randn(rows, width)

    @torch.no_grad()
    def step() -> torch.Tensor:
        x = batch
        for layer in layers:
            x = torch.relu(layer(x))
            if at.fault:
                x = x.to("cpu").to(at.device)  # planted
        return x

    return step


def masks_made_on_host(at: Setting) -> Step:
    width, rows = at.size(2048, 16), at.size(8192, 8)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    batch = torch.randn(rows, width)

    @torch.no_grad()
    def step() -> torch.Tensor:
        x = batch
        for layer in layers:
            if at.fault:
                noise = torch.zeros(rows, width, device="cpu").to(at.device)  # planted
            else:
                noise = torch.zeros(rows, width, device=at.device)
            x = torch.relu(layer(x) + noise)
        return x

    return step


def cache_copied_for_each_token(at: Setting) -> Step:
    batch, heads, size = at.size(16, 2), at.size(32, 2), at.size(128, 8)
    prompt, tokens = at.size(4096, 16), at.size(16, 4)
    table = nn.Embedding(1024, heads * size)
    asked, token = torch.randint(1024, (batch, prompt)), torch.randint(1024, (batch, 1))
    room = torch.empty(batch, heads, prompt + tokens, size)

    def looked_up(words: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(table(words).view(batch, -1, heads, size).transpose(1, 2))

    @torch.no_grad()
    def generate() -> torch.Tensor:
        keys = room[:, :, :prompt]
        keys.copy_(looked_up(asked))
        for number in range(tokens):
            new = looked_up(token)
            if at.fault:
                keys = torch.cat([keys, new], dim=2)  # planted
            else:
                room[:, :, prompt + number] = new[:, :, 0]
                keys = room[:, :, : prompt + number + 1]
            out = nn.functional.scaled_dot_product_attention(new, keys, keys)
        return out

    return generate
