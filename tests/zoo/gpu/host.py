"""Faults of the host, which launches too slowly or waits for the device."""

from __future__ import annotations

import itertools

import torch
from torch import distributed, nn

from stepscope.remedies import capture_step
from tests.zoo.gpu.setting import Setting, Step, adamw, training_step
from tests.zoo.models import GPT, mlp


def loss_read_in_step(at: Setting) -> Step:
    width, rows = at.size(512, 16), at.size(1024, 8)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(24))
    batch, means = torch.randn(rows, width), [0.0]

    @torch.no_grad()
    def step() -> torch.Tensor:
        x = batch
        for layer in layers:
            x = torch.relu(layer(x))
            if at.fault:
                means[0] = x.mean().item()  # planted
        return x

    return step


def synchronised_layers(at: Setting) -> Step:
    width, rows = at.size(512, 16), at.size(1024, 8)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(24))
    batch = torch.randn(rows, width)

    @torch.no_grad()
    def step() -> torch.Tensor:
        x = batch
        for layer in layers:
            x = torch.relu(layer(x))
            if at.fault and at.on_cuda:
                torch.cuda.synchronize()  # planted
        return x

    return step


def boolean_mask(at: Setting) -> Step:
    width, rows = at.size(512, 16), at.size(4096, 8)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(16))
    batch = torch.randn(rows, width)

    @torch.no_grad()
    def step() -> torch.Tensor:
        x, total = batch, torch.zeros((), device=at.device)
        for layer in layers:
            x = torch.relu(layer(x))
            kept = x[:, 0] > 0
            if at.fault:
                total = total + x[kept].sum()  # planted
            else:
                total = total + torch.where(kept[:, None], x, 0).sum()
        return total

    return step


def small_model(at: Setting) -> Step:
    width, rows = at.size(64, 8), at.size(64, 4)
    batch = torch.randn(rows, width)
    model = mlp(width, width, at.size(60, 3), 1)
    optimizer = adamw(model, capturable=at.on_cuda)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return torch.as_tensor(loss)

    step = train if at.fault else capture_step(train)  # planted
    return lambda: step(batch)


def decoding_kernel_by_kernel(at: Setting) -> Step:
    model = GPT(1024, at.size(512, 16), at.size(8, 2), at.size(12, 1), length=64).eval()
    prompt, token = torch.randint(1024, (1, 32)), torch.randint(1024, (1, 1))

    @torch.no_grad()
    def decode(tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(tokens)).argmax(-1)

    once = decode if at.fault else capture_step(decode)  # planted

    @torch.no_grad()
    def generate() -> torch.Tensor:
        model(prompt)
        answer = token
        for _ in range(at.size(16, 4)):
            answer = once(answer)
        return answer

    return generate


def optimizer_tensor_by_tensor(at: Setting) -> Step:
    width, rows = at.size(256, 16), at.size(2048, 8)
    batch = torch.randn(rows, width)
    model = mlp(width, width, at.size(80, 3), 1)
    return training_step(model, lambda: batch, foreach=False if at.fault else None, fused=not at.fault)  # planted


def small_all_reduces(at: Setting) -> Step:
    """One rank; AVG is the reduction for which NCCL starts a kernel even then."""
    if not distributed.is_initialized():
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("nccl" if at.on_cuda else "gloo", store=store, rank=0, world_size=1)
    operation = distributed.ReduceOp.AVG if at.on_cuda else distributed.ReduceOp.SUM
    width, rows = at.size(128, 8), at.size(4096, 4)
    model, batch = mlp(width, width, at.size(60, 3), 1), torch.randn(rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        if at.fault:
            for gradient in gradients:
                distributed.all_reduce(gradient, operation)  # planted
        else:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            distributed.all_reduce(flat, operation)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [a.view_as(b) for a, b in zip(parts, gradients, strict=True)])
        optimizer.step()

    return step


def graph_breaks(at: Setting) -> Step:
    width, rows = at.size(256, 8), at.size(512, 4)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    batch = torch.randn(rows, width)

    def part(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = torch.relu(layer(x))
        return x

    def compute(x: torch.Tensor) -> torch.Tensor:
        x = part(x)
        if at.fault:
            torch._dynamo.graph_break()  # planted
        x = part(x)
        if at.fault:
            torch._dynamo.graph_break()  # planted
        x = part(x)
        if at.fault:
            torch._dynamo.graph_break()  # planted
        return part(x)

    compiled = torch.compile(compute, backend="inductor" if at.on_cuda else "eager")

    @torch.no_grad()
    def step() -> torch.Tensor:
        return compiled(batch)

    return step


def dynamic_shapes(at: Setting) -> Step:
    """The backend aot_eager: what it lacks of inductor's time, it spares the campaign."""
    width = at.size(256, 8)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    batches = [torch.randn(at.size(512, 4) + 8 * number, width) for number in range(at.size(96, 48) if at.fault else 1)]
    torch._dynamo.config.recompile_limit = len(batches) + 1
    numbers = itertools.count()

    def compute(x: torch.Tensor) -> torch.Tensor:  # planted
        for layer in layers:
            x = torch.relu(layer(x))
        return x

    compiled = torch.compile(compute, backend="aot_eager" if at.on_cuda else "eager", dynamic=False)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return compiled(batches[next(numbers) % len(batches)])  # planted

    return step
