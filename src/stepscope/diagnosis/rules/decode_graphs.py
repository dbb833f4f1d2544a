"""# What it finds
Decoding iterations of an engine that serves a model, or of a loop that generates, whose kernels are launched one by one
while the device waits for the launches: no graphs are used at all, or the batches of some iterations have none. And
graphs that are much larger than the batches that they compute.

# Why it costs time
An iteration that decodes computes one token for each request. Its kernels are short, and each costs the host several
microseconds of Python and launching. A CUDA graph launches all of them at once. Engines capture graphs for some batch
sizes when they start and pad each batch to the next of them, whose rows are all computed; a larger batch is launched
kernel by kernel again.

# How it is measured
Idle time of the device before work that was launched late, as launch-bound counts it, inside those decoding iterations
that launch no graph. Iterations with both prompts and new tokens do not count, since their shapes differ each time.

The size of an iteration's graph is the smallest of those whose capture was recorded that holds its batch, or else at
least the largest batch of all iterations whose graphs launch the same kernels on the same grids. How much longer a
graph takes for each further row comes from graphs of different sizes; with one size, nothing is counted as saved.

# Known false positives
Recording slows the host: without the profiler, launches may just keep up. Some models and options cannot be captured,
such as attention kernels that read lengths on the host.

# What to do
Turn the engine's graphs on. Where some iterations have graphs and others do not, let it capture graphs for the batches
that occur, with sizes that are close to each other. In a loop of your own, let the cache have a fixed size, so that
each token is computed by the same kernels on tensors of the same shapes, and capture that.

# Reference
vLLM, "CUDA graphs"; SGLang, "Server arguments" (--disable-cuda-graph, --cuda-graph-bs); Transformers, "Optimizing
inference" (static cache and torch.compile).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.serving import work_launched_in
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View
from stepscope.diagnosis.rules.launch_bound import GRAPHS, WIDER_GRAPHS, late_pieces, on_launching_thread
from stepscope.whatif.changes import scaled_pieces, scaled_work

_NEARER: Final = InServing(
    "Let the engine capture graphs for more sizes, close to the batches that occur.",
    "graph_sizes",
    "sizes = [1, 2, 4, *range(8, 257, 8)]      # of the batches that are captured",
    needs_device=True,
)


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or not view.serves:
        return
    decodes = view.begin_in_span(view.iteration_costs.filter(pl.col("phase") == "decode"))
    yield from _without_graph(view, limits, decodes)
    yield from _padded(view, limits, decodes.filter(pl.col("graph_launches") > 0))


def _without_graph(view: View, limits: Limits, decodes: pl.DataFrame) -> Answers:
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
        *_largest_captured(view),
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


def _padded(view: View, limits: Limits, graphed: pl.DataFrame) -> Answers:
    rows = pl.col("tokens" if view.engine.captures == "tokens" else "requests")
    graphed = graphed.with_columns(rows=rows).filter(pl.col("rows") > 0)
    if graphed.is_empty():
        return
    work = work_launched_in(view.trace, graphed).filter("in_graph")
    graphed = _with_sizes(view, graphed, work)
    held, padding = int(graphed["size"].sum()), int((graphed["size"] - graphed["rows"]).sum())
    if not padding or padding / held < limits["padding"]:
        return
    times = work.group_by("iteration").agg(ns=pl.col("duration_ns").sum())
    graphed = graphed.with_row_index("iteration").join(times, on="iteration")
    each = _time_of_a_row(graphed)
    worst = graphed.sort(pl.col("size") - pl.col("rows"), "start_ns", descending=[True, False]).row(0, named=True)
    are_known = bool(_captured(view))
    title = (
        f"{padding / held:.0%} of the rows that decoding computes are padding to the sizes of captured graphs, such as "
        f"{worst['rows']:,} rows in a graph for {'' if are_known else 'at least '}{worst['size']:,}"
    )
    figures = [
        limits.figure("padding", padding / held),
        Figure("decoding iterations with a graph", graphed.height, "count"),
        Figure("rows of the batch with most padding", worst["rows"], "count"),
        Figure(f"rows of its graph{'' if are_known else ', at least'}", worst["size"], "count"),
        *_largest_captured(view),
    ]
    if each is None:
        basis = "no saving: with graphs of one size, the trace does not show how long a row takes"
        yield Found(title, 0, basis, "high", _NEARER.remedy(view), figures, severity="note", for_every_framework=True)
        return
    less = pl.DataFrame({
        "iteration": graphed["iteration"],
        "left": (1 - (graphed["size"] - graphed["rows"]) * each / graphed["ns"]).clip(0.0, 1.0),
    })  # fmt: skip
    work = work.join(less, on="iteration")
    yield Found(
        title,
        float((work["duration_ns"] * (1 - work["left"])).sum()),
        basis="time of padded rows in graphs, by how much longer larger graphs take",
        confidence="low",
        share_at=1,
        figures=[*figures, Figure("time that a graph's further row takes", round(each), "ns")],
        remedy=_NEARER.remedy(view),
        change=scaled_work(work["row"].to_numpy().astype(np.int64), work["left"].to_numpy()),
        for_every_framework=True,
    )


def _captured(view: View) -> tuple[int, ...]:
    return view.serving.captured_sizes if view.serving is not None else ()


def _largest_captured(view: View) -> list[Figure]:
    sizes = _captured(view)
    return [Figure("largest size that was captured", max(sizes), "count")] if sizes else []


def _with_sizes(view: View, graphed: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Iterations with the `size` of their graph, as far as it is known: never less than their rows."""
    sizes = _captured(view)
    if sizes:
        place = np.searchsorted(sizes, graphed["rows"].to_numpy())
        nearest = np.append(sizes, 0)[place]
        return graphed.with_columns(size=pl.max_horizontal("rows", pl.Series(nearest)))
    kernels = work.sort("iteration", "row").group_by("iteration", maintain_order=True)
    alike = kernels.agg(
        graph=pl.struct("name", "grid").hash().implode().list.eval(pl.element()).hash().first(),
        has_grids=pl.col("grid").is_not_null().all(),
    )
    graphs = graphed.with_row_index("iteration").join(alike, on="iteration", how="left").sort("iteration")
    if graphs["graph"].n_unique() < 2 or not graphs["has_grids"].all():  # nothing shows that grids tell the sizes
        return graphed.with_columns(size=pl.col("rows"))
    return graphed.with_columns(size=graphs.select(pl.col("rows").max().over("graph")).to_series())


def _time_of_a_row(graphed: pl.DataFrame) -> float | None:
    """How much longer a graph takes for each further row, in ns; None with graphs of one size."""
    times = graphed.group_by("size").agg(pl.col("ns").median())
    if times.height < 2:
        return None
    return max(float(np.polyfit(times["size"].to_numpy(), times["ns"].to_numpy(), 1)[0]), 0.0)


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
    title="Decoding iterations are not launched as graphs, or in too large ones",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} lost to late launches of decoding, or to padded rows"),
        "padding": Threshold(0.25, "share", "share of the rows in graphs of decoding that are padding"),
    },
    check=check,
    replaces=("launch-bound",),
)
