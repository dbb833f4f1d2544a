"""Measure the energy of a program's steps in windows, while no profiler runs.

A window is some seconds of whole steps, and the next one begins where it ends: counters are read at its ends, after
the devices of the process have finished their work. Imports only the standard library; zeus is imported with the
first window.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.guard import sentence
from stepscope.machine.energy_counters import NO_DRIVER, NO_PACKAGE, Source, machine_identity, open_counters
from stepscope.record.launch import INTERRUPTED
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.threads import ENDING, handled, leave
from stepscope.trace.energy_records import (
    KINDS,
    Counter,
    EnergyRecord,
    EnergyWindow,
    MissingCounter,
    records_of,
    step_energies,
)

WINDOW_S: Final = 2.0
"""A window ends with the first step after this: NVML's counters change about every 100 ms, so shorter ones are
inaccurate.
"""
MEASURED_S: Final = 10.0
"""Minimum measured time, if the program runs that long."""
_LOCAL_RANKS: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

OpenCounters = Callable[..., tuple[list[Source], list[MissingCounter]]]


@dataclass(slots=True)
class _Border:
    """The counters at one moment, without those that failed."""

    ns: int
    joules: dict[str, float]


class EnergyMeter:
    """Measures the energy of one thread's steps between calls of `begins` and `ended`; never raises.

    Args:
        uses_jax: whether the program's devices are JAX's.
        opens: finds the counters.

    Attributes:
        record: what was measured so far, and what could not be.
    """

    def __init__(
        self,
        *,
        uses_jax: Callable[[], bool] = lambda: False,
        opens: OpenCounters = open_counters,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.record = EnergyRecord(machine_identity())
        self._uses_jax = uses_jax
        self._opens = opens
        self._clock_ns = clock_ns
        self._sources: list[Source] | None = None
        self._devices: Sequence[int] = ()
        self._started: _Border | None = None
        self._first_step = 0
        self._steps = 0
        self._over = False

    def begins(self, step: int) -> None:
        """Begin to measure a step; the first call waits until the counters have been found."""
        if self._over:
            return
        if self._sources is None:
            self._open()
        if self._sources and self._started is None:
            self._started = self._border()
            self._first_step, self._steps = step, 0

    def ended(self) -> None:
        if self._started is not None:
            self._steps += 1
            if self._clock_ns() - self._started.ns >= WINDOW_S * 1e9:
                self._close_window()

    def wants_more(self, past_s: float) -> bool:
        """Whether to measure the program for longer, `past_s` seconds after the recording."""
        return not self._over and self._sources != [] and past_s < MEASURED_S

    def pauses(self) -> None:
        """Drop the current window: the next steps are not measured."""
        self._started = None

    def clear(self) -> None:
        self._started = None
        self.record.windows.clear()

    def finish(self) -> None:
        """Stop measuring; drop an incomplete window, and list the counters without a value."""
        if self._over:
            return
        self._over, self._started = True, None
        for source in self._sources or ():
            source.close()
            if not self.record.windows:
                self._lacks(source.counter, f"no window of {WINDOW_S:g} s of steps after the recording was complete")
        if self._sources is None:
            reason = "the program took no step after the recording"
            self.record.missing += [MissingCounter(kind, None, reason) for kind in KINDS]

    def _open(self) -> None:
        sources: list[Source] = []
        missing: list[MissingCounter] = []
        with guard.attempt() as opening:  # drivers and libraries may raise anything
            self._devices = devices_in_use(self._uses_jax())
            sources, missing = self._opens(self._devices, with_host=is_first_of_its_machine())
        if opening.error is not None:
            missing = [MissingCounter("gpu", None, sentence(opening.error))]
        self._sources = sources
        self.record.counters = [source.counter for source in sources]
        self.record.missing += missing

    def _border(self) -> _Border:
        """Wait for the devices and read every counter; read only the host's if the devices cannot be waited for."""
        with guard.attempt() as waiting:
            synchronise(self._devices, self._uses_jax())
        border = _Border(self._clock_ns(), {})
        for source in self._sources or ():
            if waiting.error is not None and source.counter.kind == "gpu":
                self._lacks(source.counter, f"the devices could not be waited for: {sentence(waiting.error)}")
                continue
            with guard.attempt() as reading:
                border.joules[source.counter.key] = source.joules()
            if reading.error is not None:
                self._lacks(source.counter, sentence(reading.error))
        return border

    def _close_window(self) -> None:
        """End the window and begin the next one at the same moment."""
        started, now = self._started, self._border()
        assert started is not None
        joules = {}
        for source in self._sources or ():
            key = source.counter.key
            if key in started.joules and key in now.joules:
                used = now.joules[key] - started.joules[key]
                reason = _why_unusable(used, (now.ns - started.ns) / 1e9, source)
                if reason is None:
                    joules[key] = used
                else:
                    self._lacks(source.counter, reason)
        self.record.windows.append(EnergyWindow(self._first_step, self._steps, now.ns - started.ns, joules))
        self._started = now
        self._first_step, self._steps = self._first_step + self._steps, 0

    def _lacks(self, counter: Counter, reason: str) -> None:
        lack = MissingCounter(counter.kind, counter.device, reason)
        if lack not in self.record.missing:
            self.record.missing.append(lack)


