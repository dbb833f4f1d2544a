"""# What it finds
Data that is copied to the host and back to the device although the host does nothing with it.

# Why it costs time
Each copy waits for all earlier work, and the host waits for copies from pageable memory. The device is idle during the
copies, and again until the host has refilled its queues.

# How it is measured
In each step, a copy to the host and the next copy of the same size to the device on the same thread, with no operator
between them that works on the host. The cost is the device's idle time from the first copy to the end of the second and
in the refill after them, and its time for the copies.

# Known false positives
Two unrelated tensors of the same size: one is read on the host, the other is new input.

# What to do
Keep the tensor on the device and use it there.

# Reference
PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization"; TraceLens reports more than ten copies in
one direction.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._operators import cost_ns, round_trips, without_trips


def check(view: View, limits: Limits) -> Answers:
    trips = [trip for trip in round_trips(view) if not trip.on_host] if view.device is not None else []
    if not trips:
        return
    cost = cost_ns(view, trips)
    rows = np.array([row for trip in trips for row in trip.both("row")], np.int64)
    count = len(trips) / view.step_count
    yield Found(
        f"{'the same data is' if count <= 1 else f'{count:,.3g} times {view.a_step} data is'} copied to the host and "
        f"back: {view.percent(cost)} of the {view.period}",
        cost,
        basis="the device's idle time from the copy to the host to the copy back and after it, and both copies",
        confidence="medium",
        figures=[
            Figure(f"round trips {view.per}", count, "count"),
            view.bytes_per_step("bytes there and back", 2 * sum(trip.out["bytes"] for trip in trips)),
        ],
        intervals=[trip.interval("to the host and back") for trip in trips[:3]],
        remedy=Remedy(
            "Leave the tensor on the device; copy it to the host only where the host needs it.",
            "state = state.detach()            # instead of state.cpu(), and .to(device) later",
        ),
        where=view.at_operators(rows),
        change=without_trips(view, trips),
    )


RULE: Final = Rule(
    id="device-ping-pong",
    title="Data is copied to the host and back",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost to copies there and back")},
    check=check,
    needs=("operators",),
    replaces=("exposed-copy", "host-synchronisation"),
)
