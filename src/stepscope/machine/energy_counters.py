"""Energy counters of this machine, found through the package zeus and read as joules since an arbitrary start.

zeus finds the devices and CPU packages and reads the devices' counters. RAPL's files are read here: where zeus reads
them itself, it starts a process that runs the program's main module once more. Imported only inside a measured program;
nothing here waits for a device.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope import guard
from stepscope.guard import sentence
from stepscope.threads import Lock, Thread
from stepscope.trace.energy_records import KINDS, Counter, Kind, MissingCounter

NO_PACKAGE: Final = "the package zeus is missing: pip install 'stepscope[energy]'"
NO_DRIVER: Final = "no driver of an NVIDIA or AMD device answers"
NO_RAPL: Final = "this machine has no RAPL counters (/sys/class/powercap/intel-rapl)"
NOT_ALLOWED: Final = (
    "only root may read RAPL's counters, unless zeusd reads them or their files are readable by all users"
)
SAMPLE_S: Final = 0.1
"""Interval between two power samples of a device without an energy counter; NVML's values change about as often."""
_MOST_WATTS: Final = 1000.0
"""Upper bound for a package or its memory, which gives the shortest time in which a counter can wrap."""


class Source(Protocol):
    @property
    def counter(self) -> Counter: ...
    @property
    def longest_s(self) -> float:
        """The longest measurable window in seconds."""

    def joules(self) -> float:
        """Return the energy since a fixed start, never decreasing. Raises whatever its driver raises."""

    def close(self) -> None: ...


@dataclass(slots=True)
class DeviceCounter:
    counter: Counter
    read_mj: Callable[[], float]
    longest_s: float = float("inf")

    def joules(self) -> float:
        """Return the energy since the driver was loaded."""
        return self.read_mj() / 1000

    def close(self) -> None: ...


class SampledPower:
    """The energy of a device that reports only power, sampled on a thread and integrated by the trapezoid rule.

    Args:
        read_w: reads the device's current power.
    """

    longest_s = float("inf")

    def __init__(self, counter: Counter, read_w: Callable[[], float], interval_s: float = SAMPLE_S) -> None:
        self.counter = counter
        self._read_w = read_w
        self._interval_s = interval_s
        self._lock = Lock()
        self._joules = 0.0
        self._last: tuple[float, float] | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.sample()
        self._thread = Thread(self._run)
        self._thread.start()

    def sample(self) -> None:
        with self._lock:
            now, watts = time.monotonic(), self._read_w()
            if self._last is not None:
                self._joules += (now - self._last[0]) * (watts + self._last[1]) / 2
            self._last = now, watts

    def joules(self) -> float:
        """Return the energy since sampling began."""
        if self._error is not None:
            raise self._error
        self.sample()
        return self._joules

    def close(self) -> None:
        self._ended.set()

    @guard.entry(in_background=True)
    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            with guard.attempt() as sampling:  # drivers may raise anything
                self.sample()
            if sampling.error is not None:
                self._error = sampling.error
                return


class RaplZone:
    """A RAPL counter, which wraps to zero at its maximum."""

    def __init__(self, counter: Counter, file: Path, range_uj: float) -> None:
        self.counter = counter
        self.longest_s = range_uj / 1e6 / _MOST_WATTS
        self._file = file
        self._range_uj = range_uj
        self._rounds = 0
        self._last_uj = self._read_uj()

    def joules(self) -> float:
        """Return the energy since boot, modulo the counter's range."""
        now = self._read_uj()
        self._rounds += now < self._last_uj
        self._last_uj = now
        return (now + self._rounds * self._range_uj) / 1e6

    def close(self) -> None: ...

    def _read_uj(self) -> float:
        return float(self._file.read_text().strip())


def open_counters(devices: Sequence[int], *, with_host: bool) -> tuple[list[Source], list[MissingCounter]]:
    """Return every energy counter of these devices, numbered as the process sees them, and of the host.

    Args:
        with_host: include CPU packages and memory, which one process per machine measures for all.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            get_gpus = import_module("zeus.device.gpu").get_gpus
            get_cpus = import_module("zeus.device.cpu").get_cpus
    except ImportError:
        return [], [MissingCounter(kind, None, NO_PACKAGE) for kind in KINDS if with_host or kind == "gpu"]
    found = list(_devices(get_gpus, devices))
    found += list(_host(get_cpus)) if with_host else []
    missing = [each for each in found if isinstance(each, MissingCounter)]
    return [each for each in found if not isinstance(each, MissingCounter)], missing


def machine_identity() -> str:
    """Return an anonymous identity of this machine, the same for all its processes until the next boot."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _digest(f"{platform.node()} {boot}")


