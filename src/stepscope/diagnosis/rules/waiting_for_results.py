"""# What it finds
In programs of JAX and PyTorch/XLA: the device is idle while the host waits for results.

# Why it costs time
XLA's calls return before the device is done, so that the host can send the next program while this one runs. Who reads
a value at once (`float(loss)`, `print`, `numpy.asarray`, `block_until_ready`, `loss.item()`) waits until the device has
finished, and only then sends work again.

# How it is measured
Idle time of the device while the thread that gives it work stands in a call that waits by its name. Such waits are
often no calls of a device's API, so that no replay can tell what would follow without them; then the time counts as it
is. Calls that XLA records as waits are charged by host-synchronisation.

# Known false positives
The first runs of a program wait until it is compiled, loaded and tuned. A value may be needed: generating a token needs
the one before.

# What to do
Keep values on the device, and read them every hundred steps. Let one compiled function do several steps.

# Reference
JAX documentation, "Asynchronous dispatch"; PyTorch/XLA, "Troubleshooting".
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, RuleResult, Threshold
from stepscope.diagnosis.rules._synchronisation_kinds import KINDS
from stepscope.diagnosis.view import View
from stepscope.whatif.changes import without_cause

ID: Final = "waiting-for-results"
TITLE: Final = "The host waits for results instead of sending work"
THRESHOLDS: Final = {
    "share": Threshold(0.02, "share", "share of the step in which the device is idle while the host waits")
}
_FRAMEWORKS: Final = ("jax", "torch_xla")


def check(view: View) -> RuleResult:
    """Sum the idle pieces in which the launching thread waits, but for those that a recorded wait caused."""
    if view.framework not in _FRAMEWORKS or view.device is None:
        return RuleResult()
    pieces = view.pieces.filter((pl.col("cause") == "synchronisation") & pl.col("trigger_launch").is_null())
    cost = int(pieces["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    share = view.share(cost)
    finding = view.finding(
        ID,
        f"{share:.0%} of the step the device is idle while the host waits for results instead of sending work",
        cost,
        basis="idle time of the device while the thread that gives it work waits",
        confidence="medium",
        evidence=Evidence(
            (Figure("share of the step idle while the host waits", share, "share", limit),),
            view.longest(pieces, "wait"),
        ),
        remedy=KINDS["queue"].remedy,
        where=view.locations(pieces),
        change=without_cause("synchronisation"),
    )
    return RuleResult((finding,))
