"""What `benchmarks/remedies.py` measures: one module a group of remedies, named in its literal list MODULES.

Each module has MEASUREMENTS, a tuple of `Measurement`. A measurement is two programs that do the same work, one
without and one with the remedy, each the source text of a Python script. Both are started with `PRELUDE` before them.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import json, resource, sys, threading, time
import torch
torch.manual_seed(0)
torch.set_num_threads(1)

def peak_bytes():
    "Peak of what the process held: on CUDA the device's memory, else what the kernel counted for the process."
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def device():
    return "cuda" if torch.cuda.is_available() else "cpu"

def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()

def measured(step, warmup=2, steps=5):
    "Run step() and say how long each took, and how much memory all of them needed beyond what was held before."
    for _ in range(warmup - 1):
        step()
    base = peak_bytes()
    step()
    finish()
    times = []
    for _ in range(steps):
        begin = time.perf_counter_ns()
        step()
        finish()
        times.append(time.perf_counter_ns() - begin)
    print(json.dumps({"step_ns": times, "base_bytes": base, "peak_bytes": peak_bytes()}))
"""
"""What every measured program begins with; it ends by calling `measured`, or by printing the same JSON itself."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One remedy, measured.

    Attributes:
        remedy: its public name or flag.
        what: the case, in a few words, with its shapes.
        without, with_remedy: the two programs' source text.
        needs: "cuda" where there is nothing to measure without such a device.
    """

    remedy: str
    what: str
    without: str
    with_remedy: str
    needs: str = ""
