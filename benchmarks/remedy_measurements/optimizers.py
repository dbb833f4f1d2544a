"""Fused optimizer steps beside the loop over parameters, and clipping in one pass beside a loop and beside torch's."""

from __future__ import annotations

from remedy_measurements import Measurement
from remedy_measurements.processor_time import PROCESSOR_TIME

_STEP = (
    PROCESSOR_TIME
    + """
parameters = [torch.nn.Parameter(torch.randn({size}, device=device())) for _ in range({count})]
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter)
optimizer = torch.optim.{name}(parameters, lr=1e-4{options}, foreach=False)
for _ in range(2):
    optimizer.step()
{fuse}
measured(optimizer.step, warmup=3, steps=20)
"""
)
_FUSE = "from stepscope.remedies import fuse_optimizer\noptimizer = fuse_optimizer(optimizer)"


def _step(name: str, count: int, size: int, options: str = "") -> Measurement:
    what = f"{name}{options and ', momentum'}: {count} parameters of {size:,} numbers, FP32"
    program = _STEP.replace("{name}", name).replace("{count}", str(count)).replace("{size}", str(size))
    program = program.replace("{options}", options)
    return Measurement("fuse_optimizer", what, program.replace("{fuse}", ""), program.replace("{fuse}", _FUSE))


_GRADIENTS = (
    PROCESSOR_TIME
    + """
parameters = [torch.nn.Parameter(torch.empty({size}, device=device())) for _ in range({count})]
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter) * 1e-3
"""
)
_LOOP = """
def clip(limit=1.0):
    norm = sum(parameter.grad.norm().item() ** 2 for parameter in parameters) ** 0.5
    factor = min(1.0, limit / (norm + 1e-6))
    for parameter in parameters:
        parameter.grad.mul_(factor)
measured(clip, warmup=3, steps=20)
"""
_TORCH = "measured(lambda: torch.nn.utils.clip_grad_norm_(parameters, {limit}), warmup=3, steps=20)"
_OURS = """
from stepscope.remedies import clip_grad_norm
measured(lambda: clip_grad_norm(parameters, {limit}), warmup=3, steps=20)
"""


def _clip(what: str, count: int, size: int, without: str, limit: str) -> Measurement:
    gradients = _GRADIENTS.replace("{count}", str(count)).replace("{size}", str(size))
    ours = gradients + _OURS.replace("{limit}", limit)
    return Measurement("clip_grad_norm", what, gradients + without.replace("{limit}", limit), ours)


MEASUREMENTS = (
    _step("AdamW", 400, 64),
    _step("AdamW", 40, 262_144),
    _step("SGD", 400, 64, ", momentum=0.9"),
    _step("Adagrad", 400, 16_384),
    _step("RMSprop", 400, 64),
    _clip("400 gradients of 1,024 numbers, beside a loop with .item()", 400, 1024, _LOOP, "1.0"),
    _clip("40 gradients of 262,144 numbers that need no clipping, beside torch's", 40, 262_144, _TORCH, "1e6"),
)
