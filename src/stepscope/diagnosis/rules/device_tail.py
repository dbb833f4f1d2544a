"""# What it finds
Steps whose device work begins or ends with copies, while nothing else runs.

# Why it costs time
At the end of a step the host has nothing more to launch, and the device copies results to the host; at its beginning
the device copies the batch before it can compute. Either could run beside the computation of the step before or after.

# How it is measured
In each step, the device's time from the end of its last computation to the end of the copies after it, if none of the
next step's work has begun, and from the first copy to the first computation if the work of the step before has ended.
Copies from pageable memory at the beginning are left to exposed-copy: before they can run beside anything they must
come from pinned memory.

# Known false positives
Results that the next step needs from the host.

# What to do
Copy on a queue of its own: the next batch while this step computes, the results while the next one does.

# Reference
Intel Gaudi documentation, profiling: long copies at the ends of a step; PyTorch, "CUDA streams".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Interval, Remedy, RuleResult, Threshold
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows
from stepscope.whatif.changes import scaled_work, together, without_waits_for_work

ID: Final = "device-tail"
TITLE: Final = "Steps begin or end with copies while the device computes nothing"
THRESHOLDS: Final = {"share": Threshold(0.03, "share", "share of the step in copies at its ends")}
REPLACES: Final = ("exposed-copy",)

_COPIES: Final = ("copy_in", "copy_out")


def check(view: View) -> RuleResult:
    """Measure the copies at both ends of each step."""
    if view.device is None or view.complete_steps.height < 2:
        return RuleResult()
    ends = _ends(view)
    cost = int(ends["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    rows = ends["row"].to_numpy().astype(np.int64)
    head = int(ends.filter(pl.col("is_head"))["duration_ns"].sum())
    where = "begins" if head * 2 > cost else "ends"
    finding = view.finding(
        ID,
        f"each step {where} with copies that nothing runs beside: {view.share(cost):.0%} of it",
        cost,
        basis="device time from the last computation to the end of the copies after it, and of copies before the first",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("share of the step in copies at its ends", view.share(cost), "share", limit),
                Figure("copies at the beginning per step", view.per_step(head), "ns"),
                Figure("copies at the end per step", view.per_step(cost - head), "ns"),
                Figure("bytes copied at the ends per step", int(ends["bytes"].sum()) // view.step_count, "bytes"),
            ),
            tuple(
                Interval(start, duration, "copies at the beginning" if is_head else "copies at the end")
                for start, duration, is_head in ends.sort("duration_ns", descending=True)
                .head(3)
                .select("start_ns", "duration_ns", "is_head")
                .iter_rows()
            ),
        ),
        remedy=_HEAD if where == "begins" else _TAIL,
        where=view.locations_of(_slices(view, ends["launch"]), np.maximum(ends["duration_ns"].to_numpy(), 1)),
        change=together(scaled_work(rows, 0.0), without_waits_for_work(rows)),
    )
    return RuleResult((finding,))


_TAIL: Final = Remedy(
    "Copy results to pinned memory on a queue of their own, and read them a step later.",
    "copying.wait_stream(torch.cuda.current_stream())\n"
    "with torch.cuda.stream(copying):                  # copying = torch.cuda.Stream(), once\n"
    "    host.copy_(result, non_blocking=True)         # host: pinned",
)
_HEAD: Final = Remedy(
    "Copy the next batch on a queue of its own while this one is computed.",
    "with torch.cuda.stream(copying):                  # copying = torch.cuda.Stream(), once\n"
    "    following = following.to(device, non_blocking=True)\n"
    "torch.cuda.current_stream().wait_stream(copying)  # before the next step uses it",
)


def _slices(view: View, launches: pl.Series) -> Rows:
    calls = launches.cast(pl.Int64).fill_null(-1).to_numpy()
    slices = view.activity.slices_of("launches")
    return np.where(calls >= 0, slices[np.maximum(calls, 0)], -1) if len(slices) else np.full(len(calls), -1, np.int64)


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
    head = head.filter(~pl.col("name").str.contains("(?i)pageable"))  # another queue would not help: exposed-copy tells
    tail = joined.filter((pl.col("start_ns") >= pl.col("last")) & (pl.col("end_ns") <= pl.col("after")))
    columns = ["row", "start_ns", "duration_ns", "bytes", "launch"]
    return pl.concat(
        [
            head.select(columns).with_columns(is_head=pl.lit(True)),
            tail.select(columns).with_columns(is_head=pl.lit(False)),
        ]
    )
