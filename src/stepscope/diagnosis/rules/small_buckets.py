"""# What it finds
Many small collectives in a step.

# Why it costs time
Every collective has a fixed cost, whatever its size: a launch on every rank, the ranks' synchronisation, the rounds of
the algorithm. Gradients that are reduced one parameter at a time pay it for each parameter.

# How it is measured
Reductions per step, and the shortest of them, which is almost entirely fixed cost; on the host, which runs several at a
time, the mean time between their ends. Collecting the same bytes in buckets of 25 MB leaves one reduction for each
bucket; the fixed cost of the others is counted as saved, as far as no computation overlaps it.

# Known false positives
Several groups of ranks, whose messages cannot be combined.

# What to do
`DistributedDataParallel` with its default buckets of 25 MB or larger ones; in your own loops over parameters, one
collective over a flat buffer.

# Reference
Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import collectives, exposed_on_host
from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._device import size_in_words
from stepscope.whatif.changes import scaled_cause, scaled_slices, scaled_work, together

_BUCKET_BYTES: Final = 25 * 2**20
_OUTLIER: Final = 10
"""Longer times between two ends, in medians, are due to a late rank, not a reduction's fixed cost."""
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce")


def check(view: View, limits: Limits) -> Answers:
    if view.serves:  # no gradients: each of an iteration's messages needs the one before
        return
    found = collectives(view.trace, device=view.device, window=view.window).filter(
        pl.col("kind").is_in(_REDUCTIONS) & (pl.col("duration_ns") > 0)
    )
    per_step = found.height / view.step_count
    fewest, largest = limits["count"], limits["bytes"]
    mean = float(found["bytes"].mean() or 0.0)  # type: ignore[arg-type]
    if per_step < fewest or found.is_empty() or mean > largest:
        return
    price = _price(view, found)
    needed = max(-(-int(found["bytes"].sum() or 0) // view.step_count // _BUCKET_BYTES), 1)
    saved = max(per_step - needed, 0) * price * view.step_count
    exposed = exposed_on_host(view.trace, view.span) if view.device is None else view.exposed_ns(("communication",))
    saved = min(saved, exposed)
    yield Found(
        f"{per_step:,.0f} reductions {view.a_step}"
        + (f" of {size_in_words(mean)} on average" if mean else "")
        + (f", which {needed} would do" if mean else ", whose sizes are unknown"),
        saved,
        basis="the time of a short reduction for each that buckets of 25 MB do not need, as far as nothing covers it",
        confidence="medium" if mean else "low",
        share_at=4,
        figures=[
            Figure(f"reductions {view.per}", per_step, "count", fewest),
            Figure(f"reductions of buckets of 25 MB {view.per}", needed, "count"),
            Figure("mean message", mean, "bytes", largest),
            Figure("time of a short one", price, "ns"),
        ],
        intervals=view.longest(found, "reduction"),
        remedy=_remedy(view),
        where=_places(view, found),
        change=_fewer(view, found, price * max(1 - needed / per_step, 0.0), saved),
    )


def _fewer(view: View, found: pl.DataFrame, less_ns: float, saved_ns: float) -> Change:
    """Shorten reductions by `less_ns` each on a device; on the host, starts and waits by `saved_ns` in total."""
    if view.device is not None:
        left = 1 - less_ns / found["duration_ns"].to_numpy()
        return scaled_work(rows_of(found), np.maximum(left, 0.0))
    starting = view.slices_of_operators(rows_of(found))
    began_ns = int((view.activity.end - view.activity.start)[starting].sum())
    waiting_ns = int(view.pieces_of("communication")["duration_ns"].sum())
    share = max(1 - saved_ns / max(began_ns + waiting_ns, 1), 0.0)
    return together(scaled_slices(starting, share), scaled_cause("communication", share))


def _price(view: View, found: pl.DataFrame) -> float:
    """Fixed cost of a reduction: a short one's time; on the host, where several overlap, the mean time between ends."""
    if found["on_device"].all():
        return float(found["duration_ns"].quantile(0.1) or 0)
    steps = view.steps["start_ns"].to_numpy()
    ends = np.sort((found["start_ns"] + found["duration_ns"]).to_numpy())
    step = np.searchsorted(steps, ends, side="right")
    gaps = np.diff(ends)[np.diff(step) == 0]
    return float(gaps[gaps <= _OUTLIER * np.median(gaps)].mean()) if len(gaps) else 0.0


def _places(view: View, found: pl.DataFrame) -> tuple[Location, ...]:
    slices = view.slices_of_launches(found["launch"])
    if not found["on_device"].all():
        slices = view.slices_of_operators(rows_of(found))
    return view.locations_of(slices, found["duration_ns"].to_numpy())


_FROM_TRACE: Final = (
    "stepscope data-parallel TRACE --json settings.json      # the size that suits these messages\n"
    "from stepscope.remedies import DataParallelSettings\n"
    'model = DataParallelSettings.load("settings.json").ddp(model)'
)


def _remedy(view: View) -> Remedy:
    small = [facts for facts in view.program.data_parallel if facts.bucket_bytes and facts.bucket_bytes < _BUCKET_BYTES]
    if small:
        have = (small[0].bucket_bytes or 0) / 2**20
        return Remedy(
            f"Give DistributedDataParallel larger buckets than the {have:,.1f} MiB it has; 25 is its default.",
            f"model = DistributedDataParallel(model, bucket_cap_mb=25)\n{_FROM_TRACE}",
            apply=("bucket-mb=25",),
        )
    return Remedy(
        "Exchange gradients in buckets: DistributedDataParallel does, or flatten what a loop would send one by one.",
        "model = DistributedDataParallel(model)      # buckets of 25 MB, sent during the backward pass\n"
        "flat = torch._utils._flatten_dense_tensors(gradients)   # in your own loop: one message for all\n"
        "torch.distributed.all_reduce(flat)",
    )


RULE: Final = Rule(
    id="small-buckets",
    title="Gradients are exchanged in very many small messages",
    thresholds={
        "count": Threshold(20, "count", "reductions per step above which there are many"),
        "bytes": Threshold(2**20, "bytes", "mean message that is small"),
        "share": Threshold(0.02, "share", "share of the {period} that fewer messages would save"),
    },
    check=check,
    replaces=("exposed-communication", "loop-in-step"),
)
