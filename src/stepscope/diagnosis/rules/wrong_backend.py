"""# What it finds
Devices that exchange data through the host: the gloo or MPI backend is used although the device has its own.

# Why it costs time
gloo copies every tensor to the host, sends it over the host's network and copies it back, while the device waits. NCCL
(RCCL on AMD) goes from device to device over NVLink or the network card.

# How it is measured
Collectives that run on the host in a program whose work is on a device: the device's time for their copies and its idle
time before and during them, minus what the device's own backend would take at 10 GB/s.

# Known false positives
None known. A small additional group for host data costs little and is not reported.

# What to do
Use `init_process_group("nccl")`, or "cpu:gloo,cuda:nccl" for both kinds of tensors.

# Reference
PyTorch's documentation, "Which backend to use?"; the TensorBoard plugin recommends NCCL from compute capability 3.5.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import collectives
from stepscope.diagnosis.rule import Answers, Change, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_cause, scaled_slices, scaled_work_of, together

_HOST_BACKENDS: Final = ("gloo", "mpi")
_HOST_OPERATOR: Final = r"^(?:gloo|mpi):"


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.work.filter(pl.col("kind") == "communication").height:
        return
    backends = {facts.backend or "" for facts in view.program.data_parallel} | {view.trace.metadata.backend or ""}
    noted = pl.col("name").str.contains(_HOST_OPERATOR)  # an operator or an annotation, depending on the profiler
    marks = view.trace.annotations.filter(noted & (pl.col("kind") == "host")).select("name")
    through_host = pl.concat([view.operators.filter(noted).select("name"), marks])
    if through_host.is_empty() and not any(name in _HOST_BACKENDS for name in backends):
        return
    found = collectives(view.trace, window=view.span)
    rows = rows_of(found)
    calls = pl.col("launch").is_in(view.launched_in(rows).astype(np.uint32).tolist())
    busy_ns = int(view.work.filter(calls)["duration_ns"].sum())
    # The device is idle before the work of these operators, or waits for ranks.
    idle = view.pieces.filter(calls.fill_null(False) | (pl.col("cause") == "communication"))
    cost = busy_ns + int(idle["duration_ns"].sum())
    moved = int(found["bytes"].sum() or 0)
    left = moved / max(limits["bytes_per_second"], 1.0) * 1e9
    saved = cost - left
    if not limits.reached(saved):
        return
    yield Found(
        f"the device's data goes through the host to the other ranks: {view.percent(cost)} of the {view.period}",
        saved,
        basis="the device's time for the collectives' copies and its idle time in them, less the bytes at 10 GB/s",
        confidence="medium",
        figures=[
            view.share_figure("in exchanges through the host", cost),
            view.count_per_step("collectives on the host", found.height),
            *view.bytes_of("bytes", found["bytes"]),
            view.share_figure("waiting for other ranks", int(view.pieces_of("communication")["duration_ns"].sum())),
        ],
        intervals=view.longest(found, "collective"),
        remedy=Remedy(
            "Let the devices talk to each other: NCCL, which is RCCL on AMD.",
            'torch.distributed.init_process_group("nccl")            # or "cpu:gloo,cuda:nccl"',
        ),
        where=view.at_operators(rows, found["duration_ns"].to_numpy()),
        change=_by_device_backend(view, rows, left, busy_ns, cost),
    )


def _by_device_backend(view: View, rows: Rows, left_ns: float, busy_ns: int, cost_ns: int) -> Change:
    """Remove the host; the device's own backend's time replaces the copies, or else the waits."""
    if not busy_ns:
        return scaled_cause("communication", left_ns / cost_ns)
    return together(
        scaled_cause("communication", 0.0),
        scaled_slices(view.slices_of_operators(rows), 0.0),
        scaled_work_of(rows, left_ns / busy_ns),
    )


RULE: Final = Rule(
    id="wrong-backend",
    title="Devices exchange data through the host",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} that the device's own backend would save"),
        "bytes_per_second": Threshold(10e9, "bytes", "assumed rate per second of the device's own backend"),
    },
    check=check,
    replaces=("exposed-communication", "device-ping-pong"),
)
