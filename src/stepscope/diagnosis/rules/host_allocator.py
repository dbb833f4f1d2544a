"""# What it finds
Steps that spend time on the host getting memory from the operating system.

# Why it costs time
The C library returns large blocks to the system as soon as they are freed and requests them again for the next tensor
of that size. Each page must then be mapped and zeroed again, and the computation works on cold memory.

# How it is measured
Time that the thread running the steps spent in the operating system, in recorded steps with many minor page faults.
Both are the operating system's counts, and the rule applies only if no other allocator was loaded. The profiler's
records also take memory and fragment the program's, so only as many pages count as were mapped in a warm-up step, which
is not recorded.

# Known false positives
A first epoch that fills a cache, or a program that keeps what it allocates. Reading files also takes time in the
operating system; a step that reads files and has many page faults looks the same.

# What to do
Keep freed blocks in the process: load jemalloc or tcmalloc, or configure the C library not to return memory. Where
possible, write into existing tensors (`out=`, in-place operators).

# Reference
PyTorch, "Performance tuning guide: use jemalloc or tcmalloc"; mallopt(3).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.diagnosis.finding import NotAnswered
from stepscope.diagnosis.recording_costs import faults_before
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._waits import host_counts, host_work_ns, scaled_host_work
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_work_of


def check(view: View, limits: Limits) -> Answers:
    counts = host_counts(view)
    allocator = view.program.process.get("allocator")
    if counts is None or allocator not in ("glibc", "musl", None):
        return
    least = limits["faults"]
    # A program that allocates its memory once has many faults in only a few steps.
    many = [step for step in counts.steps if (step.minor_faults or 0) >= least]
    if not many or 2 * len(many) < len(counts.steps):
        return
    recorded = sum(step.minor_faults or 0 for step in many) / len(many)
    unrecorded = faults_before(view.trace.metadata, counts.length_ns / len(counts.steps))
    faults = recorded if unrecorded is None else min(recorded, unrecorded)
    system = int(sum(step.thread_system_ns or 0 for step in many) * faults / recorded)
    explained = min(system, int(faults * len(many) * limits["fault_ns"]))
    cost = min(int(counts.share(explained) * view.length_ns), host_work_ns(view))
    if faults < least or not limits.reached(cost):
        return
    if unrecorded is None:
        yield NotAnswered(
            "Does the program request its memory anew from the operating system in each step?",
            f"recorded steps map {recorded:,.0f} pages, which the recording itself may need: "
            "no step before it was counted",
            "let a warm-up step pass before the recording: stepscope.schedule(warmup=1, ...)",
        )
        return
    rows = rows_of(view.operators)
    allocated = view.operator_costs["bytes_allocated"].to_numpy()[rows]
    rows, allocated = rows[allocated > 0], allocated[allocated > 0]
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to the operating system, "
        f"which maps {faults:,.0f} pages {view.a_step}",
        cost,
        basis="time of the main thread in the operating system, as far as page faults explain it that unrecorded steps "
        "have too",
        confidence="low",
        share_at=None,
        figures=[
            Figure(f"pages mapped {view.per}", faults, "count", least),
            Figure("pages mapped per recorded step", recorded, "count"),
            limits.figure("share", counts.share(system)),
            view.bytes_per_step("bytes allocated", int(allocated.sum())),
        ],
        remedy=Remedy(
            "Let the process keep the memory that it frees: with another allocator, or by telling the C library so.",
            "stepscope run --allocator jemalloc train.py      # or tcmalloc: finds it, and sets what it needs\n"
            "# without stepscope (by default, jemalloc also returns large blocks at once):\n"
            "LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1 python train.py\n"
            "# without installing anything, for glibc:\n"
            "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=268435456 python train.py",
            apply=("allocator=jemalloc",),
        ),
        where=view.locations_of(view.slices_of_operators(rows), allocated) if len(rows) else (),
        change=_without_mapping(view, rows, allocated, cost)
        if len(rows) and view.device is None
        else scaled_host_work(1 - cost / host_work_ns(view)),
    )


def _without_mapping(view: View, rows: Rows, allocated: Rows, cost: int) -> Change:
    """Take the time to map pages from the operators, by the bytes that they and those inside them allocate."""
    outer = rows
    while len(inside := np.flatnonzero(view.parents[outer] >= 0)):
        outer = np.copy(outer)
        outer[inside] = view.parents[outer[inside]]
    outer, place = np.unique(outer, return_inverse=True)
    taken = cost * np.bincount(place, allocated) / allocated.sum()
    duration = view.trace.operators["duration_ns"].to_numpy()[outer]
    return scaled_work_of(outer, np.clip(1 - taken / np.maximum(duration, 1), 0.0, 1.0))


RULE: Final = Rule(
    id="host-allocator",
    title="The host gets its memory anew from the operating system in each step",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} in the operating system"),
        "faults": Threshold(2000, "count", "pages mapped per step above which there are many"),
        "fault_ns": Threshold(2000, "ns", "longest time in the operating system that one mapped page explains"),
    },
    check=check,
    beneath=2,
)
