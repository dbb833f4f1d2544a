"""# What it finds
Tensors that are copied into another memory order and back: images between channels first (NCHW) and channels last
(NHWC), sequences between two orders of dimensions.

# Why it costs time
Such a copy computes nothing, and it is slow for its size because it reads or writes memory out of order. In the
backward pass the gradient needs the same copies in reverse.

# How it is measured
Library kernels that change a convolution's layout. Copies after a change of order (`permute`, `transpose`),
each paired with the later one that undoes it, and in the backward pass the copies their gradients need and the slow
element-wise work on tensors of two different orders.

# Known false positives
A library may change the layout because its kernel for the other layout saves more than the copy costs: measure both.

# What to do
Use `memory_format=torch.channels_last` for model and images, so that nothing needs to be reordered; use layers that
take the data's own order (a 1 by 1 convolution instead of a linear layer over channels); call no `.contiguous()` where
the next operator does not need it.

# Reference
PyTorch, "Channels Last Memory Format in PyTorch".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.conversions import CONVERTING_KERNEL, backward_work, layout_copies, to_and_fro
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_operators, scaled_slices, scaled_work, scaled_work_of, together

_CONVOLUTION: Final = r"^aten::\w*conv"


def check(view: View, limits: Limits) -> Answers:
    paired = to_and_fro(layout_copies(view.trace, rows_of(view.operators)))
    forward = np.unique(np.array([copy.copy for copy in paired], np.int64))
    backward, excess = backward_work(view.trace, paired) if paired else (forward, {})
    excess = excess if view.device is None else {}
    copying = np.concatenate([forward, backward])
    kernels = view.work.filter((pl.col("kind") == "compute") & pl.col("name").str.contains(CONVERTING_KERNEL))
    in_kernels = int(kernels["duration_ns"].sum())
    cost = view.cost_ns(copying) + sum(excess.values()) + in_kernels
    if not limits.reached(cost):
        return
    launched = kernels.filter(pl.col("launch").is_not_null())
    launches = view.slices_of_launches(launched["launch"])
    durations = view.trace.operators["duration_ns"].to_numpy()
    slices = np.concatenate([view.slices_of_operators(forward), launches])
    weights = np.concatenate([np.maximum(durations[forward], 1), launched["duration_ns"].to_numpy()])
    longer = np.array(list(excess), np.int64)  # operators that the copies slow down
    left = 1 - np.array(list(excess.values()), np.int64) / np.maximum(durations[longer], 1)
    changes = (len(copying) + kernels.height) / view.step_count
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to copies that only change the order of dimensions, "
        f"{changes:,.0f} {view.a_step}",
        cost,
        basis=_basis(len(forward), len(backward), kernels.height),
        confidence="medium",
        figures=[
            Figure(f"copies that only change the order {view.per}", changes, "count"),
            view.count_per_step("copies there and back", len(forward)),
            view.count_per_step("copies of gradients", len(backward)),
            view.count_per_step("kernels that convert layouts", kernels.height),
        ],
        intervals=view.longest(kernels, "conversion"),
        remedy=_remedy(view, bool(len(forward))),
        where=view.locations_of(slices, weights),
        change=together(
            scaled_operators(copying, 0.0),
            scaled_slices(launches, 0.0),
            scaled_work(rows_of(kernels), 0.0),
            scaled_work_of(longer, left),
        ),
    )


def _basis(forward: int, backward: int, kernels: int) -> str:
    parts = {
        "copies that undo each other": forward,
        "what their gradients cost beyond the forward operators": backward,
        "kernels that convert layouts": kernels,
    }
    return ", and ".join(words for words, count in parts.items() if count)


def _remedy(view: View, explicit: bool) -> Remedy:
    if explicit and not view.operators["name"].str.contains(_CONVOLUTION).any():
        return Remedy(
            "Keep one order of dimensions between layers, and hand views on: no contiguous where the next operator "
            "takes any order, as matrix products and fused attention do.",
            "query = query.view(batch, length, heads, size).transpose(1, 2)   # a view: no .contiguous() behind it\n"
            "attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)",
        )
    if explicit:
        return Remedy(
            "Keep one order through the network: channels last where layers work on channels, and no permute and "
            "contiguous between layers.",
            "model = model.to(memory_format=torch.channels_last)\n"
            "images = images.to(memory_format=torch.channels_last)   # permute(0, 2, 3, 1) is then no copy\n"
            "channels = torch.nn.Conv2d(width, width, 1)             # a linear layer over channels, without permute",
        )
    return Remedy(
        "Give convolutions the layout that their kernels work in, for weights and images.",
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(device, memory_format=torch.channels_last)",
        apply=("channels-last",),
    )


RULE: Final = Rule(
    id="layout-conversion",
    title="Tensors are copied into another order of dimensions and back",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} that such copies cost")},
    check=check,
    needs=("operators", "shapes"),
)
