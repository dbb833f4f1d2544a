"""A loss computed position by position, and the same function as it is after its rewrite; forward and backward."""

from __future__ import annotations

from remedy_measurements import Measurement

_SOURCE = """
import torch
import torch.nn.functional as F

def loss_of(logits, targets):
    loss = torch.zeros((), device=logits.device)
    for position in range(logits.shape[1]):
        loss = loss + F.cross_entropy(logits[:, position], targets[:, position])
    return loss / logits.shape[1]
"""
_PROGRAM = """
from stepscope.remedies.rewrites import rewrites_of, rewritten
source = {source!r}
if {with_remedy}:
    source = rewritten(source, rewrites_of(source, names=["batched-loss"]))
    assert "for position" not in source
names = {{}}
exec(source, names)
logits = torch.randn({shape}, device=device(), requires_grad=True)
targets = torch.randint(0, logits.shape[2], logits.shape[:2], device=device())
def step():
    logits.grad = None
    names["loss_of"](logits, targets).backward()
measured(step)
"""
_CASES = (("4, 64, 4096", "4 sequences of 64, 4,096 classes"), ("8, 256, 1000", "8 sequences of 256, 1,000 classes"))

MEASUREMENTS = tuple(
    Measurement(
        "batched-loss",
        f"{words}, the loss alone",
        _PROGRAM.format(source=_SOURCE, shape=shape, with_remedy=False),
        _PROGRAM.format(source=_SOURCE, shape=shape, with_remedy=True),
    )
    for shape, words in _CASES
)
