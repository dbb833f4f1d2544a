"""How much of the exchange of gradients stays exposed with other sizes of buckets.

Gradients are there one after the other, from the last layer to the first. A bucket is sent when the last of its
gradients is there and the bucket before it has arrived, and takes a latency and its bytes over the bandwidth, both
as fitted to the recorded collectives (`links`):

    end(i) = max(ready(i), end(i - 1)) + latency + bytes(i) / bandwidth        exposed = end(last) - ready(last)

(Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019.)
Small buckets pay the latency often, large ones begin late: the last one is sent when nothing is left to hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.predict.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Gradients, buckets_of
from stepscope.predict.links import Link
from stepscope.whatif.experiment import Experiment

SIZES_MB: Final = (1, 2, 4, 8, 15, 25, 50, 75, 100, 150, 200, 300, 500)
"""Sizes that are tried, MiB."""


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What a size of buckets means for the mean step.

    Attributes:
        megabytes: MiB; None for torch's own, 1 for the first bucket and 25 for the others.
        messages: buckets of a step.
        communication_ns: how long they take.
        exposed_ns: how much of that is left when the backward pass has ended.
    """

    megabytes: int | None
    messages: float
    communication_ns: float
    exposed_ns: float


def bucket_sizes(
    experiment: Experiment, gradients: Gradients, link: Link, ranks: int, sizes: Sequence[int] = SIZES_MB
) -> tuple[BucketSize, ...]:
    """Torch's own sizes, and then each of these."""
    there = on_device(experiment, gradients)
    return tuple(_size(there, link, ranks, megabytes) for megabytes in (None, *sizes))


def _size(gradients: Gradients, link: Link, ranks: int, megabytes: int | None) -> BucketSize:
    limit = BUCKET_BYTES if megabytes is None else megabytes << 20
    first = FIRST_BUCKET_BYTES if megabytes is None else limit
    buckets = buckets_of(gradients, bucket_bytes=limit, first_bytes=first)
    transfers = np.array([link.transfer_ns("all_reduce", size, ranks) for size in buckets.bytes.tolist()])
    steps = np.unique(buckets.step)
    exposed = 0.0
    for step in steps:
        mine = buckets.step == step
        ready, end = buckets.ready[mine], float("-inf")
        for moment, transfer in zip(ready.tolist(), transfers[mine].tolist(), strict=True):
            end = max(moment, end) + transfer
        exposed += end - float(np.max(ready))
    return BucketSize(megabytes, len(transfers) / len(steps), float(transfers.sum()) / len(steps), exposed / len(steps))


def on_device(experiment: Experiment, gradients: Gradients) -> Gradients:
    """The gradients with the moments at which the device has computed them: all that was launched before is done.

    Without a device, or where no launches are known, those of the host stay.
    """
    if experiment.device is None:
        return gradients
    calls = experiment.trace.launches.select(launched="start_ns").with_row_index("launch")
    work = experiment.trace.device_work.filter((pl.col("device") == experiment.device) & (pl.col("kind") == "compute"))
    work = work.join(calls, on="launch", how="inner").sort("launched")
    if work.is_empty():
        return gradients
    ends = np.maximum.accumulate((work["start_ns"] + work["duration_ns"]).to_numpy())
    before = np.searchsorted(work["launched"].to_numpy(), gradients.time, side="right") - 1
    time = np.where(before >= 0, np.maximum(ends[np.maximum(before, 0)], gradients.time), gradients.time)
    return replace(gradients, time=time)
