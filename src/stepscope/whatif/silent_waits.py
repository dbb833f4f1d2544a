"""Waiting of the host for the device that no call in the trace stands for, in traces of XLA.

XLA's clients wait inside calls that do other things, too: an executable's Execute returns late once enough work is
queued, and a Python function such as `block_until_ready` may be all that shows a wait. A replay would take that time
for the host's own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.formats import XLA_FORMATS
from stepscope.analysis.host import CAUSE_CODES, TABLES, HostActivity
from stepscope.analysis.per_slice import at
from stepscope.trace import Trace, Window

SHORTEST_NS: Final = 1_000_000
"""A call that is shorter than this is taken for the host's own work."""
_BUSY: Final = 0.99
"""Share of a call's time in which the device works, from which on the call is taken to wait for it."""


def silent_wait_ns(trace: Trace, activity: HostActivity, lane: int, device: str | None, span: Window) -> int:
    """How long a thread waited for the device in the span without a call that says so, nanoseconds.

    Counted are the pieces of a thread's time that lie in slices which wait by their names but are no launches, and
    pieces of SHORTEST_NS or more inside an operator during which the device works throughout.
    """
    if trace.metadata.format not in XLA_FORMATS or device is None or not len(activity.table):
        return 0
    pieces = activity.cut(lane, np.array([span.start_ns]), np.array([span.end_ns]))
    table = at(activity.table, pieces.slices)
    length = pieces.end - pieces.start
    waits = (pieces.cause == CAUSE_CODES["synchronisation"]) & (table != TABLES.index("launches"))
    long = (table == TABLES.index("operators")) & (length >= SHORTEST_NS) & ~waits
    busy = busy_intervals(trace.device_work.filter(pl.col("device") == device), span)
    covered = busy.overlap_of(pieces.start[long], pieces.end[long])
    inside = int(length[long][covered >= _BUSY * length[long]].sum())
    return int(length[waits].sum()) + inside
