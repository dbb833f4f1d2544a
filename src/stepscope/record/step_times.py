"""Step times while no profiler ran, and the losses of their backward passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

from stepscope.record.counters import faults_of_process

TIMED_STEPS: Final = 50
"""Number of steps timed after the recording, before stepscope detaches."""
TIMED_S: Final = 30.0
"""Time after the recording at which timing stops."""
_MOST_STEPS: Final = 10_000


@dataclass(slots=True)
class Stretch:
    """Consecutive steps.

    Attributes:
        durations_ns: of each step, excluding stepscope's own work before it.
        recorded: whether the profiler ran.
        processor_ns: time that the steps' thread ran on a processor in each step, which other programs do not lengthen;
            empty if unknown.
        faults: pages that were mapped for the process in each step; empty if unknown.
    """

    first_step: int
    recorded: bool
    durations_ns: list[int] = field(default_factory=list)
    processor_ns: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        times = {"ns": self.durations_ns, "processor_ns": self.processor_ns, "faults": self.faults}
        return {"first_step": self.first_step, "recorded": self.recorded, **times}

    @classmethod
    def from_json(cls, content: object) -> Stretch | None:
        """Read the form written by `to_json`; None for anything else."""
        if not isinstance(content, Mapping):
            return None
        first, durations = content.get("first_step"), content.get("ns")
        if type(first) is not int or not are_durations(durations):
            return None
        processor, faults = (
            each if are_durations(each := content.get(name)) and len(each) == len(durations) else []
            for name in ("processor_ns", "faults")
        )
        return cls(first, bool(content.get("recorded")), durations, processor, faults)


def are_durations(content: object) -> TypeGuard[list[int]]:
    """Whether a stored value is a list of step times in nanoseconds."""
    return isinstance(content, list) and all(type(each) is int and 0 <= each < 2**63 for each in content)


class StepTimes:
    """Times the steps of one thread, between calls of `begins` and `ended`."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        processor_ns: Callable[[], int] = time.thread_time_ns,
        faults: Callable[[], int | None] = faults_of_process,
    ) -> None:
        self.stretches: list[Stretch] = []
        self._clocks = (clock_ns, processor_ns, faults)
        self._begun: tuple[int, int, int | None] | None = None
        self._now: Stretch | None = None
        self._count = 0

    def begins(self, step: int, recorded: bool | None) -> None:
        """Begin a step; `recorded` None excludes it from the times."""
        if recorded is None or self._count >= _MOST_STEPS:
            self._begun = self._now = None
            return
        now = self._now
        if now is None or now.recorded != recorded or now.first_step + len(now.durations_ns) != step:
            self._now = Stretch(step, recorded)
        self._begun = self._read()

    def ended(self) -> None:
        begun, now = self._begun, self._now
        if begun is None or now is None:
            return
        wall_ns, processor_ns, faults = self._read()
        now.durations_ns.append(wall_ns - begun[0])
        now.processor_ns.append(processor_ns - begun[1])
        if faults is not None and begun[2] is not None:
            now.faults.append(faults - begun[2])
        self._begun = None
        self._count += 1
        if len(now.durations_ns) == 1:
            self.stretches.append(now)

    def _read(self) -> tuple[int, int, int | None]:
        wall_ns, processor_ns, faults = self._clocks
        return wall_ns(), processor_ns(), faults()

    def clear(self) -> None:
        """Drop all times, for example when a better step source is found."""
        self.stretches.clear()
        self._begun, self._now, self._count = None, None, 0

    def to_json(self) -> list[dict[str, Any]]:
        return [stretch.to_json() for stretch in self.stretches]


_marks: dict[str, int] = {}


def mark(name: str) -> None:
    """Record the time of an event's first occurrence; later calls do nothing."""
    _marks.setdefault(name, time.time_ns())


def start_times() -> dict[str, int]:
    """Return nanoseconds from process start to each mark, as "<mark>_ns"; empty if the process start is unknown."""
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
