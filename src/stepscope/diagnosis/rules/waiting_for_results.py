"""# What it finds
A device that is idle while the host waits for results, in JAX and PyTorch/XLA programs.

# Why it costs time
XLA's calls return before the device is done, so that the host can send the next program while this one runs. A host
that reads a value immediately (`float(loss)`, `print`, `numpy.asarray`, `block_until_ready`, `loss.item()`) waits until
the device has finished, and only then sends more work.

# How it is measured
Idle time of the device while the launching thread is in a call whose name shows that it waits. Such waits are often not
device API calls, so no replay can show what would follow without them; then the measured time counts.
host-synchronisation charges the calls that XLA records as waits.

# Known false positives
A program's first runs wait until it is compiled, loaded and tuned. A value may be needed: generating a token needs the
one before.

# What to do
Keep values on the device, and read them every hundred steps. Let one compiled function run several steps.

# Reference
JAX documentation, "Asynchronous dispatch"; PyTorch/XLA, "Troubleshooting".
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import without_cause

_KEEP_ON_DEVICE: Final = Remedy(
    "float(loss), print(loss), numpy.asarray() and block_until_ready() wait for the device: keep values there and "
    "read them rarely.",
    "running_loss = running_loss + loss          # stays on the device\n"
    "if step % 100 == 0:\n    print(float(running_loss) / 100)",
)
_FRAMEWORKS: Final = ("jax", "torch_xla")


def check(view: View, limits: Limits) -> Answers:
    if view.framework not in _FRAMEWORKS or view.device is None:
        return
    pieces = view.pieces.filter((pl.col("cause") == "synchronisation") & pl.col("trigger_launch").is_null())
    cost = int(pieces["duration_ns"].sum())
    yield Found(
        f"for {view.percent(cost)} of the {view.period} the device is idle while the host waits for results "
        "instead of sending work",
        cost,
        basis="idle time of the device while the thread that gives it work waits",
        confidence="medium",
        intervals=view.longest(pieces, "wait"),
        remedy=_KEEP_ON_DEVICE,
        where=view.locations(pieces),
        change=without_cause("synchronisation"),
    )


RULE: Final = Rule(
    id="waiting-for-results",
    title="The host waits for results instead of sending work",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} in which the device is idle while the host waits")
    },
    check=check,
    remedies={
        "torch_xla": Remedy(
            "loss.item(), print(loss) and conditions on tensors end the graph and wait for the device: read values "
            "after the step, and rarely.",
            "if step % 100 == 0:\n    xm.add_step_closure(lambda loss: print(loss.item()), args=(loss,))",
        ),
    },
)
