"""# What it finds
Code is compiled again and again while training runs.

# Why it costs time
A graph is compiled for the shapes and types it saw. A new shape, a changed Python value or an unseen branch compiles
another one, which takes as long as hundreds of steps, and the device idles meanwhile.

# How it is measured
Idle time (without a device: main thread's time) while the launching thread was compiling: frames of torch._dynamo's and
Inductor's compilers, Triton's, modules being loaded. Compilations are counted by step.

# Known false positives
A recording of the first steps shows compilation that never comes back; the finding says how many steps compiled.

# What to do
Pad inputs to few shapes, mark dynamic dimensions, keep changing Python numbers out of compiled code.

# Reference
PyTorch, "Dealing with recompilations" (`TORCH_LOGS=recompiles`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import CAUSE_CODES
from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "recompilation"
TITLE: Final = "Code is compiled during the steps"
THRESHOLDS: Final = {"share": Threshold(0.01, "share", "share of the time lost to compiling")}


def check(view: View) -> RuleResult:
    """Sum the pieces whose cause is compilation."""
    pieces = view.pieces.filter(pl.col("cause") == "compilation")
    cost = int(pieces["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    count, steps = _compilations(view)
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the time goes to compiling code: {count} compilations in {steps} of "
        f"{view.step_count} steps",
        cost,
        basis="idle time of the device while the launching thread was compiling"
        if view.device is not None
        else "time of the main thread inside compilers",
        confidence="high" if steps > 1 else "medium",
        evidence=Evidence(
            (
                Figure("share of the time lost to compiling", view.share(cost), "share", limit),
                Figure("compilations", count, "count"),
                Figure("steps that compiled", steps, "count"),
            ),
            view.longest(pieces, "compiling"),
        ),
        remedy=Remedy(
            "See what changes with TORCH_LOGS=recompiles, then pad to few shapes or mark the dimension dynamic.",
            "torch._dynamo.mark_dynamic(batch, 1)          # or pad: length = -(-length // 64) * 64",
        ),
        where=view.locations(pieces),
    )
    return RuleResult((finding,))


def _compilations(view: View) -> tuple[int, int]:
    """Outermost compiling slices in the span, and the number of steps they start in."""
    activity = view.activity
    compiling = activity.cause == CAUSE_CODES["compilation"]
    around = activity.around
    outermost = compiling & ~((around >= 0) & compiling[np.maximum(around, 0)])
    starts = activity.start[outermost]
    starts = starts[(starts >= view.span.start_ns) & (starts < view.span.end_ns)]
    bounds = view.complete_steps["start_ns"].to_numpy()
    steps = len(np.unique(np.searchsorted(bounds, starts, side="right"))) if len(bounds) else min(len(starts), 1)
    return len(starts), steps
