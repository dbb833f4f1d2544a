"""# What it finds
Problems with the recording itself, and the questions it therefore cannot answer.

# Why it costs time
It costs no time. But a trace that lost events, was truncated, or lacks stacks or shapes answers some questions wrongly
or not at all, and it is better to know which.

# How it is measured
The reader's warnings; the profiler's own work; device work without a launch; missing steps, stacks and shapes.

# Known false positives
Inference servers have no steps.

# What to do
Each unanswered question says how to record a trace that answers it.

# Reference
nsys-ai warns of profiler overhead of 5 % or more; PyTorch's trace validator (2.14) for lost and reordered events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import polars as pl

from stepscope.analysis.captured import graph_use
from stepscope.diagnosis.finding import NotAnswered
from stepscope.diagnosis.parts import HOST, LAUNCHES, PARTS, PROFILE, how_to_record, missing
from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import without_cause


def check(view: View, limits: Limits) -> Answers:
    if view.trace.metadata.format == "torch_snapshot":  # a snapshot shows only memory, and all of it
        return
    yield from _overhead(view)
    yield from _missing_parts(view)
    yield from _missing_events(view, limits)


def _overhead(view: View) -> Iterator[Found]:
    pieces = view.pieces_of("profiler_overhead")
    cost = int(pieces["duration_ns"].sum())
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to the profiler itself, and vanishes without it",
        cost,
        basis="time the profiler recorded of its own work",
        confidence="medium",
        limit="overhead",
        remedy=Remedy("Record without stacks, shapes and memory to see the step as it is.", PROFILE.format("")),
        change=without_cause("profiler_overhead"),
    )


def _missing_parts(view: View) -> Iterator[NotAnswered]:
    trace = view.trace
    cut = next((warning for warning in trace.warnings if warning.kind in ("truncated", "compressed_data")), None)
    if cut is not None:
        yield NotAnswered(
            "What was in the missing part of the file"
            + (", such as the work of a device?" if view.device is None else "?"),
            cut.detail,
            "copy the file again, or let the program end before the trace is taken",
        )
    if view.summary.source != "none" and view.complete_steps.is_empty():
        yield NotAnswered(
            "How long is a step?",
            "no complete step is inside the window that was read",
            "choose whole steps: --steps FIRST:LAST",
        )
    for name in missing(view):
        part = PARTS[name]
        yield NotAnswered(part.question, part.why, part.how_for(trace.metadata.format, view.framework))


def _missing_events(view: View, limits: Limits) -> Iterator[NotAnswered]:
    if view.device is None:
        yield from _silent_host(view, limits)
        return
    work = view.trace.device_work.filter(pl.col("device") == pl.lit(view.device, pl.String))
    unlaunched = work["launch"].null_count() / work.height
    if unlaunched > limits["unlaunched"]:
        yield NotAnswered(
            "Which code launched all of the device's work?",
            f"{unlaunched:.0%} of the device's work has no launch in the trace: it was launched before the "
            "recording began, or launches were not recorded",
            how_to_record(LAUNCHES, view.trace.metadata.format, view.framework),
        )
    yield from _graphs(view, limits)
    unknown = int(view.pieces_of("unknown", "untraced")["duration_ns"].sum())
    if view.share(unknown) > limits["unknown"]:
        yield NotAnswered(
            f"Why is the device idle for {view.percent(unknown)} of the {view.period} without a visible reason?",
            "the host threads recorded nothing then, or the device waited for something outside the trace",
            how_to_record(HOST, view.trace.metadata.format, view.framework),
        )


def _graphs(view: View, limits: Limits) -> Iterator[NotAnswered]:
    """What the recording does not say about graphs: the code of their kernels, or that they ran at all."""
    use = graph_use(view.trace)
    if use is None:
        return
    if use.unrecorded_ns:
        yield NotAnswered(
            "Was the device busy after the launches of graphs?",
            f"the profiler recorded no kernel of {use.unrecorded:,} of {use.launches:,} launches of graphs: "
            f"{use.unrecorded_ns / 1e6:,.3g} ms after them count as unknown, since the device may have worked",
            "record the kernels inside graphs: with a newer driver, CUPTI or rocprofiler, or fewer steps",
        )
    untied_ns = use.kernel_ns - use.tied_ns
    total_ns = int(view.trace.device_work["duration_ns"].sum())
    if untied_ns > limits["unlaunched"] * total_ns:
        yield NotAnswered(
            "Which operators, modules and lines do the kernels in graphs belong to?",
            f"{untied_ns / total_ns:.0%} of the device's work was launched by graphs, and nothing in the trace tells "
            "where it was captured",
            "record the capture of the graphs too, with stacks and shapes, and give its trace: "
            "stepscope diagnose TRACE --capture-trace CAPTURE",
        )


def _silent_host(view: View, limits: Limits) -> Iterator[NotAnswered]:
    """The question of what the main thread did while it recorded nothing, in a trace without a device."""
    silent = int(view.pieces_of("untraced")["duration_ns"].sum())
    if view.share(silent) > limits["untraced"]:
        yield NotAnswered(
            f"What did the main thread do for {view.percent(silent)} of the time?",
            "nothing was recorded on it then: it slept, waited, or ran what this recording does not show",
            how_to_record(HOST, view.trace.metadata.format, view.framework),
        )


RULE: Final = Rule(
    id="trace-health",
    title="What the recording cannot show",
    thresholds={
        "overhead": Threshold(0.05, "share", "share of the {period} lost to the profiler"),
        "unlaunched": Threshold(0.05, "share", "share of the device's work whose launch is missing"),
        "unknown": Threshold(0.05, "share", "share of the {period} idle for a reason the trace does not show"),
        "untraced": Threshold(0.2, "share", "share of the {period} in which a host without a device recorded nothing"),
    },
    check=check,
    remedies={
        "jax": Remedy(
            "Record without Python's frames to see the step as it is.",
            "options = jax.profiler.ProfileOptions()\n"
            "options.python_tracer_level = 0\n"
            'jax.profiler.start_trace("profile", profiler_options=options)',
        ),
        "torch_xla": Remedy("Record without Python's frames to see the step as it is."),
    },
)
