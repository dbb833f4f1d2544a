"""Members trained as one against the same members trained in turn."""

from __future__ import annotations

from remedy_measurements import Measurement

_MODELS = """
import torch.nn.functional as F
from torch import nn
from stepscope.remedies import HorizontalTrainer

def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 10))

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, 32)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 128, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(32, 10)
    def forward(self, tokens):
        return self.head(self.blocks(self.token(tokens)).mean(1))

shapes = {mlp: (32, 64), convolutional: (16, 1, 14, 14), Language: (4, 16)}
make = NAME
models = [make().to(device()) for _ in range(COUNT)]
inputs = torch.randn(shapes[make]) if make is not Language else torch.randint(0, 256, shapes[make])
inputs, targets = inputs.to(device()), torch.randint(0, 10, (len(inputs),), device=device())
rates = [10 ** (-4 + 3 * place / COUNT) for place in range(COUNT)]
"""
_IN_TURN = """
optimizers = [torch.optim.AdamW(model.parameters(), lr=rate) for model, rate in zip(models, rates)]
def step():
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
measured(step, steps=10)
"""
_AS_ONE = """
trainer = HorizontalTrainer(
    models, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), torch.optim.AdamW,
    [{"lr": rate} for rate in rates])
measured(lambda: trainer.step((inputs, targets)), steps=10)
"""


def _measurement(name: str, what: str, count: int) -> Measurement:
    models = _MODELS.replace("NAME", name).replace("COUNT", str(count))
    return Measurement("HorizontalTrainer", f"{count} {what}", models + _IN_TURN, models + _AS_ONE)


MEASUREMENTS = (
    _measurement("mlp", "perceptrons of 27,000 parameters, batch 32", 4),
    _measurement("mlp", "perceptrons of 27,000 parameters, batch 32", 16),
    _measurement("mlp", "perceptrons of 27,000 parameters, batch 32", 64),
    _measurement("convolutional", "convolutional networks of 4,000 parameters, batch 16", 16),
    _measurement("Language", "transformers of 34,000 parameters, 4 sequences of 16", 16),
)
