"""# What it finds
Worker processes that compete for processors with each other or with the main thread, or that do not run far enough
ahead.

# Why it costs time
More workers (or workers with more threads) than processors share them in turns: each batch takes longer, and the
training thread waits for a processor too. Workers that may be only a batch or two ahead are idle while the step
computes, and are late whenever a batch takes longer than usual.

# How it is measured
The recorder measures the wall time and the processor time of making a batch in the workers, and how long the main
thread was ready but waited for a processor. Too many workers: there are more workers than processors, and batches take
at least `stretched` times their processor time. Too little ahead: the workers' rate suffices, yet a few batches cause
most of the waits. The saving is what the step would lose of its waits with as many workers as there are processors, or
with more batches ahead.

# Known false positives
Reading from a slow disk or network also stretches a batch; then more workers than processors are right. The rule
therefore requires that the main thread itself waits for a processor.

# What to do
Use as many workers as the training leaves processors for, with one thread each (`torch.set_num_threads(1)`,
`cv2.setNumThreads(0)` in `worker_init_fn`), and a larger `prefetch_factor` where batches take different times.

# Reference
PyTorch's own warning when `num_workers` exceeds the suggested number of processors.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.input_pipeline import Load
from stepscope.diagnosis.loading import Loading, iterator_starts, loading_of, marks_of, settings_figures
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._waits import host_work_ns, scaled_host_work
from stepscope.whatif.changes import scaled_cause, scaled_pieces, together

_FEW: Final = 0.25
"""If this share of the batches causes most of the waits, the others arrive in time."""
_MOST: Final = 0.75
_FEWEST: Final = 8
"""Fewest batches for late ones to be a pattern."""


def check(view: View, limits: Limits) -> Answers:
    if not any(loader.workers for loader in view.program.loaders):
        return
    loading = loading_of(view)
    if not loading.workers or loading.load is None:
        return
    found = _too_many(view, limits, loading) or _too_little_ahead(view, limits, loading)
    if found is not None:
        yield found


def _too_many(view: View, limits: Limits, loading: Loading) -> Found | None:
    load, workers, processors = loading.load, loading.workers or 0, loading.processors
    if load is None or processors is None or workers <= processors or not loading.batches.processor_ns:
        return None
    stretched = (loading.batches.clock_ns or 0.0) / loading.batches.processor_ns
    waiting = [step.thread_waiting_ns for step in view.program.steps if step.thread_waiting_ns is not None]
    starved_ns = sum(waiting) / len(waiting) if waiting else 0.0
    least = limits["stretched"]
    if stretched < least or not starved_ns:
        return None
    fewer = max(processors - 1, 1)
    free = Load(
        max(load.compute_ns - starved_ns, 0.0), load.busy_ns, load.batch_processor_ns, load.batch_processor_ns,
        processors,
    )  # fmt: skip
    lost = loading.wait_ns + starved_ns * view.step_count
    saving = min(max(view.step_ns - free.step_ns(fewer), 0.0) * view.step_count, lost)
    if not limits.reached(saving):
        return None
    return Found(
        f"{workers} worker processes share {processors} processors: a batch takes {stretched:.1f} times its processor "
        f"time, and the {view.period} waits",
        saving,
        basis=f"waits for data and for a processor, less what remains with {fewer} worker processes that are not held "
        "up",
        confidence="medium",
        figures=[
            Figure("time of a batch over its processor time", stretched, "count", least),
            Figure(f"time {view.per} in which the main thread waited for a processor", int(starved_ns), "ns"),
            *settings_figures(loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=Remedy(
            "Start no more workers than the training leaves processors for, and let each use one thread.",
            "def one_thread(worker):\n"
            "    torch.set_num_threads(1)      # and cv2.setNumThreads(0)\n\n"
            f"loader = DataLoader(dataset, ..., num_workers={fewer}, worker_init_fn=one_thread)\n\n"
            "from stepscope.remedies import set_thread_counts\n"
            f"set_thread_counts(workers={fewer})      # what is left, for the training's own threads",
            apply=(f"workers={fewer}",),
        ),
        where=view.locations(loading.pieces),
        change=_less_waiting(view, starved_ns * view.step_count, saving / lost),
    )


def _less_waiting(view: View, starved_ns: float, share: float) -> Change:
    """Reduce the waits for data, and the time that the thread's own work waited for a processor, by this share."""
    work = 1 - share * starved_ns / max(host_work_ns(view), starved_ns, 1)
    return together(scaled_cause("input", 1 - share), scaled_host_work(work))


def _too_little_ahead(view: View, limits: Limits, loading: Loading) -> Found | None:
    load, workers = loading.load, loading.workers or 0
    outside = loading.waits
    for start in iterator_starts(view):
        inside = pl.col("start_ns").is_between(start.start_ns, start.end_ns, closed="left")
        outside = outside.filter(~inside)
    few = max(int(_FEW * outside.height), 1)
    late = outside.sort(["wait_ns", "start_ns"], descending=[True, False]).head(few)
    cost = int(late["wait_ns"].sum())
    if load is None or outside.height < _FEWEST or cost < _MOST * loading.wait_ns or not limits.reached(cost):
        return None
    if load.step_ns(workers) > load.ahead_ns * 1.05:  # the workers are too slow overall
        return None
    ahead = loading.loader.prefetch_factor if loading.loader is not None else None
    more = max(2 * (ahead or 2), 4)
    return Found(
        f"{workers} worker{'s make' if workers > 1 else ' makes'} batches fast enough, but not far enough ahead: "
        f"{few} of {outside.height} batches carry "
        f"{cost / loading.wait_ns:.0%} of the waits",
        cost,
        basis="waits for the few late batches, which batches made ahead would cover",
        confidence="medium",
        figures=[
            Figure("share of the waits in a quarter of the batches", cost / loading.wait_ns, "share", _MOST),
            *settings_figures(loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=Remedy(
            "Let each worker run further ahead, so that a batch that takes longer is ready in time.",
            f"loader = DataLoader(dataset, ..., num_workers={workers}, prefetch_factor={more},\n"
            "                    persistent_workers=True)\n"
            "# or let these numbers be found by trial:\n"
            "from stepscope.remedies import tune_loader\n"
            "loader = tune_loader(dataset, step_ms=..., batch_size=...).loader()",
            apply=(f"workers={workers}", f"prefetch={more}", "persistent-workers"),
        ),
        where=view.locations(loading.pieces),
        change=scaled_pieces(marks_of(view).join(late, on="start_ns", how="semi"), 0.0),
    )


RULE: Final = Rule(
    id="loader-contention",
    title="Worker processes compete for processors, or run too little ahead",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} lost to workers that compete or run too little ahead"),
        "stretched": Threshold(1.5, "count", "a batch's time by the clock over its time on a processor"),
    },
    check=check,
    replaces=("input-bound", "host-contention"),
)
