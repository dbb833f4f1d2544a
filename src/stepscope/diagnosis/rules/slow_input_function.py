"""# What it finds
One function of the input pipeline that takes most of the time to make a batch, where workers alone would not hide it.

# Why it costs time
Batches arrive no faster than the dataset's `__getitem__`, its transform and the collate function make them. Loading in
more processes divides the time only as long as there are processors for them.

# How it is measured
The recorder times the dataset's items, transforms and collate functions in the main process and its workers; other
recordings show them as Python frames inside the main process's data loader. The finding names the innermost of your
functions that takes at least half of the time to make a batch.

The saving is what the step would lose of its waits for data if the function cost nothing, as when its results are
cached or prepared before training; making it twice as fast saves about half of that. The rule reports nothing if worker
processes would remove most of the waits without a change to the function: `input-bound` reports that.

# Known false positives
Python code runs several times slower while its lines or stacks are recorded, so a function that is a Python loop looks
slower than it is. The warnings of the trace say how much time the recording took.

# What to do
Do the work once instead of in every epoch (cache it, or prepare files beforehand), for a whole batch instead of for
each item, with NumPy or torch instead of a Python loop, or on the device.

# Reference
TensorFlow profiler, "Input pipeline analyzer": input operators ranked by self time; PyTorch performance tuning guide.
"""

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.loading import (
    CARRIES_MOST,
    NEARLY_ALL,
    Costly,
    Loading,
    costly_function,
    loading_of,
    places_of,
    settings_figures,
)
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import scaled_cause

_WHAT: Final = {"item": "the dataset's item", "transform": "the transform", "collate": "the collate function"}


def check(view: View, limits: Limits) -> Answers:
    loading = loading_of(view)
    if not limits.reached(loading.wait_ns):
        return
    costly = costly_function(view, loading)
    if costly is None or _is_something_else(view, loading):
        return
    saving = _saving_ns(view, loading, costly)
    yield Found(
        f"{_WHAT[costly.stage]} {costly.name} takes {costly.share:.0%} of the time to make a batch, for which the "
        f"{view.period} waits {view.percent(loading.wait_ns)} of its time",
        saving,
        basis="what the waits for data would lose if the function cost nothing, its results being cached or prepared "
        "before training; half of it if it were twice as fast",
        confidence="medium",
        figures=[
            Figure("share of the time to make a batch", costly.share, "share", CARRIES_MOST),
            Figure("time of one call", costly.total_ns // max(costly.calls, 1), "ns"),
            Figure("calls per batch", costly.calls / max(loading.calls, 1), "count"),
            *settings_figures(loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=_remedy(costly),
        where=places_of(view, loading, costly),
        change=scaled_cause("input", 1.0 - saving / loading.wait_ns),
    )


def _is_something_else(view: View, loading: Loading) -> bool:
    """Whether additional workers would remove nearly all of the waits, or the existing ones are enough."""
    load, now = loading.load, loading.workers
    if load is None:
        return now == 0
    if now and (load.step_ns(now) - load.compute_ns) * view.step_count < CARRIES_MOST * loading.wait_ns:
        return True
    workers = load.workers_needed()
    return (now is None or now < workers) and loading.saved_ns(view, workers) >= NEARLY_ALL * loading.wait_ns


def _saving_ns(view: View, loading: Loading, costly: Costly) -> int:
    if loading.load is None or not loading.workers:
        return int(loading.wait_ns * costly.share)
    return loading.saved_ns(view, loading.workers, costly.share * loading.load.batch_ns)


def _remedy(costly: Costly) -> Remedy:
    if costly.stage == "collate":
        return Remedy(
            f"Let {costly.name} build the whole batch at once instead of element by element; what does not depend on "
            "the batch belongs into the dataset, prepared before training.",
            "def collate(samples):\n"
            "    inputs, targets = zip(*samples)\n"
            "    return torch.stack(inputs), torch.tensor(targets)",
        )
    function = costly.name.rpartition(".")[2]
    return Remedy(
        f"Let {costly.name} work on arrays instead of in a Python loop, or keep its results: what is the same in every "
        "epoch needs to be computed once.",
        "def prepared(self, index):                 # once for each sample, kept in memory or in a file\n"
        "    if index not in self.cache:\n"
        f"        self.cache[index] = self.{function}(index)\n"
        "    return self.cache[index]",
    )


RULE: Final = Rule(
    id="slow-input-function",
    title="One function makes batches slow",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost to waiting for this function")},
    check=check,
    needs=("lines",),
    replaces=("input-bound",),
)