def _why_unusable(joules: float, seconds: float, source: Source) -> str | None:
    """Return why the difference of a counter is unusable; None if it is usable."""
    if joules <= 0:
        return f"its counter did not change in {seconds:.3g} s"
    if seconds > source.longest_s:
        return f"its counter may have wrapped more than once in {seconds:.3g} s"
    return None


def is_first_of_its_machine() -> bool:
    """Whether this process measures the counters that all processes of its machine share."""
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def _torch_on_cuda() -> Any:
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def devices_in_use(uses_jax: bool) -> list[int]:
    """Return the GPUs that this process uses, as it numbers them; queries only initialised libraries."""
    torch = _torch_on_cuda()
    if torch is not None:
        numbers = range(torch.cuda.device_count())
        return [each for each in numbers if torch.cuda.memory_reserved(each)] or [torch.cuda.current_device()]
    if uses_jax:
        jax: Any = sys.modules["jax"]
        return [device.local_hardware_id for device in jax.local_devices() if device.platform == "gpu"]
    return []


def synchronise(devices: Sequence[int], uses_jax: bool) -> None:
    if not devices:
        return
    torch = _torch_on_cuda()
    if torch is not None:
        for device in devices:
            torch.cuda.synchronize(device)
    elif uses_jax:
        jax: Any = sys.modules["jax"]
        # A stream is finished when a value enqueued now has arrived.
        jax.block_until_ready([jax.device_put(0.0, each) + 0 for each in jax.local_devices() if each.platform == "gpu"])


NAME: Final = "power-limits.json"


@dataclass(frozen=True, slots=True)
class LimitRun:
    """One run of the program at a power limit.

    Attributes:
        limit_w: limit of each device in watts.
        step_ns: mean measured step time of the slowest rank; None if none was measured.
        joules: energy of all devices per step; None if it was not measured.
        windows: number of energy windows.
    """

    limit_w: float
    exit_code: int
    step_ns: float | None
    joules: float | None
    windows: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A power limit as the user gives it: watts, or a share of the device's maximum, 0 to 1."""

    value: float
    is_share: bool = False


