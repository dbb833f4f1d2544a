"""# What it finds
What is wrong with the recording itself, and what it therefore cannot tell.

# Why it costs time
It costs none. But a trace that lost events, was cut off, or lacks stacks or shapes answers some questions wrongly or
not at all, and it is better to know which.

# How it is measured
The reader's warnings; the profiler's own work; device work without a launch; steps, stacks and shapes that are missing.

# Known false positives
Inference servers have no steps by nature.

# What to do
Each unanswered question says how to record a trace that answers it.

# Reference
nsys-ai warns of profiler overhead from 5 %; PyTorch's trace validator (2.14) for lost and reordered events.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Finding, NotAnswered, Remedy, RuleResult, Threshold
from stepscope.diagnosis.parts import HOST, LAUNCHES, PARTS, PROFILE, how_to_record, missing
from stepscope.diagnosis.view import View
from stepscope.whatif.changes import without_cause

ID: Final = "trace-health"
TITLE: Final = "What the recording cannot tell"
THRESHOLDS: Final = {
    "overhead": Threshold(0.05, "share", "share of the step lost to the profiler itself"),
    "unlaunched": Threshold(0.05, "share", "share of the device's work whose launch is missing"),
    "unknown": Threshold(0.05, "share", "share of the step idle for a reason the trace does not show"),
    "untraced": Threshold(0.2, "share", "share of the step in which a host without a device recorded nothing"),
}


def check(view: View) -> RuleResult:
    """Say what could not be answered, and report the profiler's overhead."""
    if view.trace.metadata.format == "torch_snapshot":  # which is about memory alone, and has all of that
        return RuleResult()
    questions = [*_missing_parts(view), *_missing_events(view)]
    return RuleResult(_overhead(view), tuple(questions))


def _overhead(view: View) -> tuple[Finding, ...]:
    pieces = view.pieces.filter(pl.col("cause") == "profiler_overhead")
    cost = int(pieces["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "overhead")
    if cost == 0 or view.share(cost) < limit:
        return ()
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the step goes to the profiler itself, which is gone without it",
        cost,
        basis="time the profiler recorded of its own work",
        confidence="high",
        evidence=Evidence((Figure("share of the step lost to the profiler", view.share(cost), "share", limit),)),
        remedy=Remedy("Record without stacks, shapes and memory to see the step as it is.", PROFILE.format("")),
        change=without_cause("profiler_overhead"),
    )
    return (finding,)


def _missing_parts(view: View) -> list[NotAnswered]:
    trace = view.trace
    found = []
    cut = next((warning for warning in trace.warnings if warning.kind in ("truncated", "compressed_data")), None)
    if cut is not None:
        found.append(
            NotAnswered(
                "What stood in the part of the file that is missing"
                + (", such as the work of a device?" if view.device is None else "?"),
                cut.detail,
                "copy the file again, or let the program end before the trace is taken",
                ID,
            )
        )
    if view.summary.source != "none" and view.complete_steps.is_empty():
        found.append(
            NotAnswered(
                "How long is a step?",
                "no step lies whole inside the window that was read",
                "choose whole steps: --steps FIRST:LAST",
                ID,
            )
        )
    for name in missing(view):
        part = PARTS[name]
        found.append(NotAnswered(part.question, part.why, part.how_for(trace.metadata.format, view.framework), ID))
    return found


def _missing_events(view: View) -> list[NotAnswered]:
    if view.device is None:
        return _silent_host(view)
    found = []
    work = view.trace.device_work.filter(pl.col("device") == pl.lit(view.device, pl.String))
    unlaunched = work["launch"].null_count() / work.height
    if unlaunched > view.threshold(ID, THRESHOLDS, "unlaunched"):
        found.append(
            NotAnswered(
                "Which code launched all of the device's work?",
                f"{unlaunched:.0%} of the device's work has no launch in the trace: it was launched before the "
                "recording began, or launches were not recorded",
                how_to_record(LAUNCHES, view.trace.metadata.format, view.framework),
                ID,
            )
        )
    unknown = int(view.pieces.filter(pl.col("cause").is_in(["unknown", "untraced"]))["duration_ns"].sum())
    if view.share(unknown) > view.threshold(ID, THRESHOLDS, "unknown"):
        found.append(
            NotAnswered(
                f"Why is the device idle for {view.share(unknown):.0%} of the step without a visible reason?",
                "the host threads recorded nothing then, or the device waited for something outside the trace",
                how_to_record(HOST, view.trace.metadata.format, view.framework),
                ID,
            )
        )
    return found


def _silent_host(view: View) -> list[NotAnswered]:
    """Without a device, what the main thread did while nothing of it was recorded."""
    silent = int(view.pieces.filter(pl.col("cause") == "untraced")["duration_ns"].sum())
    if view.share(silent) <= view.threshold(ID, THRESHOLDS, "untraced"):
        return []
    return [
        NotAnswered(
            f"What did the main thread do for {view.share(silent):.0%} of the time?",
            "nothing was recorded on it then: it slept, waited, or ran what this recording does not show",
            how_to_record(HOST, view.trace.metadata.format, view.framework),
            ID,
        )
    ]
