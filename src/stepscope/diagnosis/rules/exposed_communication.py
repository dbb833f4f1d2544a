"""# What it finds
Collectives between ranks that no computation overlaps.

# Why it costs time
While gradients or activations travel and nothing computes, every device of the group waits. Data-parallel training can
send the gradients of late layers while early layers are still computing theirs.

# How it is measured
Time when the device works on communication and on no computation, plus idle time while the launching thread waited
for other ranks.

# Known false positives
A rank that arrives early waits inside the collective for the slowest one: then the straggler, not the network, is
the cause, which one rank's trace alone cannot tell.

# What to do
Give DistributedDataParallel buckets that overlap (`bucket_cap_mb`, `gradient_as_bucket_view=True`), accumulate
gradients without synchronising (`no_sync()`), send bf16 gradients.

# Reference
TraceLens reports exposed communication from 5 %, PyTorch's TensorBoard plugin from 10 %.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, NotAnswered, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "exposed-communication"
TITLE: Final = "Communication between ranks is not overlapped"
THRESHOLDS: Final = {"share": Threshold(0.05, "share", "share of the step lost to communication")}


def check(view: View) -> RuleResult:
    """Add exposed collectives and idle time spent waiting for other ranks."""
    exposed = view.exposed_ns(("communication",)) if view.device is not None else 0
    waiting = view.pieces.filter(pl.col("cause") == "communication")
    cost = exposed + int(waiting["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    work = view.work.filter(pl.col("kind") == "communication") if view.device is not None else view.trace.device_work
    total = int(work["duration_ns"].sum())
    calls = work.filter(pl.col("launch").is_not_null())
    slices = view.activity.slices_of("launches")[calls["launch"].to_numpy().astype(np.int64)]
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the step goes to communication that no computation overlaps",
        cost,
        basis="time when the device only communicates, plus idle time spent waiting for other ranks",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("share of the step lost to communication", view.share(cost), "share", limit),
                Figure("communication in all per step", total // view.step_count, "ns"),
                Figure("share of it that is exposed", exposed / total if total else 0.0, "share"),
                Figure("collectives per step", work.height / view.step_count, "count"),
            ),
            view.longest(work, "collective"),
        ),
        remedy=Remedy(
            "Overlap gradients' communication with the backward pass, and send less often or less.",
            "model = DistributedDataParallel(model, bucket_cap_mb=50, gradient_as_bucket_view=True,\n"
            "                                static_graph=True)\n"
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
            "model.register_comm_hook(None, default_hooks.bf16_compress_hook)   # half the bytes",
        ),
        where=view.locations_of(slices, calls["duration_ns"].to_numpy()),
    )
    return RuleResult((finding,), _straggler_question(view))


def _straggler_question(view: View) -> tuple[NotAnswered, ...]:
    if (view.trace.metadata.world_size or 1) < 2:
        return ()
    return (
        NotAnswered(
            "Do ranks wait for a slow one inside the collectives, or for the network?",
            "one rank's trace does not show when the others arrived",
            "record every rank of the same steps, and compare when each rank's collectives begin",
            ID,
        ),
    )
