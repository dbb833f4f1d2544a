"""Values logged without waiting for the device, and progress bars that are drawn rarely."""

from __future__ import annotations

from remedy_measurements import Measurement

_SMALL_STEP = """
import io
weight = torch.randn(256, 256)
log = io.StringIO()

def compute():
    return torch.tanh(weight @ weight).mean()
"""
_BAR = (
    _SMALL_STEP
    + """
from tqdm import tqdm

def loop(bar):
    "A hundred steps, the loss beside the bar."
    for _ in range(100):
        loss = compute()
        bar.update()
        bar.set_postfix(loss=LOSS)

bar = tqdm(total=10**6, file=log, mininterval=0)
"""
)

_DEVICE = """
weight = torch.randn(512, 512, device="cuda")
rows = []

def write(step, name, value):
    rows.append((step, name, value))

def compute():
    value = weight
    for _ in range(50):
        value = torch.tanh(value @ weight)
    return value.mean()
"""

MEASUREMENTS = (
    Measurement(
        "every(50)(tqdm(...))",
        "100 steps of a 256 x 256 product, the loss shown beside the bar in each",
        _BAR.replace("LOSS", "loss.item()") + "measured(lambda: loop(bar))",
        _BAR.replace("LOSS", "loss")
        + "from stepscope.remedies import every\nbar = every(50)(bar)\nmeasured(lambda: loop(bar))",
    ),
    Measurement(
        "DeferredScalars",
        "50 products of 512 x 512 a step, and the loss read by .item() in each",
        _DEVICE
        + "step = iter(range(10**9))\n"
        + "def train():\n    for _ in range(50):\n        write(next(step), 'loss', compute().item())\n"
        + "measured(train)",
        _DEVICE
        + "from stepscope.remedies import DeferredScalars\n"
        + "step = iter(range(10**9))\n"
        + "scalars = DeferredScalars(write)\n"
        + "def train():\n    for _ in range(50):\n        scalars.add(next(step), loss=compute())\n"
        + "measured(train)\nscalars.close()",
        needs="cuda",
    ),
)
