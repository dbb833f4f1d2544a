"""Measure a device: matrix products by number type, copies, and the time of a small kernel.

Measured with this process's torch, on the device itself. Each figure is the median of several runs, and each run is
long enough to hide the launch and the synchronisation, which happens before and after each run. docs/devices.md has
the formulas.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.machine.devices import NUMBER_TYPES, DevicePeaks, figures_of, find_device
from stepscope.machine.environment import memory_bytes
from stepscope.machine.observed import Machine

COPIES: Final = ("copy on the device", "copy to the device", "copy from the device")
SMALL_KERNEL: Final = "small kernel"
_COPY_BYTES: Final = 512 << 20
_MOST_OF_MEMORY: Final = 8
"""Buffers take at most one eighth of the free memory."""
_SMALLEST_SIDE: Final = 512
_LARGEST_SIDE: Final = 16384
_LARGE_ENOUGH_S: Final = 5e-3
"""Above this time per product, larger products are barely faster."""
_SMALL_KERNELS: Final = 500


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: `runs` of at least `run_s` seconds each, after `warm_s` seconds of the same work."""

    runs: int = 15  # at least two
    run_s: float = 0.03
    warm_s: float = 0.5


QUICK: Final = Effort(runs=3, run_s=0.005, warm_s=0.05)
"""For a quick estimate."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure: median and quartiles of the runs, in bytes or operations per second, or nanoseconds.

    `detail` describes the workload.
    """

    median: float
    low: float
    high: float
    detail: str

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True, slots=True)
class DeviceMeasurements:
    """A device as torch and the system describe it, and its measured figures.

    Attributes:
        name: the driver's name; for a CPU, its model and the number of torch threads.
        is_cpu: whether it is the host's CPU.
        compute_capability: as PyTorch reports it; None if it has none.
        multiprocessors: or compute units; for a CPU, threads.
        rates: operations per second of large square matrix products, by number type.
        copies: bytes per second, by COPIES; within the device, bytes read and written both count.
        kernel_ns: from one small kernel's start to the next one's, replayed from a device graph if supported.
        skipped: figures that could not be measured, with the reason.
    """

    name: str
    vendor: str
    is_cpu: bool
    compute_capability: str | None
    multiprocessors: int | None
    memory_bytes: int | None
    cache_bytes: int | None
    rates: dict[str, Figure]
    copies: dict[str, Figure]
    kernel_ns: Figure | None
    skipped: dict[str, str]
    torch_version: str


def measure_device(
    device: str | None = None, *, effort: Effort | None = None, progress: Callable[[str], None] | None = None
) -> DeviceMeasurements:
    """Measure a device with this process's torch.

    Args:
        device: torch's name, such as "cuda:0"; by default the first accelerator, else the CPU.
        progress: called with the name of the next measurement.

    Raises UsageError if torch cannot be imported, or the device does not exist.
    """
    bench = _Bench(_torch(), device, effort or Effort(), progress or (lambda _: None))
    with bench.full_precision():
        for kind in NUMBER_TYPES:
            bench.add(kind, bench.rates, bench.matrix_product)
        for way in COPIES:
            bench.add(way, bench.copies, bench.copy)
        bench.add(SMALL_KERNEL, bench.kernels, bench.small_kernels)
    return bench.measurements()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"measuring needs PyTorch, which cannot be imported here: {error}; "
            "install stepscope into the environment of your training and run it there"
        ) from error
    return torch


class _Cannot(Exception):
    """A figure that cannot be measured on this device or with this torch; the message gives the reason."""


