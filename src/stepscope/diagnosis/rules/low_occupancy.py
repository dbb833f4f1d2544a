"""# What it finds
Long kernels with fewer thread blocks than the device has multiprocessors.

# Why it costs time
A thread block runs on one multiprocessor (compute unit on AMD). On a device with 100 multiprocessors, a kernel of 20
blocks leaves most of them idle, however efficient each block is.

# How it is measured
The kernels' grids are compared with the device's multiprocessors, for kernels that last longer than a launch costs and
run while the device determines the step's length. Half of the gain from an even spread over all multiprocessors is
counted as saved. Kernels of operators whose shapes show what they could reach are left to inefficient-kernel.

# Known false positives
Kernels limited by memory bandwidth gain less from more blocks. Kernels of other queues may fill the rest: time in which
several queues work counts once. On AMD some launches record threads instead of blocks, which hides low block counts.

# What to do
Give the kernel more independent work: a larger batch, several sequences at a time, one call instead of several. For
attention with one query use a kernel that splits the keys; for long reductions use one that splits the reduced
dimension.

# Reference
CUDA C++ Best Practices Guide, thread and block heuristics: more blocks than multiprocessors.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._device import (
    alone_share,
    blocks,
    decides,
    limited_calls,
    multiprocessors,
    operators_of_work,
)
from stepscope.diagnosis.rules._waits import Mask
from stepscope.diagnosis.rules.memory_headroom import MORE_REQUESTS
from stepscope.whatif.changes import scaled_work

_MOST: Final = 3


def check(view: View, limits: Limits) -> Answers:
    count = None if view.device is None or view.work.is_empty() else multiprocessors(view)
    if not count:
        return
    shortest = limits["shortest_ns"]
    duration = view.work["duration_ns"].to_numpy()
    grids = blocks(view.work["grid"])
    few = (grids >= 1) & (grids < limits["filled"] * count) & (duration >= shortest)
    few &= (view.work["kind"] == "compute").to_numpy() & decides(view) & ~_is_explained(view)
    spread = np.maximum(duration * grids / count, shortest)
    shorter = np.where(few, np.maximum(duration - spread, 0), 0.0) * limits["gained"]
    work = view.work.with_columns(
        lost_ns=pl.Series(shorter * alone_share(view)),
        left=pl.Series(1 - shorter / np.maximum(duration, 1)),
        blocks=pl.Series(grids),
    ).filter(pl.Series(few))
    names = (
        work.group_by("name")
        .agg(lost=pl.col("lost_ns").sum())
        .filter(pl.col("lost") > 0)
        .sort(["lost", "name"], descending=[True, False])
        .head(_MOST)
    )
    for name in names["name"]:
        yield _found(view, limits, work.filter(pl.col("name") == name), count)


def _is_explained(view: View) -> Mask:
    """Which rows of `view.work` belong to operators whose limit is known, which inefficient-kernel judges."""
    calls = limited_calls(view)
    known = np.zeros(view.trace.operators.height + 1, np.bool_)
    known[calls.filter(pl.col("limit").is_not_null())["row"].to_numpy()] = True
    explained: Mask = known[operators_of_work(view)]  # -1 is the last row, which no operator has
    return explained


def _found(view: View, limits: Limits, work: pl.DataFrame, count: int) -> Found:
    name, total = work["name"][0], int(work["duration_ns"].sum())
    lost = float(work["lost_ns"].sum())
    usual = int(np.average(work["blocks"].to_numpy(), weights=work["duration_ns"].to_numpy()))
    gained = limits["gained"]
    return Found(
        f"a kernel that takes {view.percent(total)} of the {view.period} keeps {min(usual, count):,} of the device's "
        f"{count:,} multiprocessors busy",
        lost,
        basis=f"{gained:.0%} of what the same work spread over all multiprocessors would save, an assumption",
        confidence="low",
        figures=[
            Figure("thread blocks", usual, "count", limits["filled"] * count),
            Figure("multiprocessors", count, "count"),
            view.share_figure("in these kernels", total),
            view.count_per_step("such kernels", work.height),
        ],
        intervals=view.longest(work, name[:80]),
        remedy=Remedy(
            "Give each call more independent work: a larger batch, or several small calls joined into one.",
            "out = torch.bmm(torch.stack(lefts), torch.stack(rights))  # instead of a loop of torch.mm\n"
            "loader = DataLoader(dataset, batch_size=2 * batch_size)",
        ),
        where=view.at_launches(work),
        change=scaled_work(rows_of(work), work["left"].to_numpy()),
    )


RULE: Final = Rule(
    id="low-occupancy",
    title="Kernels have too few thread blocks to fill the device",
    thresholds={
        "share": Threshold(0.03, "share", "share of the {period} that kernels of one name lose"),
        "filled": Threshold(0.5, "share", "blocks for each multiprocessor below which a kernel has too few"),
        "shortest_ns": Threshold(10_000, "ns", "kernels shorter than this are not counted"),
        "gained": Threshold(0.5, "share", "part of what an even spread would save that is counted as saved"),
    },
    check=check,
    needs=("grids",),
    remedies={
        "jax": Remedy(
            "Give each call more independent work: a larger batch, or several small calls joined into one.",
            "out = jax.vmap(function)(jnp.stack(inputs))    # instead of a loop of function(input)",
        ),
    },
    serving=MORE_REQUESTS,
)
