"""# What it finds
An optimizer that updates parameters one by one, with several small kernels for each.

# Why it costs time
A model has hundreds of parameters. Updating each with its own handful of kernels launches thousands of them in a
step, each too short to hide the next launch.

# How it is measured
Launches inside `Optimizer.step` per step, without `_foreach_` or `_fused_` operators among them; the device's idle time
while the launching thread was in the optimizer, and before late launches there.

# Known false positives
Few large parameters: then the launches are few, and nothing is reported.

# What to do
`fused=True` where the optimizer has it, else `foreach=True`.

# Reference
PyTorch's OptimizerSingleTensorPattern (removed in 2026); torch.optim documentation, "foreach and fused
implementations".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import CAUSE_CODES
from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "single-tensor-optimizer"
TITLE: Final = "The optimizer updates parameters one by one"
THRESHOLDS: Final = {
    "launches": Threshold(100, "count", "launches of an optimizer step that are many"),
    "share": Threshold(0.01, "share", "share of the step lost in the optimizer"),
}

_FUSED: Final = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch.optim that have a fused implementation."""


def check(view: View) -> RuleResult:
    """Count the optimizer's launches and sum the time lost to them."""
    if view.device is None:
        return RuleResult()
    activity = view.activity
    launched = view.work.filter(pl.col("launch").is_not_null())
    slices = activity.slices_of("launches")[launched["launch"].to_numpy().astype(np.int64)]
    in_optimizer = activity.cause_of(slices) == CAUSE_CODES["optimizer"]
    mine = launched.filter(pl.Series(in_optimizer, dtype=pl.Boolean))
    count = mine["launch"].n_unique() / view.step_count
    minimum = view.threshold(ID, THRESHOLDS, "launches")
    if count < minimum or _is_batched(view, mine):
        return RuleResult()
    late = view.pieces.filter((pl.col("cause") == "optimizer") & pl.col("gap").is_not_null())
    latency = view.pieces.filter(pl.col("cause") == "launch_latency").join(mine, on="launch", how="semi")
    cost = int(late["duration_ns"].sum()) + int(latency["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if view.share(cost) < limit:
        return RuleResult()
    finding = view.finding(
        ID,
        f"the optimizer launches {count:,.0f} kernels a step, one parameter at a time",
        cost,
        basis="idle time while the optimizer was preparing and launching its work",
        confidence="high",
        evidence=Evidence(
            (
                Figure("launches in the optimizer per step", count, "count", minimum),
                Figure("share of the step lost in the optimizer", view.share(cost), "share", limit),
                Figure("median length of its kernels", float(mine["duration_ns"].median() or 0), "ns"),  # type: ignore[arg-type]
            ),
            view.longest(late, "optimizer"),
        ),
        remedy=_remedy(view),
        where=view.locations(late),
    )
    return RuleResult((finding,))


def _remedy(view: View) -> Remedy:
    names = view.trace.annotations["name"].str.extract(r"^Optimizer\.step#(\w+)\.step").drop_nulls()
    name = names[0] if len(names) else "AdamW"
    if name not in _FUSED:
        return Remedy(
            f"Give {name} an implementation over lists of tensors (torch._foreach_...), or compile its step.",
            "optimizer_step = torch.compile(optimizer.step)   # fuses the loop over parameters into few kernels",
        )
    return Remedy(
        f"Let {name} update all parameters with few kernels.",
        f"optimizer = torch.optim.{name}(model.parameters(), ..., fused=True)   # or foreach=True",
    )


def _is_batched(view: View, work: pl.DataFrame) -> bool:
    """Whether most of the optimizer's kernels come from operators over lists of tensors."""
    operators = view.trace.launches["operator"].gather(work["launch"])
    names = view.trace.operators["name"].gather(operators).drop_nulls()
    over_lists = int(names.str.contains("_foreach_|_fused_").to_numpy().sum())
    over_lists += work.filter(pl.col("name").str.contains("multi_tensor_apply")).height
    return over_lists * 2 > work.height
