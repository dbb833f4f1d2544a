"""# What it finds
A device that is busy with kernels too short to use it fully, while most of its memory stays unused.

# Why it costs time
Even the smallest kernel takes some microseconds to start and end. With graphs or a fast host such kernels follow each
other without a pause, and the device looks busy, but a batch twice as large would take hardly longer.

# How it is measured
The device's time for kernels shorter than a limit, if the device is busy for most of the step, does not wait for
launches, and its peak of reserved memory is below half of its memory. With twice the batch these kernels would take as
long as now, so half of their time per sample is counted as saved.

# Known false positives
A batch size that the training requires, or latency in serving. Time per step stays the same; time per sample falls.

# What to do
Raise the batch size, and adapt the learning rate.

# Reference
TraceLens counts kernels under 10 us as short; SageMaker Debugger's BatchSize rule.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules import launch_bound
from stepscope.diagnosis.rules.memory_headroom import LARGER_BATCH, MORE_REQUESTS
from stepscope.whatif.changes import scaled_work

_SAVED: Final = 0.5


def check(view: View, limits: Limits) -> Answers:
    held = _held_share(view)
    most = limits["memory"]
    if view.device is None or held is None or held > most or launch_bound.RULE.ask(view).findings:
        return
    kernels = view.work.filter(pl.col("kind") == "compute")
    short_ns = limits["short_ns"]
    short = kernels.filter(pl.col("duration_ns") < short_ns)
    time = min(int(short["duration_ns"].sum()), view.length_ns)
    idle = min(int(view.pieces["duration_ns"].sum()), view.length_ns)
    busy = 1 - view.share(idle)
    least = limits["busy"]
    if busy < least:
        return
    yield Found(
        f"{view.percent(time)} of the {view.period} goes to kernels shorter than {short_ns / 1000:,.0f} us, and the "
        f"device's memory is {held:.0%} full at most: a larger batch would take hardly longer",
        time * _SAVED,
        basis="half of the short kernels' time, for each sample, with twice the batch; an assumption",
        confidence="low",
        weighed_ns=time,
        figures=[
            Figure(f"share of the {view.period} that the device is busy", busy, "share", least),
            Figure("share of the device's memory held at the most", held, "share", most),
            view.count_per_step("short kernels", short.height),
            view.count_per_step("kernels", kernels.height),
        ],
        remedy=Remedy(
            "Raise the batch size until kernels are long or memory is full, and adapt the learning rate.",
            "loader = DataLoader(dataset, batch_size=2 * batch_size, ...)",
        ),
        change=scaled_work(rows_of(short), _SAVED),
    )


def _held_share(view: View) -> float | None:
    """The peak of reserved memory as a share of the device's memory; None if either is unknown."""
    sizes = {device.device: device.memory_bytes for device in view.trace.metadata.devices}
    memory = sizes.get(view.device or "")
    events = view.trace.memory.filter(pl.col("device") == pl.lit(view.device, pl.String))
    held = max(events["total_reserved"].drop_nulls().to_list(), default=None)
    return held / memory if memory and held is not None else None


RULE: Final = Rule(
    id="small-batch",
    title="Kernels are too short for the device, and a larger batch would fit",
    thresholds={
        "share": Threshold(0.3, "share", "share of the {period} in short kernels"),
        "short_ns": Threshold(10_000, "ns", "kernels shorter than this are short"),
        "busy": Threshold(0.7, "share", "share of the {period} that the device is busy"),
        "memory": Threshold(0.5, "share", "share of the device's memory above which a larger batch may not fit"),
    },
    check=check,
    remedies={
        "jax": LARGER_BATCH,
        "torch_xla": LARGER_BATCH,
    },
    serving=MORE_REQUESTS,
)
