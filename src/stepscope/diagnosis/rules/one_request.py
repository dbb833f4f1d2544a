"""# What it finds
A loop that generates for one request after the other: each prompt is computed and decoded to its end before the next
one begins.

# Why it costs time
To decode a token, the device reads all weights of the model, and the host launches all of its kernels. For a batch of
requests it does so once for all of them, so that several take hardly longer than one.

# How it is measured
Iterations of at least two generations, each with one request, that follow each other. The time to decode in all of them
is divided by the number of generations, at most by eight: as if they were decoded together, and an iteration took as
long as now. An assumption, good as long as reading the weights or launching kernels takes most of an iteration.

# Known false positives
A program that answers one user at a time, who waits for each answer before asking again. Engines that serve are left
out: their batches depend on the requests that arrive.

# What to do
Give the loop several prompts at once, padded on the left to one length where they differ, or let a serving engine form
the batches.

# Reference
Pope et al., "Efficiently Scaling Transformer Inference" (2022): the cost of a token by batch size.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View

_MOST: Final = 8
"""Most generations that are taken to be decoded together in the time of one."""
_TOGETHER: Final = InServing(
    "Generate for several prompts at once.",
    "batch",
    "tokens = pad_on_the_left(prompts)      # (requests, longest prompt), with a mask\n"
    "for _ in range(new_tokens):\n    ...                                # each pass adds a token to every request",
)


def check(view: View, limits: Limits) -> Answers:
    if not view.serves or view.engine.ranges or view.engine.reserves:
        return
    rows = view.begin_in_span(view.iterations).sort("start_ns")
    rows = rows.with_columns(generation=(pl.col("phase") == "prefill").fill_null(False).cum_sum())
    rows = rows.filter(pl.col("generation") > 0)
    if rows.is_empty() or not (rows["requests"] == 1).all() or rows["requests"].null_count():
        return
    decodes = rows.filter(pl.col("phase") == "decode")
    count = decodes["generation"].n_unique()
    if count < 2:
        return
    total = int(decodes["duration_ns"].sum())
    starts = rows.group_by("generation").agg(pl.col("start_ns").min(), ns=pl.col("duration_ns").sum())
    yield Found(
        f"{count:,} generations of one request each follow one another: decoding takes {view.percent(total)} of the "
        f"{view.period}",
        total * (1 - 1 / min(count, _MOST)),
        basis="time to decode, but for one in so many generations that a batch decodes together; an assumption",
        confidence="low",
        figures=[
            Figure("generations", count, "count"),
            view.share_figure("in decoding", total),
            Figure("tokens decoded one by one", decodes.height, "count"),
            Figure("time of such a token", total // decodes.height, "ns"),
        ],
        intervals=[
            Interval(start, ns, "one generation")
            for start, ns in starts.sort("start_ns").head(3).select("start_ns", "ns").iter_rows()
        ],
        remedy=_TOGETHER.remedy(view),
        where=view.locations(_with_phase(view, decodes)),
        for_every_framework=True,
    )


def _with_phase(view: View, decodes: pl.DataFrame) -> pl.DataFrame:
    """The host's pieces inside these iterations."""
    spans = decodes.select(begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns")).sort("begin")
    pieces = view.host_pieces.sort("start_ns")
    found = pieces.join_asof(spans, left_on="start_ns", right_on="begin", strategy="backward")
    return found.filter(pl.col("start_ns") < pl.col("until"))


RULE: Final = Rule(
    id="one-request",
    title="Requests are generated one after the other",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} that a batch would save")},
    check=check,
)