class _Bench:
    def __init__(self, torch: Any, device: str | None, effort: Effort, progress: Callable[[str], None]) -> None:
        self.torch = torch
        self.device = _device(torch, device)
        self.effort = effort
        self.progress = progress
        self.module = torch.cpu if self.device.type == "cpu" else torch.get_device_module(self.device)
        self.rates: dict[str, Figure] = {}
        self.copies: dict[str, Figure] = {}
        self.kernels: dict[str, Figure] = {}
        self.skipped: dict[str, str] = {}
        self.memory, self.units, self.capability, self.cache = self._described()

    @property
    def is_cpu(self) -> bool:
        return bool(self.device.type == "cpu")

    def add(self, what: str, figures: dict[str, Figure], measure: Callable[[str], Figure]) -> None:
        """Measure a figure or record why not: torch raises any kind of error for unsupported operations."""
        self.progress(what)
        try:
            figures[what] = measure(what)
        except _Cannot as error:
            self.skipped[what] = str(error)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
            self.skipped[what] = " ".join(str(error).split(".")[0].split())[:200] or type(error).__name__

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Compute FP32 products in full FP32 inside the block, and restore the setting afterwards."""
        before = self.torch.get_float32_matmul_precision()
        self.torch.set_float32_matmul_precision("highest")
        try:
            with self.torch.no_grad():
                yield
        finally:
            self.torch.set_float32_matmul_precision(before)

    def matrix_product(self, kind: str) -> Figure:
        """Return operations per second of a square matrix product: 2 n^3 divided by its time."""
        if kind != "tf32":
            return self._product(kind)
        if self.device.type != "cuda" or self.torch.version.hip or int((self.capability or "0").split(".")[0]) < 8:
            raise _Cannot("the device has no TF32")
        self.torch.set_float32_matmul_precision("high")
        try:
            return self._product("fp32")
        finally:
            self.torch.set_float32_matmul_precision("highest")

    def _product(self, kind: str) -> Figure:
        side = _SMALLEST_SIDE
        multiply = self._multiplication(kind, side)
        while not self._is_long(multiply) and self._fits(2 * side):
            side *= 2
            multiply = self._multiplication(kind, side)
        return self._figure(multiply, lambda seconds: 2 * side**3 / seconds, f"products of {side} x {side} matrices")

    def _is_long(self, work: Callable[[], object]) -> bool:
        """Whether the work lasts long enough: clearly at first, or in the shortest of three more runs."""
        first = self._timed(work, 1)
        return first >= 20 * _LARGE_ENOUGH_S or min(self._timed(work, 1) for _ in range(3)) >= _LARGE_ENOUGH_S

    def _fits(self, side: int) -> bool:
        return side <= _LARGEST_SIDE and 4 * 8 * side**2 <= self._free() / _MOST_OF_MEMORY

    def _multiplication(self, kind: str, side: int) -> Callable[[], object]:
        torch, device = self.torch, self.device
        if kind == "int8":
            left, right = (torch.randint(-8, 8, (side, side), dtype=torch.int8, device=device) for _ in range(2))
            return lambda: torch._int_mm(left, right.t())
        values = (torch.randn(side, side, device=device) for _ in range(2))
        if kind == "fp8":
            if not hasattr(torch, "float8_e4m3fn"):
                raise _Cannot(f"torch {torch.__version__} has no 8-bit floating-point numbers")
            left, right = (one.to(torch.float8_e4m3fn) for one in values)
            one = torch.ones((), device=device)
            return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        dtypes = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        left, right = (one.to(dtypes[kind]) for one in values)
        result = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=result)

    def copy(self, way: str) -> Figure:
        """Return bytes per second of a large copy; within the device, bytes read and written both count."""
        torch = self.torch
        if self.is_cpu and way != "copy on the device":
            raise _Cannot("the CPU is the host")
        count = min(_COPY_BYTES, int(self._free() / _MOST_OF_MEMORY) // 4096 * 4096)
        pinned = {"pin_memory": not self.is_cpu}
        ends: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "copy on the device": ({"device": self.device}, {"device": self.device}),
            "copy to the device": (pinned, {"device": self.device}),
            "copy from the device": ({"device": self.device}, pinned),
        }
        source, target = (torch.ones(count, dtype=torch.uint8, **where) for where in ends[way])
        moved = 2 * count if way == "copy on the device" else count
        detail = f"copies of {count >> 20:,} MiB" + ("" if way == "copy on the device" else ", page-locked on the host")
        return self._figure(lambda: target.copy_(source, non_blocking=True), lambda seconds: moved / seconds, detail)

    def small_kernels(self, _: str) -> Figure:
        """Return nanoseconds between small kernels, replayed from a graph so that the host is not the limit."""
        number = self.torch.zeros(1, device=self.device)

        def work() -> None:
            for _ in range(_SMALL_KERNELS):
                number.add_(1)

        work()
        run, detail = work, "additions to one number, one after the other"
        if self.device.type == "cuda":
            self.module.synchronize(self.device)
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.device(self.device), self.torch.cuda.graph(graph):
                work()
            run, detail = graph.replay, f"a graph of {_SMALL_KERNELS} additions to one number"
        return self._figure(run, lambda seconds: seconds * 1e9 / _SMALL_KERNELS, detail)

    def _figure(self, work: Callable[[], object], value: Callable[[float], float], detail: str) -> Figure:
        """Run until warm, then measure `runs` times."""
        calls, warm = 1, time.perf_counter() + self.effort.warm_s
        seconds = self._timed(work, calls)
        while time.perf_counter() < warm or seconds < self.effort.run_s:
            if seconds < self.effort.run_s:
                calls = max(calls + 1, int(calls * min(self.effort.run_s / max(seconds, 1e-9), 100.0)))
            seconds = self._timed(work, calls)
        values = [value(self._timed(work, calls) / calls) for _ in range(self.effort.runs)]
        low, _, high = quantiles(values, n=4, method="inclusive")
        return Figure(median(values), low, high, detail)

    def _timed(self, work: Callable[[], object], calls: int) -> float:
        """Return the seconds for that many calls, from idle device to idle device."""
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type in ("cuda", "xpu"):
            self.module.synchronize(self.device)
        elif not self.is_cpu:  # other accelerators are used one at a time
            self.module.synchronize()

    def _free(self) -> float:
        if self.device.type == "cuda":
            return float(self.torch.cuda.mem_get_info(self.device)[0])
        return float(self.memory or 4 * _COPY_BYTES)

    def _described(self) -> tuple[int | None, int | None, str | None, int | None]:
        if self.is_cpu:
            return memory_bytes(Machine()), self.torch.get_num_threads(), None, None
        read = getattr(self.module, "get_device_properties", None)
        found = None if read is None else read(self.device)
        major, minor = getattr(found, "major", None), getattr(found, "minor", None)
        units = getattr(found, "multi_processor_count", None)
        capability = None if not isinstance(major, int) else f"{major}.{minor}"
        return getattr(found, "total_memory", None), units, capability, getattr(found, "L2_cache_size", None) or None

    def measurements(self) -> DeviceMeasurements:
        return DeviceMeasurements(
            name=self._name(),
            vendor=self._vendor(),
            is_cpu=self.is_cpu,
            compute_capability=self.capability,
            multiprocessors=self.units,
            memory_bytes=self.memory,
            cache_bytes=self.cache,
            rates=self.rates,
            copies=self.copies,
            kernel_ns=self.kernels.get(SMALL_KERNEL),
            skipped=self.skipped,
            torch_version=str(self.torch.__version__),
        )

    def _name(self) -> str:
        if self.is_cpu:
            threads = "1 thread" if self.units == 1 else f"{self.units} threads"
            return f"{_processor()} ({threads})"
        name = getattr(self.module, "get_device_name", None)
        return str(name(self.device)) if name else str(self.device)

    def _vendor(self) -> str:
        if self.device.type == "cuda":
            return "AMD" if self.torch.version.hip else "NVIDIA"
        return ""


def _device(torch: Any, named: str | None) -> Any:
    """Return the device of this name, after a first operation on it. Raises UsageError if it does not exist."""
    if named is None:
        accelerator = getattr(torch, "accelerator", None)
        found = accelerator.current_accelerator() if accelerator and accelerator.is_available() else None
        named = f"{found.type}:0" if found is not None else "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(named)
        if device.type in ("cuda", "xpu") and device.index is None:
            device = torch.device(device.type, 0)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError, ModuleNotFoundError) as error:
        why = " ".join(str(error).split(". ")[0].split()).rstrip(".") or type(error).__name__
        raise UsageError(f"there is no device {named!r} for torch {torch.__version__} here: {why[:200]}") from error
    return device


def _processor() -> str:
    machine = Machine()
    lines = (machine.read("proc/cpuinfo") or "").splitlines()
    models = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(models, "").split()) or platform.processor() or f"{platform.machine()} processor"


_DIGITS: Final = 4
"""Significant digits of a measured figure; runs differ by more."""
_UNSTEADY: Final = 0.1
"""Above this interquartile range, as a share of the median, a figure is unreliable."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The device in the form that a trace describes it."""

    name: str | None
    memory_bytes: int | None
    compute_capability: str | None
    multiprocessors: int | None


