"""# What it finds
Copies between host and device that do not overlap with computation.

# Why it costs time
A copy from ordinary (pageable) memory goes through a staging buffer and blocks the host until it is done. A blocking
copy separates two steps; a pinned, asynchronous copy runs while the device computes.

# How it is measured
Time when the device copies from or to the host and computes nothing, plus idle time while the launching thread was
inside a copy to the device. Memory is called pageable or pinned if most of the copies' time goes to such memory, by
the profiler's names. The recorder knows whether the loaders pin their batches, and the remedy depends on it.

# Known false positives
The first copy of a step cannot overlap with anything if the whole step depends on it and only one batch is in flight.

# What to do
Set `pin_memory=True` in the loader and `non_blocking=True` in `.to(device)`, and copy the next batch while the current
one computes.

# Reference
Nsight Systems' rule cuda_memcpy_async (pageable copies); TraceML reports copies that take 10 % of the step or more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import CAUSE_CODES, TABLES
from stepscope.analysis.idle import device_window
from stepscope.diagnosis.rule import (
    Answers,
    Change,
    Figure,
    Found,
    InServing,
    Limits,
    Remedy,
    Rule,
    Threshold,
    View,
    rows_of,
)
from stepscope.diagnosis.rules._waits import INPUTS_AHEAD
from stepscope.whatif.changes import overlapped, together, without_waits

_KINDS: Final = ("copy_in", "copy_out")
_MEMORY: Final = "(?i)pageable|pinned"
"""Names of copies that say which kind of host memory they use, as GPU profilers do."""
_OF_PAGEABLE: Final = "share of the copies' time from or to pageable memory"
_MOST: Final = 0.5


_STAY: Final = Remedy(
    "More time goes to moving data than to computing with it, so that no overlap can hide the copies: keep on the "
    "device what every step needs, move it in fewer bytes, or do more with it before it goes back.",
    "# once, before the loop: weights, caches and states that fit the device's memory stay there\n"
    "# in the loop: copy only what is new, in 16 bits where that is enough",
)


_KEPT_ON_HOST: Final = InServing(
    "The copies are too large for tokens: blocks of the cache, or weights, are kept on the host and move in each "
    "iteration. Keep more of them on the device.",
    "cache",
    "# let caches and weights stay on the device, with fewer requests at a time or in narrower numbers",
)
_OF_TOKENS: Final = 1 << 20
"""Most bytes of a copy of tokens, lengths or tables of blocks."""


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    exposed = view.exposed_ns(_KINDS)
    cost = exposed + int(view.pieces_of("host_to_device_copy")["duration_ns"].sum())
    if not limits.reached(cost):
        return
    copies = view.work.filter(pl.col("kind").is_in(_KINDS))
    pageable = _pageable_share(copies)
    hopeless = exposed > _computing_ns(view)
    remedy = _STAY if hopeless else _remedy(view, copies, are_pageable=pageable > _MOST)
    offloads = view.serves and _mean_bytes(copies) > _OF_TOKENS
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to copies between host and device that nothing overlaps"
        + (", most of them from or to pageable memory" if pageable > _MOST else "")
        + ("; computing is too short to hide them" if hopeless else ""),
        cost,
        basis="time when the device only copies, plus idle time inside copy calls"
        + ("; gone only if nothing is copied" if hopeless else ""),
        confidence="low" if hopeless else "high",
        figures=[
            view.count_per_step("copies", copies.height),
            *([Figure(_OF_PAGEABLE, pageable, "share")] if copies["name"].str.contains(_MEMORY).any() else []),
            *view.bytes_of("bytes moved", copies["bytes"]),
        ],
        intervals=view.longest(copies, "copy"),
        remedy=_KEPT_ON_HOST.remedy(view) if offloads else remedy,
        for_every_framework=hopeless or offloads,
        where=view.at_launches(copies),
        change=_beside_computations(view, copies),
    )


def _mean_bytes(copies: pl.DataFrame) -> float:
    """Mean size of a copy, weighted by time; 0 if no size is known."""
    known = copies.drop_nulls("bytes")
    return float(np.average(known["bytes"], weights=known["duration_ns"])) if known["duration_ns"].sum() else 0.0


def _pageable_share(copies: pl.DataFrame) -> float:
    """Share of the copies' time that goes to those from or to pageable memory, by their names."""
    pageable = copies.filter(pl.col("name").str.contains("(?i)pageable"))
    return int(pageable["duration_ns"].sum()) / max(int(copies["duration_ns"].sum()), 1)


