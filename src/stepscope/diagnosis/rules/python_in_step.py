"""# What it finds
Long stretches of Python code inside the steps, between the operators.

# Why it costs time
While the main thread computes in Python (builds lists, formats text, runs NumPy, reads files), it gives the device
nothing to do, and on a machine without a device nothing else is done either.

# How it is measured
Stretches in which the main thread ran Python and no operator, each at least as long as the threshold `stretch`: with a
device only as far as the device was idle. The short ones, which every call of an operator has, are left out.

# Known false positives
A recording with every Python frame (stacks) slows Python several times: record with lines instead. A call into C code
that releases the thread, such as a wait for a file or a network, counts as well, and is as much in the way.

# What to do
Move what does not depend on the batch out of the step, do the rest with tensor operators, or hand it to a thread or a
data loader's worker that runs ahead.

# Reference
XProf calls a step that spends 3 % or more in "all others" (mostly Python) moderately, from 15 % highly, host-bound.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "python-in-step"
TITLE: Final = "Python code between the operators takes long"
THRESHOLDS: Final = {
    "share": Threshold(0.03, "share", "share of the step in long stretches of Python"),
    "stretch": Threshold(200_000, "ns", "length from which a stretch of Python counts"),
}
REPLACES: Final = ("launch-bound",)

_REMEDY: Final = Remedy(
    "Move what does not depend on the batch out of the step, and let a background thread do what need not be done at "
    "once.",
    "from concurrent.futures import ThreadPoolExecutor\n"
    "background = ThreadPoolExecutor(max_workers=1)            # once, before the loop\n"
    "background.submit(write_record, step, loss.detach())      # in the step, instead of doing it there",
)


def check(view: View) -> RuleResult:
    """Sum the pieces that belong to long stretches of Python."""
    shortest = view.threshold(ID, THRESHOLDS, "stretch")
    pieces = _with_stretch(view.pieces.filter(pl.col("cause") == "python"))
    lengths = pieces.group_by("stretch").agg(ns=pl.col("duration_ns").sum()).filter(pl.col("ns") >= shortest)
    mine = pieces.join(lengths, on="stretch", how="semi", maintain_order="left")
    cost = int(mine["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    waits = " while the device waits" if view.device is not None else ""
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the step is Python code between operators{waits}",
        cost,
        basis="idle time of the device in long stretches of Python of the launching thread"
        if view.device is not None
        else "time of the main thread in long stretches of Python",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("share of the step in long stretches of Python", view.share(cost), "share", limit),
                Figure("such stretches per step", lengths.height / view.step_count, "count"),
                Figure("the longest of them", int(lengths["ns"].to_numpy().max()), "ns", shortest),
            ),
            view.longest(mine.with_columns(gap="stretch"), "Python between operators"),
        ),
        remedy=_REMEDY,
        where=view.locations(mine),
    )
    return RuleResult((finding,))


def _with_stretch(pieces: pl.DataFrame) -> pl.DataFrame:
    """The pieces with the number of their `stretch`: pieces that follow each other at once are of one."""
    pieces = pieces.sort("start_ns")
    starts = pieces["start_ns"].to_numpy()
    ends = starts + pieces["duration_ns"].to_numpy()
    begins = np.append(True, starts[1:] != ends[:-1])[: len(starts)]
    return pieces.with_columns(stretch=pl.Series(np.cumsum(begins), dtype=pl.Int64))