def known_device(measured: DeviceMeasurements) -> DevicePeaks | None:
    """Return the measured device's row in the table, if any."""
    if measured.is_cpu:
        return None
    return find_device(
        _Seen(measured.name, measured.memory_bytes, measured.compute_capability, measured.multiprocessors)
    )


def measured_row(measured: DeviceMeasurements, name: str | None = None) -> dict[str, Any]:
    """Convert the measurements to a table of a TOML file, with the maker's figures if the device is in the table.

    Args:
        name: the row's name; by default that of the table's row, which it then replaces.
    """
    known = known_device(measured)
    row: dict[str, Any] = figures_of(known) if known is not None else {"vendor": measured.vendor}
    row["name"] = name or (known.name if known is not None else measured.name)
    if name is not None:
        row.pop("aliases", None)
    row["driver_names"] = [measured.name]
    described = {
        "capability": measured.compute_capability,
        "multiprocessors": measured.multiprocessors,
        "memory_gb": None if measured.memory_bytes is None else round(measured.memory_bytes / 1e9, 3),
        "cache_mib": None if measured.cache_bytes is None else round(measured.cache_bytes / 2**20, 3),
    }
    row = {key: value for key, value in described.items() if value} | {k: v for k, v in row.items() if v}
    row["measured_tflop_s"] = {kind: _rounded(figure.median / 1e12) for kind, figure in measured.rates.items()}
    on_device, *over_link = (measured.copies.get(way) for way in COPIES)
    if on_device is not None:
        row["measured_bandwidth_gb_s"] = _rounded(on_device.median / 1e9)
    if all(over_link):
        row["host_link_gb_s"] = _rounded(min(figure.median for figure in over_link if figure) / 1e9)
    if measured.kernel_ns is not None:
        row["launch_us"] = _rounded(measured.kernel_ns.median / 1e3)
    row["measured_source"] = f"stepscope devices measure, with torch {measured.torch_version}"
    return row


