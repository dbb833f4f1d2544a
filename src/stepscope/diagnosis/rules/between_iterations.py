"""# What it finds
Time between the iterations of an engine that serves, in which the device has nothing to do although requests are being
decoded: the host schedules, samples, turns tokens into text and sends them.

# Why it costs time
Each token of each request waits for it. An iteration that decodes takes the device a few milliseconds, so a host that
needs two between iterations slows every token by as much, however fast the kernels are.

# How it is measured
Idle time of the device (without a device, the working time of the main thread) from the end of an iteration's range to
the start of the next one, if that decodes; before a prefill the engine may wait for requests, which is no fault.

# Known false positives
Recording slows Python. Engines that run in several processes do part of this in a process that the trace lacks: the
time is the same, but its functions are not shown.

# What to do
Let the engine schedule the next iteration while the device still works on this one. Keep what handles tokens (stop
words, text, logging, streaming) out of the thread that launches work.

# Reference
vLLM, "Async scheduling"; SGLang, "Zero-overhead batch scheduler"; TensorRT-LLM, "Overlap scheduler".
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.serving import outermost_of
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View
from stepscope.diagnosis.rules.launch_bound import on_launching_thread
from stepscope.whatif.changes import scaled_pieces

_NOT_WORKING: Final = ("once", "synchronisation", "untraced", "unknown")
"""Causes that do not show that the host works for the requests."""
_MOST_FUNCTIONS: Final = 3
OVERLAP: Final = InServing(
    "Let the host schedule the next iteration and handle the tokens of the last one while the device works.",
    "overlap",
    "tokens.append(token)      # stays on the device; look at it and decode it to text some iterations later",
    needs_device=True,
)


def check(view: View, limits: Limits) -> Answers:
    if not view.serves:
        return
    gaps = _gaps(view)
    mine = view.pieces.sort("start_ns").join_asof(gaps, left_on="start_ns", right_on="begin", strategy="backward")
    mine = mine.filter(pl.col("start_ns") < pl.col("until"))
    mine = mine.filter(~pl.col("cause").is_in(_NOT_WORKING if view.device is None else _NOT_WORKING[:1]))
    cost = int(mine["duration_ns"].sum())
    if not limits.reached(cost):
        return
    each = cost // gaps.height
    functions = _functions(view, gaps)
    most = f", most of it in {functions[0][0]}()" if functions and functions[0][1] > cost / 2 else ""
    who = "the device waits" if view.device is not None else "the host works"
    yield Found(
        f"between iterations {who} for {view.percent(cost)} of the {view.period}{most}",
        cost,
        basis="idle time of the device between an iteration's end and the next one that decodes"
        if view.device is not None
        else "working time of the main thread between an iteration's end and the next one that decodes",
        confidence="medium",
        figures=[
            Figure("iterations that follow another and decode", gaps.height, "count"),
            Figure("time lost before each of them", each, "ns"),
            *(view.ns_per_step(f"in {function}() there", ns) for function, ns in functions),
        ],
        intervals=view.longest(mine, "between iterations"),
        remedy=OVERLAP.remedy(view),
        where=view.locations(mine),
        change=scaled_pieces(on_launching_thread(view, mine), 0.0),
        for_every_framework=True,
    )


def _gaps(view: View) -> pl.DataFrame:
    """From the end of each iteration in the span to the start of the next one that decodes: columns begin, until."""
    rows = view.begin_in_span(view.iterations).sort("start_ns")
    ends = (pl.col("start_ns") + pl.col("duration_ns")).shift(1)
    gaps = rows.select(begin=ends, until="start_ns", decodes=pl.col("phase").is_in(["decode", "mixed"]))
    return gaps.filter("decodes", pl.col("begin") < pl.col("until")).select("begin", "until")


def _functions(view: View, gaps: pl.DataFrame) -> list[tuple[str, int]]:
    """The outermost functions that run in the gaps on the iterations' thread, with their time, longest first."""
    frames = view.trace.frames.filter(pl.col("lane") == view.iterations["lane"][0], pl.col("function").is_not_null())
    inside = frames.sort("start_ns").join_asof(gaps, left_on="start_ns", right_on="begin", strategy="backward")
    inside = outermost_of(inside.filter(pl.col("start_ns") < pl.col("until")))
    ends = pl.min_horizontal(pl.col("start_ns") + pl.col("duration_ns"), "until")
    times = inside.group_by("function").agg(ns=(ends - pl.col("start_ns")).sum())
    return times.sort("ns", "function", descending=[True, False]).head(_MOST_FUNCTIONS).rows()


RULE: Final = Rule(
    id="between-iterations",
    title="The device waits between the engine's iterations",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost between iterations")},
    check=check,
    replaces=("launch-bound", "python-in-step", "host-synchronisation"),
)
