"""What the recording itself took, where it stands out: in code that calls many short operators."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.host_counts import whole
from stepscope.diagnosis.view import View

OPERATOR_NS: Final = 600.0
"""What torch's profiler takes for an operator with its shapes at least; of some operators it takes twice as much."""


def unrecorded_ns(view: View, pieces: pl.DataFrame) -> int:
    """What pieces of the main thread's time would cost without the profiler, as a part of `view.length_ns`.

    Their share of a step, less what recording its operators takes of both. Only where the recorder timed steps before
    it recorded and these were quicker, and without a device, which hides the host's time; otherwise the pieces' time.

    Args:
        pieces: columns start_ns and duration_ns; they do not overlap.
    """
    own = int(pieces["duration_ns"].sum())
    begins = view.operators.filter(pl.col("lane") == view.lane)["start_ns"].to_numpy()
    each = _operator_ns(view, len(begins))
    pieces = pieces.sort("start_ns")
    starts, ends = pieces["start_ns"].to_numpy(), (pieces["start_ns"] + pieces["duration_ns"]).to_numpy()
    if not each or not len(starts):
        return own
    piece = np.searchsorted(starts, begins, side="right") - 1
    inside = int(((piece >= 0) & (begins < ends[piece])).sum())
    return int(max(own - inside * each, 0.0) * view.length_ns / max(view.length_ns - len(begins) * each, 1.0))


def _operator_ns(view: View, operators: int) -> float:
    """What recording took for one of so many operators, OPERATOR_NS at the most."""
    warm_up = whole(view, "warm_up_ns")
    if not operators or not warm_up or view.device is not None:
        return 0.0
    slower = view.step_ns - warm_up / max(round(warm_up / view.step_ns), 1)
    return min(max(slower * view.step_count / operators, 0.0), OPERATOR_NS)
