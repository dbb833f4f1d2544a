"""# What it finds
Loader worker processes that are restarted repeatedly, while the step waits for their first batch.

# Why it costs time
Each `for batch in loader` creates an iterator. Without `persistent_workers=True` that restarts the worker processes:
each has to fork or import the program, receive the dataset and make a batch before the first step can begin. This is a
large part of short epochs.

# How it is measured
Time (with a device: idle time of the device) for stopping the workers at the end of an iteration, and from creating an
iterator over a loader with workers to its first batch, less the time of one batch, which persistent workers would need
too. `stepscope run` and Python frames mark the creation of iterators in the trace. If the recorder knows that an epoch
is longer than the recording, the cost of a restart is divided by the epoch's batches. Starting workers take
processors from the main thread: the finding replaces one about contention if it explains at least half of it.

# Known false positives
A recording that happens to contain the beginning of an epoch of unknown length overstates the cost per step.

# What to do
`persistent_workers=True`. Create the loader once, not in every epoch or evaluation. Where processes are spawned, a
dataset that is cheap to copy starts faster.

# Reference
PyTorch documentation, `torch.utils.data.DataLoader`, persistent_workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.loading import KEPT_ITERATOR, iterator_starts, loading_of, settings_figures
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rule, Threshold, View, clipped
from stepscope.trace import Window
from stepscope.whatif.changes import scaled_host_time


def check(view: View, limits: Limits) -> Answers:
    loader = next((each for each in view.program.loaders if each.persistent_workers is False and each.workers), None)
    known = any(each.workers is not None for each in view.program.loaders)
    if (known and loader is None) or view.lane is None:
        return
    starts = iterator_starts(view)
    if not starts:
        return
    loading = loading_of(view)
    if loading.workers == 0:
        return
    batches = loader.batches if loader is not None and loader.batches else 0
    # The recording may contain more epoch starts than is typical.
    share = min(loading.calls / (len(starts) * batches), 1.0) if batches and loading.calls else 1.0
    pieces = [clipped(view.pieces, start) for start in starts]
    batch_ns = int(loading.batches.clock_ns or 0)
    cost = int(sum(max(int(lost["duration_ns"].sum()) - batch_ns, 0) for lost in pieces) * share)
    mean_ns = sum(start.duration_ns for start in starts) // len(starts)
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to restarting the loader's worker processes, "
        f"{mean_ns / 1e6:,.0f} ms each time",
        cost,
        basis="time from making an iterator to its first batch, less what workers that stay alive take for a batch",
        confidence="medium" if loader is not None else "low",
        figures=[
            Figure("starts while steps were recorded", len(starts), "count"),
            Figure("time from a start to the first batch", mean_ns, "ns"),
            *settings_figures(loading),
        ],
        intervals=[Interval(start.start_ns, start.duration_ns, "starting workers") for start in starts[:3]],
        remedy=KEPT_ITERATOR
        if loading.is_begun_anew
        else Remedy(
            "Keep the workers alive between epochs, and make the loader once, outside the loop over epochs.",
            f"loader = DataLoader(dataset, ..., num_workers={loading.workers or 4}, persistent_workers=True)\n"
            "for epoch in range(epochs):\n"
            "    for batch in loader:",
            apply=("persistent-workers",),
        ),
        where=view.locations(pl.concat(pieces)),
        change=_without_starting(view.lane, batch_ns, starts, share),
    )


def _without_starting(lane: int, batch_ns: int, starts: Sequence[Window], share: float) -> Change:
    """Shorten this share of the starts to the time of one batch."""
    begins, ends = (np.array([getattr(start, name) for start in starts]) for name in ("start_ns", "end_ns"))
    length = ends - begins
    saved = np.maximum(length - batch_ns, 0).sum() * share
    return scaled_host_time(np.full(len(starts), lane, np.int32), begins, ends, 1 - saved / max(length.sum(), 1))


RULE: Final = Rule(
    id="loader-restart",
    title="Worker processes are restarted repeatedly",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost to starting workers")},
    check=check,
    replaces=("input-bound", "step-variance", "host-contention"),
)
