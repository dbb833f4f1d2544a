"""# What it finds
A device that waits for the host while most of its memory stays unused.

# Why it costs time
The host needs about the same time to launch a step's work at any batch size. If the device waits for the host, a larger
batch gives it more work per launch, so each sample takes less time. Unused memory leaves room for the larger batch.

# How it is measured
The peak of reserved memory as a share of the device's memory, and the share of the steps in which the device was idle
because the host was launching work, running Python or stepping the optimizer. The batch size that would fit is
estimated from what was allocated at the peak: parameters, gradients, optimizer state and memory from before the
recording stay, the rest grows with the batch.

# Known false positives
A batch size that the training requires, or a device shared with other programs. Time per step grows with the batch;
time per sample falls.

# What to do
Raise the batch size, and adapt the learning rate; `stepscope run --batch-sizes` measures the gain.

# Reference
NVIDIA DLProf's expert system ("GPU memory is underutilized"); DeepView's batch size predictions.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.blocks import FIXED
from stepscope.analysis.memory import DeviceMemory, alive_table
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._device import memory_locations, size_in_words

_HOST_BOUND: Final = ("dispatch", "python", "launch_latency", "optimizer", "graph_tracing", "step_marker")
_LARGEST_FACTOR: Final = 64
LARGER_BATCH: Final = Remedy(
    "Raise the batch size step by step until operations are long or memory is full; in training, adapt the learning "
    "rate to it."
)
"""Remedy for compiled programs."""


MORE_REQUESTS: Final = InServing(
    "Serve more requests in each iteration: the weights are read once for all of them.",
    "batch",
    "batch = tokenizer(prompts, return_tensors='pt', padding=True)      # several requests in one pass",
)
"""The same where requests are served."""


def check(view: View, limits: Limits) -> Answers:
    memory = next((each for each in view.memories if each.device == view.device), None)
    if memory is None or not memory.is_total or not memory.capacity_bytes or not view.complete_steps.height:
        return
    used = memory.reserved_bytes or memory.peak_bytes
    share = used / memory.capacity_bytes
    waiting = int(view.pieces_of(*_HOST_BOUND)["duration_ns"].sum())
    limit, idle = (limits[name] for name in ("share", "idle"))
    factor = _factor(memory, memory.capacity_bytes, limits["kept_free"])
    if share >= limit or view.share(waiting) < idle or waiting == 0 or factor < 2:
        return
    least = "at least" if factor == _LARGEST_FACTOR else "about"
    yield Found(
        f"only {size_in_words(used)} of {size_in_words(memory.capacity_bytes)} are ever used, while the device "
        f"waits {view.percent(waiting)} of the time for the host: a batch {least} {factor} times as large would fit",
        0,
        basis="a step takes no less time with a larger batch, but a sample does",
        confidence="medium",
        severity="note",
        figures=[
            Figure("share of the device's memory in use at most", share, "share", limit),
            Figure("share of the steps in which the device waits for the host", view.share(waiting), "share", idle),
            Figure("memory in use at most", used, "bytes"),
            Figure("memory there is", memory.capacity_bytes, "bytes"),
            Figure("times as large a batch that fits, estimated", factor, "count"),
        ],
        remedy=_remedy(view, factor),
        where=memory_locations(memory.blocks.filter(pl.col("category") == "input")),
    )


def _factor(memory: DeviceMemory, capacity: int, kept_free: float) -> int:
    """By which factor the part of the peak that grows with the batch could grow."""
    alive = dict(alive_table(memory, "category").select("category", "bytes").iter_rows())
    fixed = sum(alive.get(name, 0) for name in FIXED) + (memory.fragmentation_bytes or 0)
    growing = memory.peak_bytes - sum(alive.get(name, 0) for name in FIXED)
    room = int(capacity * (1 - kept_free)) - fixed
    return min(room // growing, _LARGEST_FACTOR) if growing > 0 else 0


def _remedy(view: View, factor: int) -> Remedy:
    size = next((loader.batch_size for loader in view.program.loaders if loader.batch_size), None)
    larger = f"batch_size={size * 2}" if size else "batch_size=2 * batch_size"
    most = f", up to about {size * factor}" if size else f", up to about {factor} times"
    return Remedy(
        "Raise the batch size step by step and measure what each brings with stepscope run --batch-sizes; in training, "
        "adapt the learning rate to it.",
        f"loader = DataLoader(dataset, {larger}, ...)   # from here on{most}",
    )


RULE: Final = Rule(
    id="memory-headroom",
    title="Memory is unused while the device waits for the host",
    thresholds={
        "share": Threshold(0.5, "share", "share of the device's memory below which much is unused"),
        "idle": Threshold(0.1, "share", "share of the steps in which the device waits for the host"),
        "kept_free": Threshold(0.1, "share", "share of the device's memory that stays free in the estimate"),
    },
    check=check,
    needs=("memory",),
    remedies={
        "jax": LARGER_BATCH,
        "torch_xla": LARGER_BATCH,
    },
    serving=MORE_REQUESTS,
)
