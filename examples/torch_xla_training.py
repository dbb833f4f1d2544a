"""A small training with PyTorch/XLA that stepscope records while it runs; by hand, as torch_xla is too large for tests.

    pip install torch==2.9.0 torch_xla==2.9.0 'stepscope[xla]'      some gigabytes; a Python of 3.10 to 3.13
    PJRT_DEVICE=CPU python examples/torch_xla_training.py 60

and from a second terminal, within the 60 seconds

    stepscope attach localhost:9012 --seconds 2

or, recorded from its beginning, without the second terminal:

    PJRT_DEVICE=CPU stepscope run examples/torch_xla_training.py 20
"""

from __future__ import annotations

import sys
import time

import torch
import torch_xla
import torch_xla.debug.profiler as xp

PORT = 9012


def main(seconds: float) -> None:
    """Train for so long, with the profiler server on PORT."""
    server = xp.start_server(PORT)  # it ends with this object
    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        batch = torch.randn(64, 256).to(device)
        with xp.StepTrace("train", step_num=number):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()

        number += 1
    print(f"{number} steps on {device}, loss {loss.item():.4f}")
    del server


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
