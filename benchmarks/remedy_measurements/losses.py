"""Cross entropy in blocks, from logits and from hidden states, beside torch's: time, and memory above all."""

from __future__ import annotations

from remedy_measurements import Measurement
from remedy_measurements.processor_time import PROCESSOR_TIME

_HEAD = """
from torch.nn.functional import cross_entropy
POSITIONS, WIDTH, CLASSES = 1024, 128, 16000
hidden = torch.randn(POSITIONS, WIDTH, device=device(){type}).requires_grad_()
head = torch.nn.Linear(WIDTH, CLASSES, bias=False, device=device(){type})
target = torch.randint(0, CLASSES, (POSITIONS,), device=device())
def step():
    hidden.grad = head.weight.grad = None
    {loss}.backward()
measured(step, steps=4)
"""
_TORCH = "cross_entropy(head(hidden), target)"
_WIDENED = "cross_entropy(head(hidden).float(), target)"
_CHUNKED = "chunked_cross_entropy(head(hidden), target)"
_LINEAR = "linear_cross_entropy(hidden, head.weight, target)"
_TORCHS_LINEAR = (
    "torch.nn.functional.linear_cross_entropy(hidden, head.weight, target, "
    "options=torch.nn.LinearCrossEntropyOptions())"
)


def _program(loss: str, dtype: str = "") -> str:
    imports = "from stepscope.remedies import chunked_cross_entropy, linear_cross_entropy"
    return (
        PROCESSOR_TIME
        + imports
        + _HEAD.replace("{type}", f", dtype=torch.{dtype}" if dtype else "").replace("{loss}", loss)
    )


_SHAPE = "1,024 positions, width 128, 16,000 classes"

MEASUREMENTS = (
    Measurement("chunked_cross_entropy", f"{_SHAPE}, FP32", _program(_TORCH), _program(_CHUNKED)),
    Measurement(
        "chunked_cross_entropy",
        f"{_SHAPE}, bf16, beside torch's of logits made FP32",
        _program(_WIDENED, "bfloat16"),
        _program(_CHUNKED, "bfloat16"),
    ),
    Measurement("linear_cross_entropy", f"{_SHAPE}, FP32", _program(_TORCH), _program(_LINEAR)),
    Measurement(
        "linear_cross_entropy",
        f"{_SHAPE}, bf16, beside torch's of logits made FP32",
        _program(_WIDENED, "bfloat16"),
        _program(_LINEAR, "bfloat16"),
    ),
    Measurement(
        "linear_cross_entropy",
        f"{_SHAPE}, FP32, beside torch 2.13's linear_cross_entropy in chunks",
        _program(_TORCHS_LINEAR),
        _program(_LINEAR),
    ),
)
