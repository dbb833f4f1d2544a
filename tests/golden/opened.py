"""Real traces for tests of what is made of them, each read once, and what holds of every diagnosis.

That reading is exact, test_real_traces says.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import polars as pl

from stepscope.analysis.idle import device_window, idle_time
from stepscope.diagnosis import Diagnosis
from stepscope.readers import open_trace
from stepscope.trace import Trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.window import union


@lru_cache(maxsize=2)
def opened(path: Path) -> Trace:
    return open_trace(path, cache=TraceCache())


def check_the_law(trace: Trace, diagnosis: Diagnosis) -> None:
    """Busy time and the pieces of idle time fill every device's window to the nanosecond."""
    pieces = idle_time(trace)
    for device in diagnosis.devices:
        window = device_window(trace, device.device)
        work = trace.device_work.filter(pl.col("device") == device.device)
        starts = work["start_ns"].to_numpy()
        busy = union(starts, starts + work["duration_ns"].to_numpy()).clip(window.start_ns, window.end_ns).total_ns
        mine = pieces.filter(pl.col("device") == device.device)
        assert busy + mine["duration_ns"].sum() == window.duration_ns == device.window_ns
        assert (device.busy_ns, device.idle_ns) == (busy, window.duration_ns - busy)
        assert diagnosis.idle.filter(pl.col("device") == device.device)["ns"].sum() == device.idle_ns
        assert mine.filter(pl.col("duration_ns") <= 0).is_empty()


def check_findings(diagnosis: Diagnosis) -> None:
    ranks = [finding.rank for finding in diagnosis.findings]
    assert ranks == sorted(ranks)
    for finding in diagnosis.findings:
        least = 0 if finding.severity == "note" else 1
        assert least <= finding.saving_ns_per_step <= diagnosis.step_ns, finding.title
        assert finding.title
        assert finding.remedy.text
        assert finding.evidence.figures
        assert all(0 < place.share <= 1 for place in finding.where)
