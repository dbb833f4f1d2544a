"""The calls of modules that a recording kept beside its trace, as the table `modules`."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.line_records import MODULE_LEFT, LineRecords, ThreadLines
from stepscope.trace.nesting import Rows
from stepscope.trace.tables import conform, empty
from stepscope.trace.window import Window


def module_table(
    records: LineRecords, lane_of: dict[str, int], origin_ns: int, period: tuple[int, int], read: Window | None
) -> pl.DataFrame:
    """The table `modules`.

    Args:
        lane_of: the lane of each thread of the recorded process.
        origin_ns: wall clock at time 0 of the trace.
        period: from when to when calls were noted; what is still open then ends.
        read: the part of the trace that was read; calls are cut to it.
    """
    begin, end = max(period[0], 0), max(period[1], 0)
    if read is not None:
        begin, end = max(begin, read.start_ns), min(end, read.end_ns)
    parts = [empty("modules")]
    for thread in records.threads:
        lane = lane_of.get(str(thread.thread))
        if lane is None or not thread.module_times:
            continue
        modules, starts, ends = _calls(thread, origin_ns, end)
        starts, ends = np.clip(starts, begin, end), np.clip(ends, begin, end)
        kept = (modules >= 0) & (modules < len(records.modules)) & (ends > starts)
        names = pl.Series(records.modules, dtype=pl.String).gather(modules[kept])
        columns = {"start_ns": starts[kept], "duration_ns": (ends - starts)[kept], "name": names}
        parts.append(conform("modules", pl.DataFrame(columns).with_columns(lane=pl.lit(lane))))
    return pl.concat(parts).sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)


def _calls(thread: ThreadLines, origin_ns: int, end_ns: int) -> tuple[Rows, Rows, Rows]:
    """Module, start and end of each call of a thread, in order of their starts."""
    times = np.frombuffer(thread.module_times, "<i8").astype(np.int64) - origin_ns
    noted = np.frombuffer(thread.modules, "<i4").astype(np.int64)
    ends = np.full(len(times), end_ns, np.int64)
    is_open: list[int] = []
    for position, module in enumerate(noted.tolist()):
        if module != MODULE_LEFT:
            is_open.append(position)
        elif is_open:
            ends[is_open.pop()] = times[position]
    began = noted != MODULE_LEFT
    return noted[began], times[began], ends[began]
