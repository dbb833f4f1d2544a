"""# What it finds
Steps whose device work begins or ends with copies that run alone.

# Why it costs time
At the end of a step the host has nothing left to launch, and the device copies results to the host; at the beginning of
a step the device copies the batch before it can compute. Both copies could overlap with the computation of the
neighbouring step.

# How it is measured
In each step, the device's time from the end of its last computation to the end of the copies after it, if none of the
next step's work has begun, and from the first copy to the first computation if the work of the step before has ended.
Copies from pageable memory at the beginning are left to exposed-copy: they cannot overlap with anything until they come
from pinned memory.

# Known false positives
Results that the next step needs from the host.

# What to do
Copy on a separate queue: the next batch while this step computes, the results while the next step computes.

# Reference
Intel Gaudi documentation, profiling: long copies at the ends of a step; PyTorch, "CUDA streams".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_work, together, without_waits_for_work

_COPIES: Final = ("copy_in", "copy_out")


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.complete_steps.height < 2:
        return
    ends = _ends(view)
    cost = int(ends["duration_ns"].sum())
    rows = rows_of(ends)
    head = int(ends.filter(pl.col("is_head"))["duration_ns"].sum())
    longest = ends.sort("duration_ns", descending=True).head(3)
    at_the_head = head * 2 > cost
    held = ends.filter(pl.col("is_head") == at_the_head)["step"].n_unique()
    is_each = held >= view.step_count - at_the_head  # what ran before the first step is unknown
    which = "each step" if is_each else f"{held} of {view.step_count} steps"
    where = ("begin" if at_the_head else "end") + ("s" if is_each or held == 1 else "")
    yield Found(
        f"{which} {where} with copies that nothing overlaps: {view.percent(cost)} of the {view.period}",
        cost,
        basis="device time from the last computation to the end of the copies after it, and of copies before the first",
        confidence="medium",
        figures=[
            Figure("steps with copies there", held, "count"),
            view.ns_per_step("copies at the beginning", head),
            view.ns_per_step("copies at the end", cost - head),
            *view.bytes_of("bytes copied at the ends", ends["bytes"]),
        ],
        intervals=[
            Interval(start, duration, "copies at the beginning" if is_head else "copies at the end")
            for start, duration, is_head in longest.select("start_ns", "duration_ns", "is_head").iter_rows()
        ],
        remedy=_remedy(view, at_the_end=not at_the_head),
        where=view.locations_of(view.slices_of_launches(ends["launch"]), ends["duration_ns"].to_numpy()),
        change=together(scaled_work(rows, 0.0), without_waits_for_work(rows)),
    )


def _remedy(view: View, *, at_the_end: bool) -> Remedy:
    on_a_queue = f"with {view.on_stream('copying')}:     # copying = {view.torch_stream}(), once\n"
    if at_the_end:
        return Remedy(
            "Copy results to pinned memory on a queue of their own, and read them a step later.",
            f"copying.wait_stream({view.torch_device}.current_stream())\n{on_a_queue}"
            "    host.copy_(result, non_blocking=True)         # host: pinned",
        )
    return Remedy(
        "Copy the next batch on a queue of its own while this one is computed.",
        f"{on_a_queue}    following = following.to(device, non_blocking=True)\n"
        f"{view.torch_device}.current_stream().wait_stream(copying)  # before the next step uses it",
    )


def _ends(view: View) -> pl.DataFrame:
    """Copies at both ends of the steps: columns row, start_ns, duration_ns, bytes, launch, is_head."""
    begins = view.complete_steps["start_ns"].to_numpy()
    time = view.work.select(time=pl.coalesce("launch_start_ns", "start_ns"))["time"].to_numpy()
    work = view.work.with_columns(
        step=pl.Series(np.searchsorted(begins, time, side="right")), end_ns=pl.col("start_ns") + pl.col("duration_ns")
    ).filter(~pl.col("kind").is_in(["set"]))
    computing = ~pl.col("kind").is_in(_COPIES)
    bounds = work.group_by("step").agg(
        first=pl.col("start_ns").filter(computing).min(),
        last=pl.col("end_ns").filter(computing).max(),
        begin=pl.col("start_ns").min(),
        end=pl.col("end_ns").max(),
    )
    bounds = bounds.sort("step").with_columns(
        before=pl.col("end").shift(1), after=pl.col("begin").shift(-1).fill_null(2**62)
    )
    joined = work.filter(pl.col("kind").is_in(_COPIES)).join(bounds.drop_nulls("first"), on="step")
    head = joined.filter((pl.col("end_ns") <= pl.col("first")) & (pl.col("start_ns") >= pl.col("before")))
    head = head.filter(
        ~pl.col("name").str.contains("(?i)pageable")
    )  # a separate queue would not help; exposed-copy reports these
    tail = joined.filter((pl.col("start_ns") >= pl.col("last")) & (pl.col("end_ns") <= pl.col("after")))
    columns = ("row", "step", "start_ns", "duration_ns", "bytes", "launch")
    return pl.concat([each.select(*columns, is_head=pl.lit(each is head)) for each in (head, tail)])


RULE: Final = Rule(
    id="device-tail",
    title="Steps begin or end with copies while the device computes nothing",
    thresholds={"share": Threshold(0.03, "share", "share of the {period} in copies at its ends")},
    check=check,
    replaces=("exposed-copy",),
    remedies={
        "jax": Remedy(
            "Copy while something is computed: put the next batch on the device before this step ends, and read "
            "results a step later.",
            "following = jax.device_put(next(batches))     # returns at once: right after this step was called\n"
            "result.copy_to_host_async()                   # read it after the next step was called",
        ),
    },
)
