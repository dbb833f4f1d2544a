"""Times of a Perfetto trace on one clock: several tick in a file, and snapshots tell what they showed at once."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import ClockSnapshot

REALTIME: Final = 1
BOOTTIME: Final = 6
_OF_A_SEQUENCE: Final = range(64, 128)
Clock: TypeAlias = "tuple[int, int]"
"""Sequence and number of a clock; the sequence is 0 for clocks that all of them share."""


class Clocks:
    """Turns timestamps into nanoseconds of the trace's main clock, that of the machine's running time by default.

    Attributes:
        unix_offset_ns: what the wall clock is ahead of the main clock; None where no snapshot tells.
        unknown: timestamps on a clock that no snapshot tells of, and were taken as they are, by clock.
    """

    def __init__(self) -> None:
        self.main = BOOTTIME
        self.unix_offset_ns: int | None = None
        self.unknown: defaultdict[Clock, int] = defaultdict(int)
        self._offsets: defaultdict[Clock, list[tuple[int, int]]] = defaultdict(list)
        self._units: dict[Clock, int] = {}
        self._last: dict[Clock, int] = {}

    def add_snapshot(self, sequence: int, snapshot: ClockSnapshot) -> None:
        """Learn what several clocks showed at the same moment."""
        if snapshot.primary_trace_clock:
            self.main = snapshot.primary_trace_clock
        shown: dict[int, int] = {}
        for clock in snapshot.clocks:
            key = _clock(sequence, clock.clock_id)
            unit = max(1, clock.unit_multiplier_ns)
            if clock.is_incremental:
                self._last[key] = clock.timestamp * unit
            if clock.is_incremental or unit != 1:
                self._units[key] = unit
            shown[clock.clock_id] = clock.timestamp * unit
        if self.main not in shown:
            return
        now = shown[self.main]
        for number, time in shown.items():
            if number == REALTIME and self.unix_offset_ns is None and self.main != REALTIME:
                self.unix_offset_ns = time - now
            if number != self.main:
                offsets = self._offsets[_clock(sequence, number)]
                offsets.append((time, now - time))
                if len(offsets) > 1 and offsets[-2][0] > time:
                    offsets.sort()

    def time_ns(self, sequence: int, number: int, timestamp: int) -> int:
        """A packet's timestamp, on the clock of this number, in nanoseconds of the main clock."""
        key = _clock(sequence, number)
        time = timestamp * self._units.get(key, 1)
        if key in self._last:
            time += self._last[key]
            self._last[key] = time
        if number == self.main:
            return time
        offsets = self._offsets.get(key)
        if not offsets:
            self.unknown[key] += 1
            return time
        return time + offsets[max(0, bisect_right(offsets, (time, 2**63)) - 1)][1]


def _clock(sequence: int, number: int) -> Clock:
    return (sequence if number in _OF_A_SEQUENCE else 0, number)
