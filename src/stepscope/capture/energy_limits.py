"""One program, measured once at each of several power limits of the devices; the limits are put back whatever happens.

<run>/power-limits.json    for each limit what a step took and used
"""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from types import FrameType
from typing import Any, Final

from stepscope.capture import guard
from stepscope.capture.batch_runs import INTERRUPTED
from stepscope.capture.energy_counters import NO_DRIVER, NO_PACKAGE
from stepscope.capture.energy_records import records_of, step_energies
from stepscope.capture.guard import sentence
from stepscope.capture.run_folder import RunFolder, write_json
from stepscope.errors import UsageError

NAME: Final = "power-limits.json"


@dataclass(frozen=True, slots=True)
class LimitRun:
    """The program at one limit.

    Attributes:
        limit_w: of each device.
        exit_code: of the program.
        step_ns: the mean measured step of the rank whose steps are the longest; None where none was measured.
        joules: of all devices, a step; None where they were not measured.
        windows: that the energy is of.
    """

    limit_w: float
    exit_code: int
    step_ns: float | None
    joules: float | None
    windows: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A power limit as the user gives it: watts, or a share of the most that the device allows, 0 to 1."""

    value: float
    is_share: bool = False


class DeviceLimits:
    """The power limits of the devices that a program would see.

    Args:
        gpus: what zeus finds; milliwatts.
    """

    def __init__(self, gpus: Any) -> None:
        self._gpus = gpus.gpus
        self._before = [gpu.get_power_management_limit() for gpu in self._gpus]

    def watts(self, limit: Limit) -> float:
        """What a limit means for these devices.

        Raises:
            UsageError: a device does not allow it.
        """
        bounds = [gpu.get_power_management_limit_constraints() for gpu in self._gpus]
        low, high = max(each[0] for each in bounds) / 1000, min(each[1] for each in bounds) / 1000
        watts = round(limit.value * high) if limit.is_share else limit.value
        if not low <= watts <= high:
            raise UsageError(f"a limit of {watts:g} W is not possible: the devices allow {low:g} to {high:g} W")
        return watts

    def set(self, watts: float) -> None:
        """Limit every device.

        Raises:
            UsageError: that is not allowed.
        """
        with guard.attempt() as setting, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zeus warns of what the next line tells
            for gpu in self._gpus:
                gpu.set_power_management_limit(round(watts * 1000))
        if setting.error is not None:  # of drivers and the library
            raise UsageError(
                f"the power limit cannot be changed: {sentence(setting.error)}; that needs root, or zeusd to do it"
            ) from setting.error

    def restore(self) -> None:
        """Put every device's limit back to what it was.

        Raises:
            UsageError: one cannot be put back; the message says how to.
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
            raise UsageError(f"power limits could not be put back, do so by hand: {'; '.join(lost)}")


def device_limits() -> DeviceLimits:
    """Of this machine's devices.

    Raises:
        UsageError: there is none whose limit can be known, or zeus is not installed.
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
    raise UsageError(f"the devices do not tell their power limits: {sentence(reading.error)}")


def measure_limits(
    limits: Sequence[float],
    devices: DeviceLimits,
    folder: RunFolder,
    run_program: Callable[[], int],
    say: Callable[[str], None],
) -> list[LimitRun]:
    """Run the program once at each limit; the devices have their own limits again at the end, also after errors.

    Args:
        limits: watts.
        run_program: runs it, measuring energy into the folder, and returns its exit code.
        say: is told what is about to happen.

    Raises:
        UsageError: a limit cannot be set, or the devices' own not be put back.
    """
    runs: list[LimitRun] = []
    with _ended_by_signals(), contextlib.ExitStack() as stack:
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
    return LimitRun(
        watts, code, max(times, default=None), sum(windows) / len(windows) if windows else None, len(windows)
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have a signal that would end this process at once end it as an exception does, so that limits are put back."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