def _beside_computations(view: View, copies: pl.DataFrame) -> Change:
    """Copies take only the time that overlaps with computation, and no call waits for copies to the device."""
    activity = view.activity
    calls = (activity.table == TABLES.index("launches")) & (activity.cause == CAUSE_CODES["host_to_device_copy"])
    if view.device is not None:  # the very first call waits for the device's initialisation
        calls &= activity.start >= device_window(view.trace, view.device).start_ns
    return together(overlapped(rows_of(copies)), without_waits(activity.row[calls]))


def _computing_ns(view: View) -> int:
    mine = view.trace.device_work.filter(pl.col("device") == pl.lit(view.device, pl.String))
    return busy_intervals(mine.filter(pl.col("kind") == "compute"), view.window).total_ns


def _remedy(view: View, copies: pl.DataFrame, *, are_pageable: bool) -> Remedy:
    durations = copies.group_by("kind").agg(pl.col("duration_ns").sum())
    outward = durations.sort("duration_ns", descending=True)["kind"][0] == "copy_out" if durations.height else False
    if outward:
        return Remedy(
            "Most of it is copied to the host: copy less, less often, or into pinned memory without waiting.",
            "host = torch.empty_like(tensor, device='cpu', pin_memory=True)      # once\n"
            "host.copy_(tensor, non_blocking=True)      # read it after the next synchronisation",
        )
    if not are_pageable:
        pinned = copies["name"].str.contains(_MEMORY).any()
        return Remedy(
            "Most of the memory is pinned already: copy the next batch while this one computes."
            if pinned
            else "Copy the next batch while this one computes; from pinned memory, if it is not there yet.",
            f"copying = {view.torch_stream}()\n"
            f"with {view.on_stream('copying')}:\n"
            "    following = next(batches).to(device, non_blocking=True)\n"
            "train(batch)\n"
            f"{view.torch_device}.current_stream().wait_stream(copying)\n"
            "batch = following\n"
            "# or, for any loader:\n"
            "from stepscope.remedies import prefetch_to_device\n"
            "for batch in prefetch_to_device(loader):\n    train(batch)",
            apply=("non-blocking",),
        )
    if view.program.loaders and all(loader.pin_memory for loader in view.program.loaders):
        return Remedy(
            "The loaders pin their batches, but what is copied is not in pinned memory: something made between loading "
            "and copying, or a class of batch that lacks pin_memory().",
            "class Batch:\n"
            "    def pin_memory(self):\n"
            "        self.inputs = self.inputs.pin_memory()\n"
            "        return self",
        )
    return Remedy(
        "Load batches into pinned memory and copy them without waiting.",
        "loader = DataLoader(dataset, ..., pin_memory=True)\n"
        "for batch in loader:\n    batch = batch.to(device, non_blocking=True)\n"
        "# or, the next batches while this one computes:\n"
        "from stepscope.remedies import prefetch_to_device\n"
        "for batch in prefetch_to_device(loader, device):\n    ...",
        apply=("pin-memory", "non-blocking"),
    )


RULE: Final = Rule(
    id="exposed-copy",
    title="Copies between host and device stop the work",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost to copies")},
    check=check,
    remedies={
        "jax": Remedy(
            "Put the next batch on the device while this one computes, and read results a step later.",
            "following = jax.device_put(next(batches))     # returns at once\n"
            "state, loss = train_step(state, batch)\n"
            "loss.copy_to_host_async()\n"
            "batch = following",
        ),
        "torch_xla": Remedy(
            "Put the next batch on the device while this one computes.",
            "loader = torch_xla.distributed.parallel_loader.MpDeviceLoader(loader, torch_xla.device())",
        ),
        "hpu": Remedy(
            "Copy the next batch from pinned memory while this one computes.",
            "loader = DataLoader(dataset, ..., num_workers=4, pin_memory=True)\n"
            'batch = batch.to("hpu", non_blocking=True)',
        ),
    },
    serving=INPUTS_AHEAD,
)
