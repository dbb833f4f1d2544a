"""bf16 by mixed_precision, TF32, and a vocabulary that fits the tiles of a matrix product."""

from __future__ import annotations

from remedy_measurements import Measurement
from remedy_measurements.processor_time import PROCESSOR_TIME

_TRAINING = (
    PROCESSOR_TIME
    + """
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64)
).to(device())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(256, 512, device=device())
"""
)
_PLAIN = """
def step():
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
measured(step, warmup=4)
"""
_GUARDED = """
from stepscope.remedies import mixed_precision
precision = mixed_precision("bf16", device=device(), check_steps=3)
def step():
    optimizer.zero_grad()
    precision.backward(precision.loss(lambda: model(batch).float().square().mean()))
    precision.step(optimizer)
measured(step, warmup=4)
"""
_PRODUCTS = """
one, other = (torch.randn(4096, 4096, device=device()) for _ in range(2))
measured(lambda: one @ other, warmup=4, steps=20)
"""
_SCORES = """
table, head = torch.nn.Embedding(50257, 1024), torch.nn.Linear(1024, 50257, bias=False)
head.weight = table.weight
table, head = table.to(device(), torch.bfloat16), head.to(device(), torch.bfloat16)
head.weight = table.weight
words = torch.arange(2048, device=device())
{pad}
def step():
    table.weight.grad = None
    head(table(words)).logsumexp(-1).sum().backward()
measured(step, warmup=4, steps=20)
"""

MEASUREMENTS = (
    Measurement(
        "mixed_precision",
        "three linear layers of 1,024, batch of 256, SGD: bf16 beside FP32",
        _TRAINING + _PLAIN,
        _TRAINING + _GUARDED,
    ),
    Measurement(
        "allow_tf32",
        "product of two 4,096 by 4,096 matrices in FP32",
        _PRODUCTS,
        "from stepscope.remedies import allow_tf32\nallow_tf32()\n" + _PRODUCTS,
        needs="cuda",
    ),
    Measurement(
        "pad_vocabulary",
        "50,257 words padded to 50,304: lookup, scores of 2,048 positions and backward, bf16",
        _SCORES.replace("{pad}", ""),
        _SCORES.replace("{pad}", "from stepscope.remedies import pad_vocabulary\npad_vocabulary(table, head)"),
        needs="cuda",
    ),
)
