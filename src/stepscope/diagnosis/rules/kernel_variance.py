"""# What it finds
A kernel that does the same work every time but sometimes takes several times as long.

# Why it costs time
Work of the same size should take the same time. If it does not, something slows the device: another process or
container on it, another queue's kernels, a clock that drops because of heat or power, memory that is paged in from the
host on access, or values that make the algorithm take longer.

# How it is measured
Kernels are grouped by name, grid, block and operator shapes, and in graphs by their place in the graph. For kernels
that ran often enough, the standard deviation is compared with the mean. The saving is their time above the median,
where the device determines the step's length.

# Known false positives
Kernels whose work depends on values: sorting, sparse lookups, sampling, mixtures of experts. Kernels that wait for
other devices are communication and are not considered.

# What to do
Check who else uses the device and what its clocks do while the program runs, then look at other queues in the timeline.

# Reference
TraceLens reports kernel variance for more than 10 calls, coefficient of variation above 1, at least 5 % of the time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._device import alone_share, decides
from stepscope.whatif.changes import scaled_work

_SAME: Final = ("name", "grid", "block", "input_shapes", "place")
_MOST: Final = 3


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.work.is_empty():
        return
    work = _alike(view)
    median = pl.col("duration_ns").median().over(_SAME)
    excess = (pl.col("duration_ns") - median).clip(lower_bound=0) * pl.col("decides") * alone_share(view)
    work = work.with_columns(excess_ns=excess)
    groups = (
        work.group_by(_SAME)
        .agg(
            calls=pl.len(),
            total=pl.col("duration_ns").sum(),
            excess=pl.col("excess_ns").sum(),
            variation=pl.col("duration_ns").std(ddof=0) / pl.col("duration_ns").mean().clip(lower_bound=1),
        )
        .filter(
            (pl.col("calls") > limits["calls"])
            & (pl.col("variation") > limits["variation"])
            & (pl.col("total") >= limits["time"] * view.length_ns)
        )
        .sort(["excess", *_SAME], descending=[True, *[False] * len(_SAME)])
        .head(_MOST)
    )
    for group in groups.iter_slices(1):
        yield _found(view, limits, work.join(group, on=_SAME, nulls_equal=True), float(group["variation"][0]))


def _alike(view: View) -> pl.DataFrame:
    """Computation with the keys that identify equal work: its operator's shapes, or its place in a graph."""
    shapes = view.trace.operators.select(input_shapes="input_shapes").with_row_index("operator")
    launching = view.trace.launches.select(operator="operator", launch_kind="kind").with_row_index("launch")
    return (
        view.work.with_columns(decides=pl.Series(decides(view)))
        .with_columns(place=pl.when(pl.col("launch").is_not_null()).then(pl.int_range(pl.len()).over("launch")))
        .filter(pl.col("kind") == "compute")
        .join(launching, on="launch", how="left", maintain_order="left")
        .join(shapes, on="operator", how="left", maintain_order="left")
        .filter(pl.col("input_shapes").is_not_null() | (pl.col("launch_kind") == "graph_launch"))
    )


def _found(view: View, limits: Limits, work: pl.DataFrame, variation: float) -> Found:
    duration = work["duration_ns"].to_numpy()
    excess, median = float(work["excess_ns"].sum()), float(np.median(duration))
    slow = work.sort(["duration_ns", "start_ns"], descending=[True, False])
    name = work["name"][0]
    return Found(
        f"a kernel that usually takes {median / 1e3:,.0f} us takes up to {duration.max() / 1e3:,.0f} us for the same "
        "work",
        excess,
        basis=f"what the kernel took above its median, where the device determines the {view.period}'s length",
        confidence="medium" if work.height >= 100 else "low",
        share_at=1,
        figures=[
            Figure("standard deviation over mean", variation, "", limits["variation"]),
            Figure("median time", median, "ns"),
            Figure("longest time", int(duration.max()), "ns"),
            Figure("calls", work.height, "count", limits["calls"]),
        ],
        intervals=view.longest(slow.head(3).select("start_ns", "duration_ns"), name[:80]),
        remedy=Remedy(
            "See who else uses the device and whether its clock drops while the program runs.",
            "nvidia-smi --query-compute-apps=pid,name --format=csv\n"
            "nvidia-smi --query-gpu=clocks.sm,clocks_throttle_reasons.active --format=csv --loop=1",
        ),
        where=view.at_launches(work),
        change=scaled_work(rows_of(work), np.minimum(median / np.maximum(duration, 1), 1.0)),
    )


RULE: Final = Rule(
    id="kernel-variance",
    title="The same kernel takes very different times",
    thresholds={
        "variation": Threshold(1.0, "count", "standard deviation over the mean above which a kernel varies"),
        "calls": Threshold(10, "count", "calls above which a kernel is judged"),
        "time": Threshold(0.05, "share", "share of the {period} that the kernel takes"),
        "share": Threshold(0.02, "share", "share of the {period} above the median"),
    },
    check=check,
)
