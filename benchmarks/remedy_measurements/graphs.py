"""Captured steps, marks and loop constants."""

from __future__ import annotations

from remedy_measurements import Measurement

_ELEMENTWISE = """
from stepscope.remedies import capture_step
x, y = torch.randn(1 << 20, device=device()), torch.randn(1 << 20, device=device())

@torch.no_grad()
def score(x, y):
    z = torch.nn.functional.gelu(x * y + 1)
    return (z * torch.sigmoid(y) - x.abs()).clamp(-3, 3).mean()

"""

_TRAINING = """
from stepscope.remedies import capture_step, mark_step
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(16)]).to(device())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.randn(64, 256, device=device())

def step(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss

"""

_LOOP = """
import os
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
from stepscope.remedies import LoopConstants
x = torch.randn(1024)
VALUES = [0.9, 0.7, 0.5, 0.3]

def loop(values):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, value: x * value + (1 - value), dynamic=False)
    now = x
    for value in values:
        now = compiled(now, value)

"""

MEASUREMENTS = (
    Measurement(
        'capture_step(mode="compile")',
        "nine elementwise operators on 1 Mi numbers, without gradients",
        _ELEMENTWISE + "measured(lambda: score(x, y), warmup=3, steps=20)",
        _ELEMENTWISE + 'step = capture_step(score, mode="compile")\nmeasured(lambda: step(x, y), warmup=3, steps=20)',
    ),
    Measurement(
        'capture_step(mode="cuda-graph")',
        "training step of 16 layers of 256, batch 64, AdamW",
        _TRAINING + "measured(lambda: step(batch), warmup=6, steps=50)",
        _TRAINING + 'graph = capture_step(step, mode="cuda-graph")\nmeasured(lambda: graph(batch), warmup=6, steps=50)',
        needs="cuda",
    ),
    Measurement(
        "mark_step",
        "training step of 16 layers of 256, batch 64, AdamW; one mark in each",
        _TRAINING + "measured(lambda: step(batch), warmup=3, steps=50)",
        _TRAINING + "measured(lambda: (step(batch), mark_step()), warmup=3, steps=50)",
    ),
    Measurement(
        "LoopConstants",
        "the first run of a compiled loop over 4 numbers, which torch.compile(dynamic=False) takes as constants",
        _LOOP + "measured(lambda: loop(VALUES), warmup=1, steps=2)",
        _LOOP + "measured(lambda: loop(LoopConstants(VALUES)), warmup=1, steps=2)",
    ),
)