def _devices(get_gpus: Callable[[], Any], devices: Sequence[int]) -> Iterator[Source | MissingCounter]:
    with guard.attempt() as finding:  # errors of the library and of drivers
        gpus = get_gpus()
    if finding.error is not None:
        none = str(finding.error).startswith("NVML and AMDSMI unavailable")
        yield MissingCounter("gpu", None, NO_DRIVER if none else sentence(finding.error))
        return
    if not devices:
        yield MissingCounter("gpu", None, "the process used no device that can be measured")
    for number in devices:
        found: Source | None = None
        with guard.attempt() as reading:
            found = _device(number, gpus.gpus[number])
        yield found or MissingCounter("gpu", str(number), sentence(reading.error))


def _device(number: int, gpu: Any) -> Source:
    named = Counter("gpu", str(number), "counter", _identity(gpu), gpu.get_name())
    if gpu.supports_get_total_energy_consumption():
        gpu.get_total_energy_consumption()
        return DeviceCounter(named, gpu.get_total_energy_consumption)
    return _sampled(named, gpu)


def _sampled(named: Counter, gpu: Any) -> SampledPower:
    counter = Counter("gpu", named.device, "power samples", named.identity, named.name)
    return SampledPower(counter, lambda: gpu.get_instant_power_usage() / 1000)


def _host(get_cpus: Callable[[], Any]) -> Iterator[Source | MissingCounter]:
    packages: list[Any] = []
    with guard.attempt() as finding:
        packages = [cpu for cpu in get_cpus().cpus if _is_package(cpu)]
    if finding.error is not None:
        known = {"ZeusCPUInitError": NO_RAPL, "ZeusCPUNoPermissionError": NOT_ALLOWED}
        reason = known.get(type(finding.error).__name__) or sentence(finding.error)
        yield MissingCounter("cpu", None, reason)
        yield MissingCounter("dram", None, reason)
        return
    for cpu in packages:
        zones: tuple[tuple[Kind, Any], ...] = (
            ("cpu", getattr(cpu, "rapl_file", None)),
            ("dram", getattr(cpu, "dram", None)),
        )
        for kind, zone in zones:
            found: Source | None = None
            with guard.attempt() as reading:
                found = _zone(kind, str(cpu.cpu_index), zone, cpu)
            yield found or MissingCounter(kind, str(cpu.cpu_index), sentence(reading.error))


def _zone(kind: Kind, number: str, zone: Any, cpu: Any) -> Source:
    """Return the counter of a CPU package or its memory: RAPL's file, or zeus's daemon, which reads it.

    Raises LookupError if the package has no such counter.
    """
    counter = Counter(kind, number, "counter", name=getattr(zone, "name", None))
    if zone is not None:
        return RaplZone(counter, Path(zone.energy_uj_path), zone.max_energy_range_uj)
    if hasattr(cpu, "dram_available") and (kind == "cpu" or cpu.dram_available):

        def read() -> float:
            energy = cpu.get_total_energy_consumption()
            return float(energy.cpu_mj if kind == "cpu" else energy.dram_mj)

        read()
        return DeviceCounter(counter, read)
    raise LookupError("RAPL has no counter of it here")


def _is_package(cpu: Any) -> bool:
    """Whether this is a CPU package: RAPL may also count the whole platform, which includes the packages."""
    zone = getattr(cpu, "rapl_file", None)
    return zone is None or zone.name.startswith("package")


def _identity(gpu: Any) -> str | None:
    """Return an anonymous identity of a device, independent of its number in a process."""
    with guard.attempt():
        return _digest(str(import_module("pynvml").nvmlDeviceGetUUID(gpu.handle)))
    with guard.attempt():
        return _digest(str(import_module("amdsmi").amdsmi_get_gpu_device_uuid(gpu.handle)))
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
