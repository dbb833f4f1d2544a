"""# What it finds
DistributedDataParallel that searches for unused parameters in every step although all are used.

# Why it costs time
With `find_unused_parameters=True` every forward pass ends with a traversal of the loss's whole graph on the host, and
every backward pass with an extra reduction that exchanges which parameters the ranks used.

# How it is measured
The time after the last operator of DistributedDataParallel's forward pass, in which the graph is traversed; only if the
recording shows that the setting is on and that every parameter got a gradient.

# Known false positives
Models whose steps use different parts: one recorded step may use all parameters and another may not.

# What to do
Leave `find_unused_parameters` off; if the same parameters are unused in every step, set `static_graph=True`.

# Reference
PyTorch's documentation of DistributedDataParallel, find_unused_parameters and static_graph.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import scaled_pieces

_FORWARD: Final = "DistributedDataParallel.forward"


def check(view: View, limits: Limits) -> Answers:
    looking = [facts for facts in view.program.data_parallel if facts.find_unused_parameters]
    if not looking or any(facts.unused_parameters for facts in looking):
        return
    walks = _walks(view)
    cost = int(walks["duration_ns"].sum())
    yield Found(
        f"{view.share(cost):.1%} of the {view.period} goes to a search for unused parameters, although all are used",
        cost,
        basis="the end of each forward pass after its last operator, in which the graph is traversed",
        confidence="medium",
        figures=[
            view.count_per_step("searches", walks.height),
            Figure("parameters without a gradient", looking[0].unused_parameters or 0, "count"),
        ],
        intervals=view.longest(walks, "search"),
        remedy=Remedy(
            "Do not search for unused parameters.",
            "model = DistributedDataParallel(model)          # find_unused_parameters=False is the default\n"
            "from stepscope.remedies import DataParallelSettings      # also as a Lightning strategy\n"
            "model = DataParallelSettings(find_unused_parameters=False).ddp(model)",
            apply=("no-find-unused",),
        ),
        change=scaled_pieces(walks, 0.0),
    )


def _walks(view: View) -> pl.DataFrame:
    """The stretches at the end of each forward pass in which no operator runs: columns lane, start_ns, duration_ns."""
    tables = (view.trace.annotations, view.trace.operators)
    columns = ["lane", "start_ns", "duration_ns"]
    ends = pl.concat([table.filter(pl.col("name") == _FORWARD).select(columns) for table in tables])
    starts, lanes = view.trace.operators["start_ns"].to_numpy(), view.trace.operators["lane"].to_numpy()
    finished = starts + view.trace.operators["duration_ns"].to_numpy()
    names = (view.trace.operators["name"] != _FORWARD).to_numpy()
    rows = []
    for lane, start, duration in ends.unique().sort("start_ns").iter_rows():
        if not view.span.start_ns <= start < view.span.end_ns:
            continue
        inside = finished[names & (lanes == lane) & (starts >= start) & (finished <= start + duration)]
        last = int(np.max(inside, initial=start))
        rows.append((lane, last, start + duration - last))
    schema = {"lane": pl.Int32, "start_ns": pl.Int64, "duration_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


RULE: Final = Rule(
    id="unused-parameters",
    title="DistributedDataParallel searches for unused parameters in vain",
    thresholds={"share": Threshold(0.01, "share", "share of the {period} that the search costs")},
    check=check,
)