class DeviceLimits:
    """The power limits of the devices visible to a program, through zeus (milliwatts)."""

    def __init__(self, gpus: Any) -> None:
        self._gpus = gpus.gpus
        self._before = [gpu.get_power_management_limit() for gpu in self._gpus]

    def watts(self, limit: Limit) -> float:
        """Convert a limit to watts for these devices. Raises UsageError if a device does not allow it."""
        bounds = [gpu.get_power_management_limit_constraints() for gpu in self._gpus]
        low, high = max(each[0] for each in bounds) / 1000, min(each[1] for each in bounds) / 1000
        watts = round(limit.value * high) if limit.is_share else limit.value
        if not low <= watts <= high:
            raise UsageError(f"a limit of {watts:g} W is not possible: the devices allow {low:g} to {high:g} W")
        return watts

    def set(self, watts: float) -> None:
        """Limit every device. Raises UsageError if the limit is not allowed."""
        with guard.attempt() as setting, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zeus warns about what the error already reports
            for gpu in self._gpus:
                gpu.set_power_management_limit(round(watts * 1000))
        if setting.error is not None:  # errors of drivers and of the library
            raise UsageError(
                f"the power limit cannot be changed: {sentence(setting.error)}; that needs root, or zeusd to do it"
            ) from setting.error

    def restore(self) -> None:
        """Restore every device's original limit.

        Raises UsageError if a limit cannot be restored; the message says how to do it by hand.
        """
        lost = []
        for number, (gpu, limit) in enumerate(zip(self._gpus, self._before, strict=True)):
            with guard.attempt() as setting, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if gpu.get_power_management_limit() != limit:
                    gpu.set_power_management_limit(limit)
            if setting.error is not None:
                why = sentence(setting.error)
                lost.append(f"device {number} ({why}): nvidia-smi -i {number} -pl {limit / 1000:g}")
        if lost:
            raise UsageError(f"power limits could not be restored, do so by hand: {'; '.join(lost)}")


def device_limits() -> DeviceLimits:
    """Return the power limits of this machine's devices.

    Raises UsageError if no device has a readable limit, or zeus is not installed.
    """
    gpus: Any = ()
    with guard.attempt() as finding, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gpus = import_module("zeus.device.gpu").get_gpus()
    if isinstance(finding.error, ImportError):
        raise UsageError(f"power limits cannot be changed: {NO_PACKAGE}")
    if finding.error is not None:
        none = str(finding.error).startswith("NVML and AMDSMI unavailable")
        raise UsageError(f"power limits cannot be changed: {NO_DRIVER if none else sentence(finding.error)}")
    if not len(gpus):
        raise UsageError(f"power limits cannot be changed: {NO_DRIVER}")
    with guard.attempt() as reading:
        return DeviceLimits(gpus)
    raise UsageError(f"the devices do not report their power limits: {sentence(reading.error)}")


def measure_limits(
    limits: Sequence[float],
    devices: DeviceLimits,
    folder: RunFolder,
    run_program: Callable[[], int],
    say: Callable[[str], None],
) -> list[LimitRun]:
    """Run the program once at each limit (watts); always restore the original limits at the end.

    Args:
        run_program: runs the program, measuring energy into the folder; returns its exit code.
        say: called with a progress message.

    Raises UsageError if a limit cannot be set or restored.
    """
    runs: list[LimitRun] = []
    with handled(leave, *ENDING), contextlib.ExitStack() as stack:
        stack.callback(devices.restore)
        for watts in limits:
            devices.set(watts)
            say(f"power limit {watts:g} W")
            seen = {one.get("process") for one in folder.recordings()}
            code = run_program()
            left = [one for one in folder.recordings() if one.get("process") not in seen]
            runs.append(_run(watts, code, left))
            write_json(folder.path / NAME, {"runs": [asdict(run) for run in runs]})
            if code == INTERRUPTED:
                break
    return runs


def _run(watts: float, code: int, left: Sequence[dict[str, Any]]) -> LimitRun:
    windows = step_energies([left])["gpu"][0]
    times = [record.step_ns for _, record in records_of(left) if record.step_ns is not None]
    joules = sum(windows) / len(windows) if windows else None
    return LimitRun(watts, code, max(times, default=None), joules, len(windows))
