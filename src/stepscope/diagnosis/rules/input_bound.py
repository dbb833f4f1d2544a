"""# What it finds
The device is idle because the host is loading the next batch.

# Why it costs time
While a batch is read, decoded and collated in the training process, nothing launches work. The device
finishes what it has and waits. Loading in other processes, ahead of time, hides it.

# How it is measured
Idle time of the device whose following work was launched late, while the launching thread stood inside the data
loader (`enumerate(DataLoader)#...`, `torch/utils/data/dataloader.py: __next__`). Without a device: time of the
main thread inside the loader.

# Known false positives
The first batch after workers start counts too; record steady steps. A loader that is slow only under the
profiler (stacks recorded for every Python call of the transforms) looks slower than it is.

# What to do
Give the loader worker processes and let them run ahead: `num_workers`, `prefetch_factor`, `persistent_workers`,
`pin_memory`. If workers are there already, make the transforms cheaper or the storage faster.

# Reference
XProf's input-pipeline analysis calls a step moderately input-bound from 5 % and highly from 20 %.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "input-bound"
TITLE: Final = "The device waits for data"
THRESHOLDS: Final = {"share": Threshold(0.05, "share", "share of the step lost to loading data")}


def check(view: View) -> RuleResult:
    """Sum the pieces whose cause is input."""
    pieces = view.pieces.filter(pl.col("cause") == "input")
    cost = int(pieces["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if view.share(cost) < limit or cost == 0:
        return RuleResult()
    loaders = view.trace.annotations.filter(pl.col("name").str.contains("DataLoader"))
    has_workers = bool(loaders["name"].str.contains("MultiProcessing").any())
    calls = loaders.filter(pl.col("start_ns").is_between(view.span.start_ns, view.span.end_ns)).height
    waiting = "the device waits" if view.device is not None else "the main thread spends its time"
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the step {waiting} {'for' if view.device is not None else 'on'} the data loader",
        cost,
        basis="idle time of the device while the launching thread was loading data"
        if view.device is not None
        else "time of the main thread inside the data loader",
        confidence="high",
        evidence=Evidence(
            (
                Figure("share of the step lost to loading data", view.share(cost), "share", limit),
                Figure("time lost per step", view.per_step(cost), "ns"),
                Figure("batches loaded per step", calls / view.step_count, "count"),
            ),
            view.longest(pieces, "waiting for data"),
        ),
        remedy=_remedy(has_workers),
        where=view.locations(pieces),
    )
    return RuleResult((finding,))


def _remedy(has_workers: bool) -> Remedy:
    if has_workers:
        return Remedy(
            "Worker processes load already, and are too slow or too few: raise num_workers towards the number of "
            "CPU cores and prefetch_factor, and profile the dataset's __getitem__ and collate_fn by themselves.",
            "loader = DataLoader(dataset, ..., num_workers=os.cpu_count(), prefetch_factor=4,\n"
            "                    persistent_workers=True, pin_memory=True)",
        )
    return Remedy(
        "Batches are loaded in the training process itself: load them in worker processes, ahead of time.",
        "loader = DataLoader(dataset, ..., num_workers=4, prefetch_factor=2,\n"
        "                    persistent_workers=True, pin_memory=True)",
    )
