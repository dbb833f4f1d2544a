"""# What it finds
Collectives whose data moves slowly although every rank has arrived.

# Why it costs time
The slowest link sets the pace of the whole group: data goes over the network instead of NVLink, over one network card
instead of all, or through the host.

# How it is measured
Messages of 1 MiB or more: bytes that each rank's link carries (as NCCL's tests count them) divided by the time of the
fastest message of the same size, in which no rank waits; with several ranks' traces, divided by the time since the last
rank's arrival. The cost is the time beyond what the expected rate needs, as far as no computation overlaps it. Where at
least three groups of ranks exchange the same, those whose transfers take 1.5 times the median of all, and more than
groups vary, are named with the machine or rail that their ranks share.

# Known false positives
Links that cannot be faster: set the expected rate to that of the machine's link.

# What to do
Check what NCCL chose (`NCCL_DEBUG=INFO`), send larger messages, and halve the bytes with 16-bit gradients.

# Reference
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: bus bandwidth.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.communication import bus_bytes, collectives
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_work

ALIKE: Final = 4
"""Fewest collectives of one kind and size whose fastest shows the time without waits."""

REMEDY: Final = Remedy(
    "See which way the data takes, and send less of it.",
    "NCCL_DEBUG=INFO python train.py          # NVLink, PCIe, network card or sockets, and why\n"
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)   # half the bytes",
)


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    fewest = limits["bytes"]
    rate = max(limits["bytes_per_second"], 1.0)
    found = collectives(view.trace, device=view.device, window=view.window).filter(
        (pl.col("bytes") >= fewest) & (pl.col("kind") != "send_receive") & (pl.col("duration_ns") > 0)
    )
    found = found.filter(pl.len().over("kind", "group", "bytes") >= ALIKE)
    if found.is_empty():
        return
    ranks = view.trace.metadata.world_size or 2
    carried = [
        bus_bytes(kind, size, int(group or ranks))
        for kind, size, group in found.select("kind", "bytes", "ranks").iter_rows()
    ]
    rows = found.with_columns(
        carried=pl.Series(carried, dtype=pl.Float64),
        alone=pl.col("duration_ns").min().over("kind", "group", "bytes"),
    )
    alone = float(rows["alone"].sum())
    needed = float(rows["carried"].sum()) / rate * 1e9
    total = int(rows["duration_ns"].sum())
    exposed = view.exposed_ns(("communication",))
    saved = max(alone - needed, 0.0) * min(exposed / max(total, 1), 1.0)
    reached = float(rows["carried"].sum()) / max(alone, 1.0) * 1e9
    less = rows["alone"].to_numpy() * max(1 - needed / max(alone, 1.0), 0.0)
    yield Found(
        f"data moves at {reached / 1e9:,.1f} GB/s on each rank's link, below the {rate / 1e9:,.1f} GB/s expected",
        saved,
        basis="the fastest collectives of each size, less what the same bytes need at the expected rate, as far as "
        "nothing covers them",
        confidence="low",
        share_at=1,
        figures=[
            Figure("bytes in a second on each link", reached, "bytes", rate),
            Figure("mean message", float(rows["bytes"].mean() or 0), "bytes", fewest),  # type: ignore[arg-type]
            view.count_per_step("such messages", rows.height),
        ],
        intervals=view.longest(rows, "collective"),
        remedy=REMEDY,
        change=scaled_work(rows_of(rows), 1 - less / rows["duration_ns"].to_numpy()),
    )


RULE: Final = Rule(
    id="slow-transfer",
    title="Data between ranks moves slowly",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} that transfers at the expected rate would save"),
        "bytes_per_second": Threshold(5e9, "bytes", "rate per second that each rank's link is expected to reach"),
        "bytes": Threshold(2**20, "bytes", "smallest message whose rate counts"),
    },
    check=check,
    replaces=("exposed-communication",),
    remedies={
        "jax": Remedy(
            "See which way the data takes, and send less of it.",
            "NCCL_DEBUG=INFO python train.py          # on GPUs: NVLink, PCIe, network card or sockets, and why",
        ),
    },
)
