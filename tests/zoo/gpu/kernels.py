"""Faults of kernels: number types, layouts, sizes, grids, queues, power."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.zoo.gpu.setting import Setting, Step


def products_in_fp32(at: Setting) -> Step:
    side = at.size(4096, 16)
    torch.set_float32_matmul_precision("highest" if at.fault else "high")
    left, right = torch.randn(side, side), torch.randn(side, side)

    def step() -> torch.Tensor:
        for _ in range(4):
            out = left @ right  # planted
        return out

    return step


def channels_first(at: Setting) -> Step:
    channels, side = at.size(128, 8), at.size(56, 8)
    kind = torch.float16 if at.on_cuda else torch.float32
    layers = [nn.Conv2d(channels, channels, 3, padding=1, dtype=kind) for _ in range(8)]
    order = torch.contiguous_format if at.fault else torch.channels_last
    model = nn.Sequential(*layers)
    for weight in model.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=order)
    images = torch.randn(at.size(64, 2), channels, side, side, dtype=kind).contiguous(memory_format=order)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return torch.as_tensor(model(images))  # planted

    return step


def attention_written_out(at: Setting) -> Step:
    shape = at.size(8, 1), at.size(16, 2), at.size(2048, 8), at.size(64, 8)
    query, key, value = (torch.randn(*shape, dtype=torch.bfloat16) for _ in range(3))

    @torch.no_grad()
    def step() -> torch.Tensor:
        if not at.fault:
            return nn.functional.scaled_dot_product_attention(query, key, value)
        scores = query @ key.transpose(-2, -1) / math.sqrt(shape[-1])  # planted
        weights = torch.softmax(scores, dim=-1)  # planted
        return weights @ value  # planted

    return step


def vocabulary_off_the_tiles(at: Setting) -> Step:
    words = at.size(50257, 61) if at.fault else at.size(50304, 64)
    width, rows = at.size(1024, 8), at.size(4096, 4)
    weight = torch.randn(words, width, dtype=torch.bfloat16)
    hidden = torch.randn(rows, width, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        for _ in range(4):
            out = hidden @ weight.t()  # planted
        return out

    return step


def weights_that_fp8_could_hold(at: Setting) -> Step:
    """Decoding reads every weight for each token: with half the bytes it takes half the time."""
    width, rows, prompt = at.size(4096, 32), 16, at.size(64, 8)
    table = nn.Embedding(1024, width, dtype=torch.bfloat16)
    weights = [torch.randn(width, width, dtype=torch.bfloat16) / width for _ in range(at.size(16, 2))]
    narrow, one = [weight.to(torch.float8_e4m3fn) for weight in weights], torch.ones(())
    asked, token = torch.randint(1024, (rows, prompt)), torch.randint(1024, (rows, 1))

    def decode(words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = table(words).flatten(0, 1)
        for weight, half in zip(weights, narrow, strict=True):
            if at.fault:
                x = x @ weight.t()  # planted
            else:
                as_narrow = x.to(torch.float8_e4m3fn)
                x = torch._scaled_mm(as_narrow, half.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return x

    @torch.no_grad()
    def generate() -> torch.Tensor:
        decode(asked)
        for _ in range(at.size(16, 4)):
            out = decode(token)
        return out

    return generate


def few_triton_blocks(at: Setting) -> Step:
    from tests.zoo.gpu.triton_kernel import doubled

    count, block = at.size(1 << 24, 1 << 12), 1024
    programs = 4 if at.fault else max(count // block, 4)
    source, target = torch.randn(count), torch.empty(count)
    each = -(-count // programs)

    def step() -> torch.Tensor:
        doubled[(programs,)](source, target, count, each, BLOCK=block)  # planted
        return target

    return step


def queues_in_a_row(at: Setting) -> Step:
    """Kernels of few blocks on eight queues; in the fault each queue waits for the one before."""
    side = at.size(512, 8)
    parts = [torch.randn(side, side) for _ in range(8)]
    queues = [at.stream() for _ in parts]

    def step() -> None:
        main = before = torch.cuda.current_stream() if at.on_cuda else None
        for queue, part in zip(queues, parts, strict=True):
            waited_for = before if at.fault else main
            if queue is not None and waited_for is not None:
                queue.wait_stream(waited_for)
            with torch.cuda.stream(queue):  # None changes nothing
                for _ in range(6):
                    torch.mm(part, part)
            before = queue
        for queue in queues:
            if main is not None and queue is not None:
                main.wait_stream(queue)

    return step


def power_limit(at: Setting) -> Step:
    """The same products; zeros switch fewer transistors, so that the device stays below its power limit."""
    side = at.size(8192, 16)
    make = torch.randn if at.fault else torch.zeros
    left, right = make(side, side, dtype=torch.bfloat16), make(side, side, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        for _ in range(at.size(24, 2)):
            out = left @ right
        return out

    return step
