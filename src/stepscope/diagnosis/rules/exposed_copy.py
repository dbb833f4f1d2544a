"""# What it finds
Copies between host and device that nothing else overlaps.

# Why it costs time
A copy from ordinary (pageable) memory goes through a staging buffer and holds the host until it is done. A blocking
copy
stands between two steps; a pinned, asynchronous one runs while the device computes.

# How it is measured
Time when the device copies from or to the host and computes nothing, plus idle time while the launching thread was
inside a copy to the device.

# Known false positives
The first copy of a step cannot overlap with anything if the whole step depends on it and only one batch is in flight.

# What to do
`pin_memory=True` in the loader, `non_blocking=True` in `.to(device)`, and copying the next batch while the current one
computes.

# Reference
Nsight Systems' rule cuda_memcpy_async (pageable copies); TraceML reports copies from 10 % of the step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "exposed-copy"
TITLE: Final = "Copies between host and device stop the work"
THRESHOLDS: Final = {"share": Threshold(0.02, "share", "share of the step in which the device only copies")}

_KINDS: Final = ("copy_in", "copy_out")


def check(view: View) -> RuleResult:
    """Add exposed copies and idle time inside copy calls."""
    if view.device is None:
        return RuleResult()
    exposed = view.exposed_ns(_KINDS)
    waiting = view.pieces.filter(pl.col("cause") == "host_to_device_copy")
    cost = exposed + int(waiting["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    copies = view.work.filter(pl.col("kind").is_in(_KINDS))
    pageable = copies.filter(pl.col("name").str.contains("(?i)pageable"))
    calls = copies.filter(pl.col("launch").is_not_null())
    slices = view.activity.slices_of("launches")[calls["launch"].to_numpy().astype(np.int64)]
    moved = int(copies["bytes"].sum() or 0) // view.step_count
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the step goes to copies between host and device that nothing overlaps"
        + (", from pageable memory" if pageable.height else ""),
        cost,
        basis="time when the device only copies, plus idle time inside copy calls",
        confidence="high",
        evidence=Evidence(
            (
                Figure("share of the step lost to copies", view.share(cost), "share", limit),
                Figure("copies per step", copies.height / view.step_count, "count"),
                Figure("of them from or to pageable memory", pageable.height / view.step_count, "count"),
                Figure("bytes moved per step", moved, "bytes"),
            ),
            view.longest(copies, "copy"),
        ),
        remedy=Remedy(
            "Load batches into pinned memory and copy them without waiting.",
            "loader = DataLoader(dataset, ..., pin_memory=True)\n"
            "for batch in loader:\n    batch = batch.to(device, non_blocking=True)",
        ),
        where=view.locations_of(slices, calls["duration_ns"].to_numpy()),
    )
    return RuleResult((finding,))
