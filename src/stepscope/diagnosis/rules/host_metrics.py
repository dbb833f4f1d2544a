"""# What it finds
Metrics that the host computes in each step from values copied from tensors: a confusion matrix in NumPy, a scikit-learn
score, an average over numbers read one by one.

# Why it costs time
The copy makes the host wait for the device. Then the host computes, mostly in Python and on one core, while the device
has nothing to do. Nobody looks at a metric after each step.

# How it is measured
The recorder reads from the source which statements copy values of tensors to the host (`.numpy()`, `.tolist()`,
`.item()`, `.cpu()`) or use such values, and which functions are called with them. Functions that turn such values back
into a tensor, as when they choose the next action or token, are left out, and so are lines that make batches. In
programs that train, the time of these lines counts, without their backward pass. The saving assumes that they run so
rarely that they take 1 % of the time.

# Known false positives
Values that decide what the next step does but reach it through files or other processes.

# What to do
Keep what the metric needs as tensors on the device and compute it every N steps or at the end of the epoch; count a
confusion matrix by `torch.bincount`.

# Reference
PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization"; torchmetrics accumulates on the device.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.diagnosis.lines.costs import line_costs
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._waits import every_steps

_SELDOM: Final = 0.01
"""Acceptable share of the time for metrics."""


def check(view: View, limits: Limits) -> Answers:
    if not view.program.metrics or not view.trains:
        return
    costs = line_costs(view)
    loading = costs.placed(view.pieces_of("input"))["place"].unique().to_list()
    lines = [
        line
        for line in costs.lines
        if line.number not in loading
        and line.in_most_steps
        and any(
            each.file == line.place.file and each.first <= line.place.line <= each.last for each in view.program.metrics
        )
        and not line.backward_ns
    ]
    cost = sum(line.ns for line in lines)
    if not limits.reached(cost):
        return
    numbers = np.array([line.number for line in lines], np.int64)
    every = every_steps(cost, view.length_ns, _SELDOM)
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to metrics that the host computes from copied values; every "
        f"{every} steps would do",
        cost * (1 - 1 / every),
        basis=f"the time of these lines, less what remains of it when they run every {every} steps",
        confidence="medium",
        weighed_ns=cost,
        figures=[
            Figure("lines that copy values or compute with them", len(lines), "count"),
            view.ns_per_step("time of these lines", cost),
            Figure("steps between two of them at which they cost too little to matter", every, "count"),
        ],
        where=costs.locations(numbers),
        remedy=Remedy(
            f"Add up what the metric needs as tensors on the device, and compute it every {every} steps or at the end "
            "of the epoch.",
            "matrix += torch.bincount(classes * target + prediction, minlength=classes**2)    # a confusion matrix\n"
            "right += (prediction == target).sum()                       # no .item(): stays on the device\n"
            f"if step % {every} == 0:\n"
            "    report(matrix.cpu(), right.item())",
        ),
        change=costs.scaled(numbers, 1 / every),
    )


RULE: Final = Rule(
    id="host-metrics",
    title="Metrics are computed on the host in each step",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} that these lines take")},
    check=check,
    rivals=("frequent-logging", "loop-in-step"),
)
