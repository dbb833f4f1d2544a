"""The allocator, the collector and the threads of the host."""

from __future__ import annotations

import sys

from remedy_measurements import Measurement
from stepscope.remedies import find_allocator

_LARGE_TENSORS = """
rows = torch.randn(1024, 1024)

def step():
    parts = [rows * number for number in range(8)]
    torch.relu(torch.cat(parts)).add(1).sum()

measured(step, warmup=4, steps=20)
"""


def _with_allocator(name: str) -> str:
    """The same program, started once more with the allocator."""
    return f"""
import os
from stepscope.remedies import allocator_environment, loaded_allocator
if loaded_allocator() != "{name}":
    os.execve(sys.executable, sys.orig_argv, {{**os.environ, **allocator_environment("{name}", os.environ)}})
{_LARGE_TENSORS}"""


_OBJECTS = """
records = [[number] for number in range(300_000)]
weight = torch.randn(256, 256)
kept = []

def step():
    "Ten steps of a small model, which keep 20,000 objects each until the next one has its own."
    global kept
    for _ in range(10):
        kept = [[number] for number in range(20_000)]
        torch.tanh(weight @ weight).mean()
        after_step()
"""

_THREADS = """
layers = [torch.randn(512, 512) for _ in range(8)]
x = torch.randn(256, 512)

def step():
    value = x
    for layer in layers:
        value = torch.relu(value @ layer).add(1).mul(0.5)
"""

ALLOCATORS = tuple(
    Measurement(
        f"--allocator {name}",
        "a step that makes tensors of 4 to 32 MiB",
        _LARGE_TENSORS,
        _with_allocator(name),
    )
    for name in ("jemalloc", "tcmalloc")
    if find_allocator(name) is not None or print(f"--allocator {name}: not on this system; left out", file=sys.stderr)
)

MEASUREMENTS = (
    *ALLOCATORS,
    Measurement(
        "collect_garbage_at_steps",
        "10 small steps that keep 20,000 objects each, beside 300,000 that stay; collected after every 50",
        _OBJECTS + "after_step = lambda: None\nmeasured(step, steps=20)",
        _OBJECTS
        + "from stepscope.remedies import collect_garbage_at_steps\n"
        + "garbage = collect_garbage_at_steps(every=50)\n"
        + "after_step = garbage.step\nmeasured(step, steps=20)",
    ),
    Measurement(
        "set_thread_counts",
        "8 layers of width 512 with eight threads for each processor",
        _THREADS + "import os\ntorch.set_num_threads(8 * os.cpu_count())\nmeasured(step, steps=20)",
        _THREADS + "from stepscope.remedies import set_thread_counts\nset_thread_counts()\nmeasured(step, steps=20)",
    ),
)
