"""The thread that samples the machine: CPU, memory, disk and network, and each NVIDIA device."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from stepscope import guard
from stepscope.guard import sentence
from stepscope.record.telemetry.store import Sample, Series, Writer
from stepscope.threads import Thread

Values: TypeAlias = list[tuple[Series, float | None]]
Counter: TypeAlias = Callable[[Any], tuple[float, ...]]


class NvidiaDevices:
    """Samples the devices of this process through NVML; the ranks of a machine divide the devices among themselves.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        LookupError: there is no NVIDIA driver or device; the message says which.
    """

    series: ClassVar[Series] = Series("device", "(all)")

    def __init__(self, writer: Writer, nvml: Any = None, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml: Any = nvml or import_module("pynvml")
        self._writer = writer
        try:
            self._nvml.nvmlInit()
            self._devices = self._visible(environment)
        except self._nvml.NVMLError as error:
            raise LookupError(f"no NVIDIA driver answers: {sentence(error)}") from error
        if not self._devices:
            raise LookupError("there is no NVIDIA device, or CUDA_VISIBLE_DEVICES hides it")
        self._absent: set[tuple[str, str]] = set()

    def sample(self, now_ns: int) -> Values:
        """Read every counter of every device; a failed one is None, and an unsupported one is dropped."""
        values: Values = []
        for device, handle in self._devices.items():
            for names, counter in self._counters():
                if (device, names[0][0]) in self._absent:
                    continue
                series = [Series("device", name, device, unit) for name, unit in names]
                values += zip(series, self._asked(series, counter, handle), strict=True)
        return values

    def _asked(self, series: list[Series], counter: Counter, handle: Any) -> tuple[float | None, ...]:
        try:
            return counter(handle)
        except (self._nvml.NVMLError, AttributeError) as error:
            never = (getattr(self._nvml, "NVMLError_NotSupported", ()), AttributeError)
            device = series[0].device
            if isinstance(error, never) and device is not None:
                self._absent.add((device, series[0].name))
            for each in series:
                self._writer.lacks(each, sentence(error))
            return (None,) * len(series)

    def _counters(self) -> list[tuple[list[tuple[str, str]], Counter]]:
        """Return the NVML queries, each with the names and units of its values."""
        nvml = self._nvml

        def one(name: str, unit: str, ask: Callable[[Any], float]) -> tuple[list[tuple[str, str]], Counter]:
            return [(name, unit)], lambda handle: (ask(handle),)

        return [
            (
                [("utilization_share", "share"), ("memory_utilization_share", "share")],
                lambda handle: _pair(nvml.nvmlDeviceGetUtilizationRates(handle), "gpu", "memory", 0.01),
            ),
            (
                [("memory_used_bytes", "bytes"), ("memory_bytes", "bytes")],
                lambda handle: _pair(nvml.nvmlDeviceGetMemoryInfo(handle), "used", "total", 1),
            ),
            one("power_w", "W", lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            one("energy_j", "J", lambda handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
            one("temperature_c", "°C", lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            one("sm_clock_mhz", "MHz", lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            one("memory_clock_mhz", "MHz", lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            one(
                "throttle_reasons",
                "bit mask",
                lambda handle: float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            ),
        ]

    def _visible(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Map the CUDA device numbers of this process, which traces use too, to NVML handles."""
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            handles = [self._by_index(number) for number in range(self._nvml.nvmlDeviceGetCount())]
        else:
            handles = [self._named(name.strip()) for name in listed.split(",") if name.strip() not in ("", "-1")]
        asked = range(len(handles))
        local, together = (_whole(environment.get(name)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if local is not None and together is not None and len(handles) >= together:
            # Each device is sampled by one rank only: NVML answers one query at a time.
            asked = asked[local::together]
        return {str(number): handles[number] for number in asked}

    def _by_index(self, number: int) -> Any:
        return self._nvml.nvmlDeviceGetHandleByIndex(number)

    def _named(self, name: str) -> Any:
        return self._by_index(int(name)) if name.isdecimal() else self._nvml.nvmlDeviceGetHandleByUUID(name)


def _pair(answer: Any, first: str, second: str, scale: float) -> tuple[float, float]:
    return getattr(answer, first) * scale, getattr(answer, second) * scale


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


_LISTING_SHARE: Final = 0.005
"""Share of a core that listing all processes to find the children may take; it costs more than everything else."""


def _process(name: str, unit: str | None) -> Series:
    return Series("process", name, None, unit)


def _machine(name: str, unit: str | None) -> Series:
    return Series("machine", name, None, unit)


class ProcessTree:
    """Samples this process and its descendants, summed, through psutil.

    Raises ImportError if psutil is not installed.
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
        """Return the values; rates begin with the second call."""
        self._list(now_ns)
        passed_s = None if self._before_ns is None else max(now_ns - self._before_ns, 1) / 1e9
        self._before_ns = now_ns
        values = self._of_processes(passed_s)
        for question in (self._processor, self._memory, self._disks, self._network):
            values += question(now_ns)
        return values

    def _list(self, now_ns: int) -> None:
        """Find the child processes, less often if the machine has very many processes."""
        if now_ns < self._list_next_ns:
            return
        started = time.thread_time_ns()
        try:
            found = self._self.children(recursive=True)
        except self._psutil.Error:
            found = []
        self._tree = {self._self.pid: self._self} | {
            each.pid: self._tree[each.pid] if self._tree.get(each.pid) == each else each for each in found
        }
        self._list_next_ns = now_ns + int((time.thread_time_ns() - started) / _LISTING_SHARE)

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
                continue  # the process has ended
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
                    self._lack(_process(name, "bytes/s"), f"this system does not say: {sentence(error)}")
        except self._psutil.Error:
            pass  # the process has ended
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
        # User time already includes guest time.
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        shares = self._ratio(_machine("cpu_share", "share"), whole - idle, whole)
        # Where nothing was idle, rounding goes beyond 1.
        return [(series, None if share is None else min(share, 1.0)) for series, share in shares]

    def _memory(self, now_ns: int) -> Values:
        memory, swap = self._psutil.virtual_memory(), self._psutil.swap_memory()
        return [
            (_machine("memory_used_bytes", "bytes"), memory.total - memory.available),
            (_machine("memory_bytes", "bytes"), memory.total),
            (_machine("swap_used_bytes", "bytes"), swap.used),
        ]

    def _disks(self, now_ns: int) -> Values:
        names = {"disk_read_bytes_per_s": "read_bytes", "disk_write_bytes_per_s": "write_bytes"}
        return self._rates(now_ns, lambda: self._psutil.disk_io_counters(), names)

    def _network(self, now_ns: int) -> Values:
        names = {"network_received_bytes_per_s": "bytes_recv", "network_sent_bytes_per_s": "bytes_sent"}
        return self._rates(now_ns, lambda: self._psutil.net_io_counters(), names)

    def _rates(self, now_ns: int, ask: Callable[[], Any], names: dict[str, str]) -> Values:
        """Return rates of machine counters, which some containers do not have."""
        kinds = {_machine(name, "bytes/s"): field for name, field in names.items()}
        if self._absent >= set(kinds):
            return []
        try:
            counters = ask()
        except (OSError, NotImplementedError, RuntimeError) as error:
            counters, reason = None, sentence(error)
        else:
            reason = "this system has no such counters"
        if counters is None:
            for series in kinds:
                self._lack(series, reason)
            return [(series, None) for series in kinds]
        ratios = (self._ratio(series, getattr(counters, field), now_ns / 1e9) for series, field in kinds.items())
        return [pair for ratio in ratios for pair in ratio]

    def _ratio(self, series: Series, part: float, whole: float) -> Values:
        """Return the growth of one counter per unit of another since the last sample."""
        before = self._ratios.get(series)
        self._ratios[series] = (part, whole)
        if before is None or whole <= before[1]:
            return []
        return [(series, max(part - before[0], 0.0) / (whole - before[1]))]

    def _lack(self, series: Series, reason: str) -> None:
        """Report once that a counter is unavailable, and stop reading it."""
        if series not in self._absent:
            self._absent.add(series)
            self._writer.lacks(series, reason)


DEFAULT_INTERVAL_S: Final = 1.0
_LONGEST_STOP_S: Final = 2.0
_PACKAGES: Final = ("psutil", "pynvml")


class Source(Protocol):
    @property
    def series(self) -> Series: ...

    def sample(self, now_ns: int) -> list[tuple[Series, float | None]]:
        """Return the values at `now_ns` on a monotonic clock; None for a value that is temporarily unavailable."""


class Sampler:
    """Samples its sources every `interval_s` seconds; by default all sources of this machine."""

    def __init__(self, writer: Writer, interval_s: float, sources: Sequence[Source] | None = None) -> None:
        self._writer = writer
        self._interval_s = interval_s
        self._sources = sources
        self._ended = threading.Event()
        self._abandoned = False
        self._thread = Thread(self._run)

    def start(self) -> None:
        for package in _PACKAGES if self._sources is None else ():
            with guard.attempt():  # not on our thread: a child forked meanwhile could never import it
                import_module(package)
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and stop; a thread that hangs in a driver is abandoned."""
        self._ended.set()
        self._thread.join(_LONGEST_STOP_S)

    def abandon(self) -> None:
        """Stop without a last sample and without waiting."""
        self._abandoned = True
        self._ended.set()

    @guard.entry(in_background=True)
    def _run(self) -> None:
        sources = available_sources(self._writer) if self._sources is None else self._sources
        due = time.monotonic()
        while sources:
            last = self._ended.is_set()
            if self._abandoned:
                return
            self._sample(sources)
            if last:
                return
            due = max(due + self._interval_s, time.monotonic())
            self._ended.wait(due - time.monotonic())

    def _sample(self, sources: Sequence[Source]) -> None:
        for source in sources:
            with self._writer.guarded(source.series):
                values = source.sample(time.monotonic_ns())
                now = time.time_ns()
                for series, value in values:
                    self._writer.add(Sample(series, now, None, value))


def available_sources(writer: Writer) -> list[Source]:
    """Return the sources of this machine, recording what is unavailable; a missing package is reported on stderr."""
    sources: list[Source] = []
    absent = []
    try:
        sources.append(ProcessTree(writer))
    except ImportError:
        absent.append("psutil")
        writer.lacks(ProcessTree.series, "the package psutil is missing: pip install psutil")
    try:
        sources.append(NvidiaDevices(writer))
    except ImportError:
        if _has_nvidia_driver():
            absent.append("nvidia-ml-py")
        writer.lacks(NvidiaDevices.series, "the package nvidia-ml-py is missing: pip install nvidia-ml-py")
    except LookupError as error:
        writer.lacks(NvidiaDevices.series, str(error.args[0]))
    if absent:
        what = "processor, memory, disk and network" if "psutil" in absent else "NVIDIA devices"
        print(
            f"stepscope: {what} are not sampled without {' and '.join(absent)}: pip install {' '.join(absent)}",
            file=sys.stderr,
        )
    return sources


def _has_nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi") is not None
