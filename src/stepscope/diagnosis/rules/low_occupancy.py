"""# What it finds
Long kernels with fewer thread blocks than the device has multiprocessors.

# Why it costs time
A thread block runs on one multiprocessor (compute unit on AMD). A kernel of 20 blocks leaves most of a device of 100
idle for as long as it runs, however well each block works.

# How it is measured
The kernels' grids against the device's multiprocessors, for kernels that last longer than a launch costs and in whose
time the device decides on the step's length. What an even spread over all multiprocessors would take is assumed to be
reached by half.

# Known false positives
Kernels whose single blocks are limited by memory cannot be spread so far. Kernels of other queues may fill the rest:
time in which several queues work counts once. On AMD some launches record threads instead of blocks, which hides few
blocks.

# What to do
Give the kernel more independent work: a larger batch, sequences side by side, one call instead of several. For
attention with one query use a kernel that splits the keys, for long reductions one that splits the reduced dimension.

# Reference
CUDA C++ Best Practices Guide, thread and block heuristics: more blocks than multiprocessors.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Finding, Remedy, RuleResult, Threshold
from stepscope.diagnosis.rules._copies import alone_share, blocks, decides, multiprocessors
from stepscope.diagnosis.view import View
from stepscope.whatif.changes import scaled_work

ID: Final = "low-occupancy"
TITLE: Final = "Kernels have too few thread blocks to fill the device"
NEEDS: Final = ("grids",)
THRESHOLDS: Final = {
    "share": Threshold(0.03, "share", "share of the step that kernels of one name must lose"),
    "filled": Threshold(0.5, "share", "blocks for each multiprocessor below which a kernel has too few"),
    "shortest_ns": Threshold(10_000, "ns", "kernels shorter than this are not counted"),
    "gained": Threshold(0.5, "share", "part of what an even spread would save that is counted as saved"),
}

_MOST: Final = 3


def check(view: View) -> RuleResult:
    """Sum by name what kernels with few blocks would gain from more."""
    count = None if view.device is None or view.work.is_empty() else multiprocessors(view)
    if not count:
        return RuleResult()
    shortest = view.threshold(ID, THRESHOLDS, "shortest_ns")
    duration = view.work["duration_ns"].to_numpy()
    grids = blocks(view.work["grid"])
    few = (grids >= 1) & (grids < view.threshold(ID, THRESHOLDS, "filled") * count) & (duration >= shortest)
    few &= (view.work["kind"] == "compute").to_numpy() & decides(view)
    spread = np.maximum(duration * grids / count, shortest)
    shorter = np.where(few, np.maximum(duration - spread, 0), 0.0) * view.threshold(ID, THRESHOLDS, "gained")
    work = view.work.with_columns(
        lost_ns=pl.Series(shorter * alone_share(view)),
        left=pl.Series(1 - shorter / np.maximum(duration, 1)),
        blocks=pl.Series(grids),
    ).filter(pl.Series(few))
    limit = view.threshold(ID, THRESHOLDS, "share")
    names = (
        work.group_by("name")
        .agg(lost=pl.col("lost_ns").sum())
        .filter((pl.col("lost") > 0) & (pl.col("lost") >= limit * view.length_ns))
        .sort(["lost", "name"], descending=[True, False])
        .head(_MOST)
    )
    return RuleResult(
        tuple(_finding(view, work.filter(pl.col("name") == name), count, limit) for name in names["name"].to_list())
    )


def _finding(view: View, work: pl.DataFrame, count: int, limit: float) -> Finding:
    name, total = work["name"][0], int(work["duration_ns"].sum())
    lost = float(work["lost_ns"].sum())
    usual = int(np.average(work["blocks"].to_numpy(), weights=work["duration_ns"].to_numpy()))
    gained = view.threshold(ID, THRESHOLDS, "gained")
    launched = work.filter(pl.col("launch").is_not_null())
    slices = view.activity.slices_of("launches")[launched["launch"].to_numpy().astype(np.int64)]
    return view.finding(
        ID,
        f"a kernel that takes {view.share(total):.0%} of the step keeps {min(usual, count):,} of the device's "
        f"{count:,} multiprocessors busy",
        lost,
        basis=f"{gained:.0%} of what the same work spread over all multiprocessors would save, an assumption",
        confidence="low",
        evidence=Evidence(
            (
                Figure("share of the step that is lost", view.share(lost), "share", limit),
                Figure("thread blocks", usual, "count", view.threshold(ID, THRESHOLDS, "filled") * count),
                Figure("multiprocessors", count, "count"),
                Figure("share of the step in these kernels", view.share(total), "share"),
                Figure("such kernels per step", work.height / view.step_count, "count"),
            ),
            view.longest(work, name[:80]),
        ),
        remedy=Remedy(
            "Give each call more independent work: a larger batch, or several small calls joined into one.",
            "out = torch.bmm(torch.stack(lefts), torch.stack(rights))  # instead of a loop of torch.mm\n"
            "loader = DataLoader(dataset, batch_size=2 * batch_size)",
        ),
        where=view.locations_of(slices, launched["duration_ns"].to_numpy()),
        change=scaled_work(work["row"].to_numpy().astype(np.int64), work["left"].to_numpy()),
    )
