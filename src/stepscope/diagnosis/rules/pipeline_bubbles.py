"""# What it finds
Pipeline stages that wait for each other.

# Why it costs time
The last stage has nothing to do until the first micro-batch reaches it, and the first one nothing until the last
gradient comes back. With p stages and m micro-batches, (p - 1) / (m + p - 1) of a step is such a bubble. If a stage
computes longer than the others, all of them wait for it with every micro-batch.

# How it is measured
Sends are matched with their receives by the ranks that the profiler names. A stage waits from when it begins to receive
until its peer sends. Waits before its first gradient comes (or, on the last stage, its first input) are the warm-up,
those after its last input the drain, all others steady. With one rank's trace: the time of its receives, as far as the
device computes nothing.

# Known false positives
Transfers between stages that are slow themselves: with one rank's trace they look the same.

# What to do
More and smaller micro-batches, an interleaved or zero-bubble schedule, or fewer stages. Where one stage computes
longer, move layers from it to the others; the embedding and the loss count too.

# Reference
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (SC 2021); Qi et al., "Zero Bubble
Pipeline Parallelism" (ICLR 2024).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.communication import collectives
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import overlapped

REMEDY: Final = Remedy(
    "Split the batch into more micro-batches, or let the schedule fill the bubbles.",
    "from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble\n"
    "schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4 * len(stages))      # several stages a rank",
)


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    found = collectives(view.trace, device=view.device, window=view.window)
    receives = found.filter((pl.col("kind") == "send_receive") & pl.col("source").is_not_null())
    total, waiting = int(found["duration_ns"].sum()), int(receives["duration_ns"].sum())
    cost = min(waiting, view.exposed_ns(("communication",)) * waiting // max(total, 1))
    if not limits.reached(cost):
        return
    yield Found(
        f"for {view.percent(cost)} of the {view.period} this pipeline stage waits to receive",
        cost,
        basis="time of its receives, as far as no computation covers it",
        confidence="low",
        figures=[
            view.count_per_step("receives", receives.height),
            Figure(f"their time {view.per}", waiting // view.step_count, "ns"),
        ],
        intervals=view.longest(receives, "receive"),
        remedy=REMEDY,
        change=overlapped(rows_of(receives)),
    )


RULE: Final = Rule(
    id="pipeline-bubbles",
    title="Pipeline stages wait for each other",
    thresholds={
        "share": Threshold(0.1, "share", "share of the {period} that stages wait"),
        "more": Threshold(0.1, "share", "how much longer than the mean the slowest stage computes to be named"),
    },
    check=check,
    needs=("messages",),
    replaces=("exposed-communication",),
)
