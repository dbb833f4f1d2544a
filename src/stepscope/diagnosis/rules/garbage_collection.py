"""# What it finds
Steps that stop for Python's garbage collector.

# Why it costs time
The collector walks every object that it tracks, and everything else on the thread waits. A program with millions of
objects (a dataset in lists and dictionaries, large models, compiled code) pays for all of them in every full
collection, and `gc.collect()` always runs a full one.

# How it is measured
Idle time of the device (without a device: time of the main thread) while the collector ran. stepscope's own recordings
get each run from Python itself; other recordings show only calls of `gc.collect`, and only if Python frames were
recorded.

If the lines that start the collector are in a loop of a function whose source the recorder read, that loop is the
cause.

# Known false positives
A short recording may happen to contain a full collection that runs once in hundreds of steps.

# What to do
Remove `gc.collect()` from the step: objects are freed without it as soon as nothing refers to them. Where the collector
runs automatically, freeze the objects that live for the whole program before the first step, and choose yourself when
to collect.

# Reference
Ascend's profiler advisor reports collections of 1 ms or more; Python's documentation of `gc.freeze`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.function_work import MOST, FunctionWork
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.trace.program_facts import PauseFacts
from stepscope.whatif.changes import scaled_cause


def check(view: View, limits: Limits) -> Answers:
    pieces = view.pieces_of("garbage_collection")
    cost = int(pieces["duration_ns"].sum())
    annotated = _runs(view, view.trace.annotations, "^Garbage collection")
    runs = annotated.height or _runs(view, view.trace.frames, r"built-in function (?:gc\.)?collect>").height
    origin_ns, span = view.trace.metadata.origin_unix_ns or 0, view.span
    pauses = [each for each in view.program.pauses if span.start_ns <= each.start_unix_ns - origin_ns < span.end_ns]
    called_ns = sum(pause.duration_ns for pause in pauses if pause.called)
    is_called = called_ns > sum(pause.duration_ns for pause in pauses) / 2 if pauses else True
    where = _where(pauses) or view.locations(pieces)
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to "
        + ("gc.collect(), which the program calls" if is_called else "Python's garbage collector"),
        cost,
        basis="time in the garbage collector" if view.device is None else "idle time while the collector ran",
        confidence="high" if is_called or runs >= view.step_count else "medium",
        figures=[
            view.ns_per_step("time lost", cost),
            view.count_per_step("collections", runs),
            Figure("longest collection", int(annotated["duration_ns"].to_numpy().max(initial=0)), "ns"),
        ],
        intervals=view.longest(pieces, "collecting garbage"),
        remedy=_CALLED if is_called else _of_loop(view, where) or _BY_ITSELF,
        where=where,
        change=scaled_cause("garbage_collection", 0.0),
    )


def _runs(view: View, table: pl.DataFrame, pattern: str) -> pl.DataFrame:
    """The collector's runs in the span, by the names they have in the table."""
    return view.begin_in_span(table.filter(pl.col("name").str.contains(pattern)))


def _where(pauses: list[PauseFacts]) -> tuple[Location, ...]:
    """The lines that call the collector; where it runs automatically, the lines whose allocations trigger it."""
    total = sum(pause.duration_ns for pause in pauses)
    places: Counter[tuple[str, int, str]] = Counter()
    for pause in pauses:
        if pause.file is not None and pause.line is not None:
            places[pause.file, pause.line, pause.function or ""] += pause.duration_ns
    costly = places.most_common(3)
    return tuple(Location(*place, share=ns / total, exact_line=True) for place, ns in costly if ns > 0)


def _of_loop(view: View, where: tuple[Location, ...]) -> Remedy | None:
    """The remedy if most of the collector's runs are in a loop of one function, whose objects are the cause."""
    loops = FunctionWork(view, view.pieces_of("garbage_collection")).loops_at(where)
    if sum(place.share for place, _ in loops) < MOST:
        return None
    function = loops[0][1]
    return Remedy(
        f"A loop in {function} makes objects for each element, and every so many new objects start the collector: "
        f"compute on arrays or tensors instead. Otherwise: {_BY_ITSELF.text[:1].lower()}{_BY_ITSELF.text[1:]}",
        _BY_ITSELF.code,
        _BY_ITSELF.apply,
    )


_CALLED: Final = Remedy(
    "Do not call gc.collect() in the step: Python frees objects as soon as nothing refers to them, and the "
    "collector only looks for cycles. If it is there to stop memory from growing, find what holds that memory; "
    "once an epoch is enough.",
    "# remove from the step: gc.collect()\nfor epoch in range(epochs):\n    train(epoch)\n    gc.collect()",
)
_BY_ITSELF: Final = Remedy(
    "Take what lives as long as the program out of the collector's sight before the first step, and keep "
    "long-lived records in arrays or tensors instead of Python objects.",
    "import gc\n\ngc.collect()\ngc.freeze()          # after building model and dataset, before the first step\n"
    "# or, so that all ranks stop at the same time:\ngc.disable()\nif step % 500 == 0:\n    gc.collect()\n"
    "# both, and put back at the end:\n"
    "from stepscope.remedies import collect_garbage_at_steps\n"
    "with collect_garbage_at_steps(every=500) as garbage:\n    ...               # garbage.step() after each step",
    apply=("garbage-at-steps",),
)


RULE: Final = Rule(
    id="garbage-collection",
    title="Steps stop for Python's garbage collector",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost to garbage collection")},
    check=check,
)
