"""# What it finds
Operators that run on the CPU in the middle of a device's work.

# Why it costs time
The device must finish what comes before, the data is copied to the host, the CPU works while the device idles, and
the result is copied back before the device can go on.

# How it is measured
In each step, a copy to the host, then operators that work on the host and launch nothing, then a copy to the device on
the same thread; or operators whose names say that they fell back to the CPU. The cost is the device's idle time from
the first copy to the end of the last and in the refill after them, and its time for the copies. The device's own time
for the operators, which is not in the trace, remains and is not taken off.

# Known false positives
Work that the device cannot do: then do it for many steps at once, or while the device works on something else.

# What to do
Keep the tensors on the device; use an operator that it supports instead of the one that falls back.

# Reference
PyTorch documentation, `PYTORCH_ENABLE_MPS_FALLBACK`; Intel Gaudi documentation, "CPU fallback of operators".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Interval, Remedy, RuleResult
from stepscope.diagnosis.rules._round_trips import RoundTrip, cost_ns, round_trips, without_trips
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View
from stepscope.whatif.changes import scaled_operators

ID: Final = "cpu-fallback"
TITLE: Final = "Operators run on the CPU in the middle of the device's work"
THRESHOLDS: Final = {"share": Threshold(0.02, "share", "share of the step lost around operators on the CPU")}
REPLACES: Final = ("exposed-copy", "host-synchronisation", "python-in-step")

_FALLBACK: Final = r"(?i)_?cpu_?fallback"


def check(view: View) -> RuleResult:
    """Weigh the round trips in which the host worked."""
    if view.device is None:
        return RuleResult()
    trips = [trip for trip in round_trips(view) if trip.on_host]
    limit = view.threshold(ID, THRESHOLDS, "share")
    cost = cost_ns(view, trips) if trips else 0
    named = view.operators.filter(pl.col("name").str.contains(_FALLBACK))["row"].to_numpy().astype(np.int64)
    if len(named):
        cost = max(cost, view.cost_ns(named))
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    rows = np.array([row for trip in trips for row in trip.on_host] or named.tolist(), np.int64)
    durations = view.trace.operators["duration_ns"].to_numpy()[rows]
    names = view.trace.operators["name"].gather(rows).unique(maintain_order=True).to_list()
    finding = view.finding(
        ID,
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} on the CPU between two copies: the device waits "
        f"{len(trips) / view.step_count:,.3g} times a step"
        if trips
        else f"{', '.join(names[:3])}: operators fall back to the CPU",
        cost,
        basis="the device's idle time from the copy to the host to the copy back and after it, and both copies",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("share of the step lost around operators on the CPU", view.share(cost), "share", limit),
                Figure("round trips per step", len(trips) / view.step_count, "count"),
                Figure("time of operators on the CPU per step", view.per_step(int(durations.sum())), "ns"),
                Figure("bytes copied per step", _bytes(trips) // view.step_count, "bytes"),
            ),
            tuple(Interval(trip.start_ns, trip.end_ns - trip.start_ns, "on the CPU") for trip in trips[:3]),
        ),
        remedy=Remedy(
            "Keep the tensors on the device, and replace what it cannot run.",
            "# instead of x.cpu() ... .to(device): the same operators on x itself\nresult = function(x)",
        ),
        where=view.locations_of(view.slices_of_operators(rows), np.maximum(durations, 1)),
        change=without_trips(view, trips) if trips else scaled_operators(named, 0.0),
    )
    return RuleResult((finding,))


def _bytes(trips: list[RoundTrip]) -> int:
    return sum(trip.bytes + trip.returned_bytes for trip in trips)
