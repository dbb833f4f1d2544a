"""When the process started, and when it came to what stands between that and its recorded steps."""

from __future__ import annotations

import os
import time
from pathlib import Path

_marks: dict[str, int] = {}


def mark(name: str) -> None:
    """Note that something happened for the first time; later calls do nothing."""
    _marks.setdefault(name, time.time_ns())


def start_times() -> dict[str, int]:
    """Nanoseconds from the start of the process to each mark, by "<mark>_ns"; empty where the start is not known."""
    started = _process_start_unix_ns()
    if started is None:
        return {}
    return {f"{name}_ns": max(when - started, 0) for name, when in _marks.items()}


def _process_start_unix_ns() -> int | None:
    try:
        text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns
    except (OSError, ValueError, IndexError, AttributeError):
        return None
