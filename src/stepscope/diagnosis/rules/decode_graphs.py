"""# What it finds
Decoding iterations of an engine that serves a model, or of a loop that generates, whose kernels are launched one by one
while the device waits for the launches: no graphs are used at all, or the batches of some iterations have none.

# Why it costs time
An iteration that decodes computes one token for each request. Its kernels are short, and each costs the host several
microseconds of Python and launching. A CUDA graph launches all of them at once. Engines capture graphs for some batch
sizes when they start and pad each batch to the next of them; a larger batch is launched kernel by kernel again.

# How it is measured
Idle time of the device before work that was launched late, as launch-bound counts it, inside those decoding iterations
that launch no graph. Iterations with both prompts and new tokens do not count, since their shapes differ each time.

# Known false positives
Recording slows the host: without the profiler, launches may just keep up. Some models and options cannot be captured,
such as attention kernels that read lengths on the host.

# What to do
Turn the engine's graphs on. Where some iterations have graphs and others do not, let it capture graphs for the batches
that occur. In a loop of your own, let the cache have a fixed size, so that each token is computed by the same kernels
on tensors of the same shapes, and capture that.

# Reference
vLLM, "CUDA graphs"; SGLang, "Server arguments" (--disable-cuda-graph, --cuda-graph-bs); Transformers, "Optimizing
inference" (static cache and torch.compile).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Rule, Threshold, View
from stepscope.diagnosis.rules.launch_bound import GRAPHS, WIDER_GRAPHS, late_pieces, on_launching_thread
from stepscope.whatif.changes import scaled_pieces


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or not view.serves:
        return
    decodes = view.begin_in_span(view.iteration_costs.filter(pl.col("phase") == "decode"))
    eager = decodes.filter(pl.col("graph_launches") == 0, pl.col("launches") > 0)
    if eager.is_empty():
        return
    mine = _inside(late_pieces(view), eager)
    cost = int(mine["duration_ns"].sum())
    if not limits.reached(cost):
        return
    graphed = decodes.filter(pl.col("graph_launches") > 0)
    launches = float(eager["launches"].mean() or 0)  # type: ignore[arg-type]
    figures = [
        Figure("decoding iterations without a graph", eager.height, "count"),
        Figure("decoding iterations", decodes.height, "count"),
        Figure("launches in such an iteration", round(launches), "count"),
        *_batches("without a graph", eager),
        *_batches("with a graph", graphed),
    ]
    number = "1 launch" if round(launches) == 1 else f"{round(launches):,} launches"
    waits = f"the device waits for {view.percent(cost)} of the {view.period}"
    if graphed.is_empty():
        title = f"tokens are decoded without graphs, by {number} in each iteration, for which {waits}"
    else:
        title = f"{eager.height:,} of {decodes.height:,} decoding iterations have no graph: for their launches {waits}"
    yield Found(
        title,
        cost,
        basis="idle time before work that the host launched late in decoding iterations without a graph",
        confidence="medium",
        figures=figures,
        intervals=view.longest(mine, "late launch"),
        remedy=(GRAPHS if graphed.is_empty() else WIDER_GRAPHS).remedy(view),
        where=view.locations(mine.filter(pl.col("slice") >= 0)),
        change=scaled_pieces(on_launching_thread(view, mine), 0.0),
        for_every_framework=True,
    )


def _inside(pieces: pl.DataFrame, iterations: pl.DataFrame) -> pl.DataFrame:
    """The pieces that begin in one of the iterations, or whose work was launched there."""
    spans = iterations.select(begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns")).sort("begin")
    found = pieces.sort("start_ns").join_asof(spans, left_on="start_ns", right_on="begin", strategy="backward")
    return found.filter(pl.col("start_ns") < pl.col("until")).drop("begin", "until")


def _batches(which: str, iterations: pl.DataFrame) -> list[Figure]:
    known = iterations["requests"].drop_nulls().to_list()
    if not known:
        return []
    fewest = Figure(f"fewest requests in one {which}", min(known), "count")
    return [fewest, Figure(f"most requests in one {which}", max(known), "count")]


RULE: Final = Rule(
    id="decode-graphs",
    title="Decoding iterations are not launched as graphs",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost to late launches of decoding")},
    check=check,
    replaces=("launch-bound",),
)