def measured_lines(measured: DeviceMeasurements) -> Iterator[str]:
    """Yield a sentence for each figure with its spread and workload, and for each that could not be measured."""
    yield f"Measured on {measured.name}, with torch {measured.torch_version}:"
    for kind, figure in measured.rates.items():
        yield _line(f"{kind} products", figure, 1e12, "TFLOP/s" if kind != "int8" else "TOP/s")
    for way, figure in measured.copies.items():
        yield _line(way, figure, 1e9, "GB/s")
    if measured.kernel_ns is not None:
        yield _line(SMALL_KERNEL, measured.kernel_ns, 1e3, "us")
    if max((figure.spread for figure in _figures(measured)), default=0.0) > _UNSTEADY:
        yield "  The runs differ widely: other programs used the machine. Measure again when it is idle."
    for what, why in measured.skipped.items():
        yield f"  {what}: not measured: {why}"


def _figures(measured: DeviceMeasurements) -> list[Figure]:
    kernel = [] if measured.kernel_ns is None else [measured.kernel_ns]
    return [*measured.rates.values(), *measured.copies.values(), *kernel]


def _line(what: str, figure: Figure, unit: float, name: str) -> str:
    value = f"{_rounded(figure.median / unit):,} {name}"
    return f"  {what}: {value}, the middle half of the runs within {figure.spread:.0%}; {figure.detail}"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
