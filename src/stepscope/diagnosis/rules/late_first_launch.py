"""# What it finds
A device that waits at the beginning of each step until the host launches its first work.

# Why it costs time
Whatever the host does before the first launch of a step (unpacking batches, building masks, bookkeeping, schedulers)
costs device time if the device has already finished the previous step. Nothing can hide it, because nothing has been
launched yet.

# How it is measured
Idle time of the device between a step's start and its first launch, while the launching thread was running Python or
dispatching, or recorded nothing. Loading data, logging, checkpoints, waiting and compiling have their own rules and do
not count, nor does idle time that `host-synchronisation` charges to a wait that made the host late. The trace does not
show how long the device had been idle before its first work; that step counts as much as the others. The saving is what
the step would lose if the host did all this after its last launch, while the device works.

# Known false positives
A step annotation that begins long before the program's own step. Steps whose device work an earlier step launched.

# What to do
Prepare the next step while the device works on this one: move the preparation behind the last launch, into the loader's
workers, or out of the loop.

# Reference
Intel Gaudi documentation, profiling: host preparation before the first operation of a step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules.between_iterations import OVERLAP
from stepscope.diagnosis.rules.host_synchronisation import charged_waits
from stepscope.whatif.changes import moved_host_time, together

_PREPARING: Final = ("python", "untraced", "dispatch", "graph_tracing", "step_marker")


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.complete_steps.is_empty():
        return
    pieces = _pieces(view)
    cost = int(pieces["duration_ns"].sum())
    if not limits.reached(cost):
        return
    steps = int(pieces["launch"].n_unique())
    yield Found(
        f"for {view.percent(cost)} of the step the device waits for its first launch, while the host prepares the step",
        cost,
        basis="idle time between each step's start and its first launch, without what waits before it explain",
        confidence="medium",
        figures=[Figure("steps that begin with waiting", steps, "count"), view.ns_per_step("waiting", cost)],
        intervals=view.longest(pieces, "before the first launch"),
        remedy=Remedy(
            "Prepare the next step while the device works on this one.",
            "batch = prepare(next(batches))            # before the loop\n"
            "for ...:\n"
            "    loss = step(batch)                    # launches the device's work\n"
            "    batch = prepare(next(batches))        # while the device works",
        ),
        where=view.locations(pieces),
        change=_moved_preparation(view),
    )


def _pieces(view: View) -> pl.DataFrame:
    """The idle pieces that end in a step's first launch, cut to that step."""
    firsts = _first_launches(view)
    mine = view.pieces.filter(pl.col("cause").is_in(_PREPARING) & pl.col("lane").is_not_null())
    mine = mine.join(firsts.unique("launch"), on="launch", how="inner")
    end = pl.col("start_ns") + pl.col("duration_ns")
    mine = mine.with_columns(
        start_ns=pl.max_horizontal("start_ns", "begin_ns"),
        duration_ns=(end - pl.max_horizontal("start_ns", "begin_ns")).clip(lower_bound=0),
    )
    return _uncharged(view, mine).filter(pl.col("duration_ns") > 0)


def _first_launches(view: View) -> pl.DataFrame:
    """Each step's first launch: columns launch, begin_ns and end_ns of the step."""
    launched = view.work.filter(pl.col("launch").is_not_null()).sort("launch_start_ns")
    begins = view.complete_steps["start_ns"].to_numpy()
    ends = begins + view.complete_steps["duration_ns"].to_numpy()
    times = launched["launch_start_ns"].to_numpy()
    first = np.searchsorted(times, begins)
    known = first < len(times)
    first, begins, ends = first[known], begins[known], ends[known]
    inside = times[first] < ends
    return pl.DataFrame(
        {"launch": launched["launch"].gather(first[inside]), "begin_ns": begins[inside], "end_ns": ends[inside]},
        schema={"launch": pl.UInt32, "begin_ns": pl.Int64, "end_ns": pl.Int64},
    )


def _moved_preparation(view: View) -> Change:
    """Move the host work before each step's first launch behind its last launch of a computation."""
    calls = view.trace.launches.with_row_index("launch").select("launch", "lane", "start_ns", "duration_ns")
    computing = view.work.filter((pl.col("kind") == "compute") & pl.col("launch").is_not_null())
    after = calls.join(computing, on="launch", how="semi").select(
        "lane", last_ns="start_ns", after_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    firsts = _first_launches(view).join(calls, on="launch", how="inner").sort("end_ns")
    firsts = firsts.join_asof(
        after.sort("last_ns"), left_on="end_ns", right_on="last_ns", by="lane", check_sortedness=False
    ).filter(pl.col("after_ns") > pl.col("start_ns"))
    changes = []
    for (lane,), mine in firsts.group_by("lane", maintain_order=True):
        pieces = view.activity.cut(int(str(lane)), mine["begin_ns"].to_numpy(), mine["start_ns"].to_numpy())
        pieces = pieces.filter(pl.col("cause").cast(pl.String).is_in(_PREPARING))
        lanes = np.full(pieces.height, lane, np.int32)
        moments = mine["after_ns"].gather(pieces["interval"])
        changes.append(moved_host_time(lanes, *(each.to_numpy() for each in (pieces["start"], pieces["end"], moments))))
    return together(*changes)


def _uncharged(view: View, pieces: pl.DataFrame) -> pl.DataFrame:
    """The pieces without the part charged to waits that made the host late."""
    waits = charged_waits(view).select(
        pl.col("launch").alias("trigger_launch"), charged=pl.col("charged_ns") / pl.col("late_ns")
    )
    joined = pieces.join(waits, on="trigger_launch", how="left", maintain_order="left")
    charged = pl.col("charged").fill_null(0.0)
    # The first step's wait began before the recording: assume that it waited for what the others wait for.
    first = pl.col("begin_ns") == pl.col("begin_ns").min()
    others = pl.col("duration_ns") * (~first)
    usual = (charged * others).sum() / others.sum()
    left = pl.col("duration_ns") * (1 - pl.when(first & (others.sum() > 0)).then(usual).otherwise(charged))
    return joined.with_columns(duration_ns=left.round().cast(pl.Int64)).drop("charged")


RULE: Final = Rule(
    id="late-first-launch",
    title="The device waits for the first launch of each step",
    thresholds={"share": Threshold(0.03, "share", "share of the {period} before its first launch")},
    check=check,
    replaces=("launch-bound", "python-in-step"),
    serving=OVERLAP,
)
