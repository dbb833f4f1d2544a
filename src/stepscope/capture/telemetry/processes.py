"""Processor, memory, disk and network of this process with its children, and of the machine, from psutil."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Final, TypeAlias

from stepscope.capture.guard import sentence
from stepscope.capture.telemetry.store import Series
from stepscope.capture.telemetry.writer import Writer

Values: TypeAlias = list[tuple[Series, float | None]]

_LISTING_SHARE: Final = 0.005
"""Listing all processes to find the children costs more than all the rest; it may take this share of a core."""


def _process(name: str, unit: str | None) -> Series:
    return Series("process", name, None, unit)


def _machine(name: str, unit: str | None) -> Series:
    return Series("machine", name, None, unit)


class ProcessTree:
    """Asks psutil; sums go over this process and all below it.

    Raises:
        ImportError: psutil is not installed.
    """

    series: ClassVar[Series] = Series("process", "(all)")

    def __init__(self, writer: Writer) -> None:
        self._psutil: Any = import_module("psutil")
        self._writer = writer
        self._self = self._psutil.Process()
        self._tree: dict[int, Any] = {self._self.pid: self._self}
        self._list_next_ns = 0
        self._cpu_s: dict[int, float] = {}
        self._disk: dict[int, tuple[int, int]] = {}
        self._ratios: dict[Series, tuple[float, float]] = {}
        self._before_ns: int | None = None
        self._absent: set[Series] = set()
        writer.lacks(_process("network", "bytes/s"), "the system counts network traffic for the machine only")

    def sample(self, now_ns: int) -> Values:
        """Rates follow from the second call on."""
        self._list(now_ns)
        passed_s = None if self._before_ns is None else max(now_ns - self._before_ns, 1) / 1e9
        self._before_ns = now_ns
        values = self._of_processes(passed_s)
        for question in (self._processor, self._memory, self._disks, self._network):
            values += question(now_ns)
        return values

    def _list(self, now_ns: int) -> None:
        """Find the children, rarely enough where the machine has very many processes."""
        if now_ns < self._list_next_ns:
            return
        begun = time.thread_time_ns()
        try:
            found = self._self.children(recursive=True)
        except self._psutil.Error:
            found = []
        self._tree = {self._self.pid: self._self} | {
            each.pid: self._tree[each.pid] if self._tree.get(each.pid) == each else each for each in found
        }
        self._list_next_ns = now_ns + int((time.thread_time_ns() - begun) / _LISTING_SHARE)

    def _of_processes(self, passed_s: float | None) -> Values:
        cpu_s: dict[int, float] = {}
        disk: dict[int, tuple[int, int]] = {}
        resident = threads = 0
        for pid, process in self._tree.items():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    cpu_s[pid] = times.user + times.system
                    resident += process.memory_info().rss
                    threads += process.num_threads()
            except self._psutil.Error:
                continue  # it has ended
            self._read_disk(pid, process, disk)
        values: Values = [
            (_process("memory_bytes", "bytes"), resident),
            (_process("processes", None), len(cpu_s)),
            (_process("threads", None), threads),
        ]
        if passed_s is not None:
            used = sum(now - self._cpu_s.get(pid, 0.0 if self._cpu_s else now) for pid, now in cpu_s.items())
            values.append((_process("cpu_cores", "cores"), max(used, 0.0) / passed_s))
            values += self._disk_rates(disk, passed_s)
        self._cpu_s, self._disk = cpu_s, disk
        return values

    def _read_disk(self, pid: int, process: Any, disk: dict[int, tuple[int, int]]) -> None:
        if _process("disk_read_bytes_per_s", "bytes/s") in self._absent:
            return
        try:
            counters = process.io_counters()
        except (AttributeError, NotImplementedError, self._psutil.AccessDenied) as error:
            if process is self._self:
                for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s"):
                    self._lack(_process(name, "bytes/s"), f"not told by this system: {sentence(error)}")
        except self._psutil.Error:
            pass  # it has ended
        else:
            disk[pid] = (counters.read_bytes, counters.write_bytes)

    def _disk_rates(self, disk: dict[int, tuple[int, int]], passed_s: float) -> Values:
        values: Values = []
        for position, name in enumerate(("disk_read_bytes_per_s", "disk_write_bytes_per_s")):
            series = _process(name, "bytes/s")
            if series not in self._absent:
                moved = sum(now[position] - self._disk.get(pid, (0, 0))[position] for pid, now in disk.items())
                values.append((series, max(moved, 0) / passed_s))
        return values

    def _processor(self, now_ns: int) -> Values:
        times = self._psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # The guest's time is in the user's already.
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return self._ratio(_machine("cpu_share", "share"), whole - idle, whole)

    def _memory(self, now_ns: int) -> Values:
        memory, swap = self._psutil.virtual_memory(), self._psutil.swap_memory()
        return [
            (_machine("memory_used_bytes", "bytes"), memory.total - memory.available),
            (_machine("memory_bytes", "bytes"), memory.total),
            (_machine("swap_used_bytes", "bytes"), swap.used),
        ]

    def _disks(self, now_ns: int) -> Values:
        return self._rates(
            now_ns,
            lambda: self._psutil.disk_io_counters(),
            {"disk_read_bytes_per_s": "read_bytes", "disk_write_bytes_per_s": "write_bytes"},
        )

    def _network(self, now_ns: int) -> Values:
        return self._rates(
            now_ns,
            lambda: self._psutil.net_io_counters(),
            {"network_received_bytes_per_s": "bytes_recv", "network_sent_bytes_per_s": "bytes_sent"},
        )

    def _rates(self, now_ns: int, ask: Callable[[], Any], names: dict[str, str]) -> Values:
        """Rates of counters of the machine, which some containers do not show."""
        kinds = {_machine(name, "bytes/s"): field for name, field in names.items()}
        if self._absent >= set(kinds):
            return []
        try:
            counters = ask()
        except (OSError, NotImplementedError, RuntimeError) as error:
            counters, reason = None, sentence(error)
        else:
            reason = "this system shows no such counters"
        if counters is None:
            for series in kinds:
                self._lack(series, reason)
            return [(series, None) for series in kinds]
        return [
            pair
            for series, field in kinds.items()
            for pair in self._ratio(series, getattr(counters, field), now_ns / 1e9)
        ]

    def _ratio(self, series: Series, part: float, whole: float) -> Values:
        """How much one counter has grown for each unit of another since the last time."""
        before = self._ratios.get(series)
        self._ratios[series] = (part, whole)
        if before is None or whole <= before[1]:
            return []
        return [(series, max(part - before[0], 0.0) / (whole - before[1]))]

    def _lack(self, series: Series, reason: str) -> None:
        """Say once that a counter is not to be had here, and ask no more."""
        if series not in self._absent:
            self._absent.add(series)
            self._writer.lacks(series, reason)
