"""# What it finds
Ranks that wait in collectives for a rank that arrives late.

# Why it costs time
A collective ends only after the last rank has arrived. If one rank is slower, because of its data, host or device, all
others wait for it in every step, and their traces show the wait as communication.

# How it is measured
With several ranks' traces: exchanges are matched by process group and order, and clocks are aligned by their ends,
which nearly coincide. A rank is compared with its peers, whose exchanges in a step are the same. Its own time between
two exchanges counts if it is longer than theirs by more than 2 % of a step and than noise explains: 6 deviations of
what varies from step to step. Where it left the exchange before late, the wait begins there, and so on back to the
rank that held the first one up. The cost is how much later the last rank arrives than the one before it, added up over
all that it holds up, as far as they have nothing else to do. Where several ranks come late, it is the mean wait of all
ranks for the last one: what a step would save if the same work were spread evenly. What a rank did longer than its
peers is the cause: waiting, work of its host, or of its device: on the same kernels, which shows a slower device, on
larger pieces, or on the load of a larger all-to-all. Slow ranks of one machine (by host names, else the devices that a
trace says it has), or at the same place of each (rail), are told as such if chance would hardly pick them, at most 1
time in 20. What a rank brought into the recording, since it began the recorded steps later, is told apart: no trace
shows why. With one rank's trace: without waits, collectives of one kind and size would take as long as the fastest of
them; the cost is the time beyond that, as far as it is exposed.

# Known false positives
In a single trace, a network that others use from time to time looks the same. Pipeline stages wait for each other by
design.

# What to do
Give every rank the same amount of work, and look in the late rank's own trace for what delays it.

# Reference
HolisticTraceAnalysis, stragglers; TraceML names a rank that costs 10 % of the step or more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import collectives
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_work

_ALIKE: Final = 4
"""Fewest collectives of one kind and size whose fastest shows the time without waits."""
_FEWEST_STEPS: Final = 2


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.step_count < _FEWEST_STEPS:
        return
    found = collectives(view.trace, device=view.device, window=view.window).filter(
        (pl.col("kind") != "send_receive") & pl.col("bytes").is_not_null()
    )
    alike = found.with_columns(
        alone=pl.col("duration_ns").min().over("kind", "group", "bytes"),
        times=pl.len().over("kind", "group", "bytes"),
    ).filter(pl.col("times") >= _ALIKE)
    longer = alike.with_columns(waiting=pl.col("duration_ns") - pl.col("alone"))
    total = int(alike["duration_ns"].sum())
    waiting = int(longer["waiting"].sum())
    exposed = view.exposed_ns(("communication",))
    saved = min(waiting, exposed * waiting // max(total, 1))
    yield Found(
        f"for {view.percent(saved)} of the {view.period} this rank waits in collectives for others that come later",
        saved,
        basis="what collectives take beyond the fastest of the same kind and size, as far as nothing covers it",
        confidence="low",
        figures=[
            view.count_per_step("collectives that were compared", alike.height),
            Figure(f"their time {view.per}", total // view.step_count, "ns"),
            Figure("the same if each took as long as the fastest", (total - waiting) // view.step_count, "ns"),
        ],
        intervals=view.longest(longer.sort("waiting", descending=True).head(3), "collective"),
        remedy=Remedy(
            "Record the same steps on all ranks and diagnose them together: this names the late rank and the reason.",
            "stepscope diagnose RUN                  # a folder with every rank's trace",
        ),
        change=scaled_work(
            rows_of(longer), longer["alone"].to_numpy() / np.maximum(longer["duration_ns"].to_numpy(), 1)
        ),
    )


RULE: Final = Rule(
    id="late-rank",
    title="Ranks wait for one that comes late",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} that ranks wait for the last one"),
        "times": Threshold(0.6, "share", "share of the waiting that one rank must cause to be named"),
    },
    check=check,
    needs=("messages",),
    replaces=("exposed-communication",),
)
