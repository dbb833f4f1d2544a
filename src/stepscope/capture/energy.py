"""Measures the energy of a program's steps in windows, while no profiler runs.

A window lasts some seconds of whole steps, and the next one begins where it ends: counters are read at its borders,
when the devices that the process uses have done what they were given. Imports only the standard library; zeus comes
with the first window.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stepscope.capture import guard
from stepscope.capture.energy_counters import Source, machine_identity, open_counters
from stepscope.capture.guard import sentence
from stepscope.cost.energy_measured import KINDS, Counter, EnergyRecord, EnergyWindow, MissingCounter

WINDOW_S: Final = 2.0
"""A window ends with the first step after this: NVML's counters change about every 100 ms, shorter ones say little."""
MEASURED_S: Final = 10.0
"""The program is measured at least this long, where it goes on for so long."""
_LOCAL_RANKS: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

OpenCounters = Callable[..., tuple[list[Source], list[MissingCounter]]]


@dataclass(slots=True)
class _Border:
    """What the counters said at one moment; a counter that failed is not in it."""

    ns: int
    joules: dict[str, float]


class EnergyMeter:
    """Measures steps of one thread between calls of `begins` and `ended`. Never raises.

    Args:
        uses_jax: whether the program's devices are JAX's.
        opens: finds the counters.
        clock_ns: tells the time in nanoseconds.

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
        self._begun: _Border | None = None
        self._first_step = 0
        self._steps = 0
        self._over = False

    def begins(self, step: int) -> None:
        """A step of this number begins, which is to be measured; the first one waits for the counters to be found."""
        if self._over:
            return
        if self._sources is None:
            self._open()
        if self._sources and self._begun is None:
            self._begun = self._border()
            self._first_step, self._steps = step, 0

    def ended(self) -> None:
        """The step has ended."""
        if self._begun is not None:
            self._steps += 1
            if self._clock_ns() - self._begun.ns >= WINDOW_S * 1e9:
                self._close_window()

    def wants_more(self, past_s: float) -> bool:
        """Whether the program should be measured for longer, so long after the recording."""
        return not self._over and self._sources != [] and past_s < MEASURED_S

    def pauses(self) -> None:
        """What comes is not to be measured: a window that is open is forgotten."""
        self._begun = None

    def clear(self) -> None:
        """Forget what was measured, such as when the steps turn out to be others."""
        self._begun = None
        self.record.windows.clear()

    def finish(self) -> None:
        """Measure no more; a window that is not full is forgotten, and what has no number is named."""
        if self._over:
            return
        self._over, self._begun = True, None
        for source in self._sources or ():
            source.close()
            if not self.record.windows:
                self._lacks(source.counter, f"no window of {WINDOW_S:g} s of steps after the recording was full")
        if self._sources is None:
            reason = "the program took no step after the recording"
            self.record.missing += [MissingCounter(kind, None, reason) for kind in KINDS]

    def _open(self) -> None:
        sources: list[Source] = []
        missing: list[MissingCounter] = []
        with guard.attempt() as opening:  # whatever a driver or a library may raise
            self._devices = devices_in_use(self._uses_jax())
            sources, missing = self._opens(self._devices, with_host=is_first_of_its_machine())
        if opening.error is not None:
            missing = [MissingCounter("gpu", None, sentence(opening.error))]
        self._sources = sources
        self.record.counters = [source.counter for source in sources]
        self.record.missing += missing

    def _border(self) -> _Border:
        """Wait for the devices, and read every counter; where they cannot be waited for, only those of the host."""
        with guard.attempt() as waiting:
            synchronise(self._devices, self._uses_jax())
        waited = waiting.error is None
        if waiting.error is not None:
            reason = f"the devices could not be waited for: {sentence(waiting.error)}"
            for source in self._sources or ():
                if source.counter.kind == "gpu":
                    self._lacks(source.counter, reason)
        border = _Border(self._clock_ns(), {})
        for source in self._sources or ():
            if waited or source.counter.kind != "gpu":
                with guard.attempt() as reading:
                    border.joules[source.counter.key] = source.joules()
                if reading.error is not None:
                    self._lacks(source.counter, sentence(reading.error))
        return border

    def _close_window(self) -> None:
        """End the window and begin the next one at the same moment."""
        begun, now = self._begun, self._border()
        assert begun is not None
        joules = {}
        for source in self._sources or ():
            key = source.counter.key
            if key in begun.joules and key in now.joules:
                reason = _why_nothing(now.joules[key] - begun.joules[key], (now.ns - begun.ns) / 1e9, source)
                if reason is None:
                    joules[key] = now.joules[key] - begun.joules[key]
                else:
                    self._lacks(source.counter, reason)
        self.record.windows.append(EnergyWindow(self._first_step, self._steps, now.ns - begun.ns, joules))
        self._begun = now
        self._first_step, self._steps = self._first_step + self._steps, 0

    def _lacks(self, counter: Counter, reason: str) -> None:
        lack = MissingCounter(counter.kind, counter.device, reason)
        if lack not in self.record.missing:
            self.record.missing.append(lack)


def _why_nothing(joules: float, seconds: float, source: Source) -> str | None:
    """Why a difference of a counter says nothing; None where it does."""
    if joules <= 0:
        return f"its counter did not move in {seconds:.3g} s"
    if seconds > source.longest_s:
        return f"its counter may have come round more than once in {seconds:.3g} s"
    return None


def is_first_of_its_machine() -> bool:
    """Whether this process is the one of its machine that measures what all share."""
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def devices_in_use(uses_jax: bool) -> list[int]:
    """The GPUs on which this process has anything, as it numbers them; asks only libraries that are at work."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        numbers = range(torch.cuda.device_count())
        return [each for each in numbers if torch.cuda.memory_reserved(each)] or [torch.cuda.current_device()]
    if uses_jax:
        jax: Any = sys.modules["jax"]
        return [device.local_hardware_id for device in jax.local_devices() if device.platform == "gpu"]
    return []


def synchronise(devices: Sequence[int], uses_jax: bool) -> None:
    """Wait until these devices have done what they were given."""
    if not devices:
        return
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in devices:
            torch.cuda.synchronize(device)
    elif uses_jax:
        jax: Any = sys.modules["jax"]
        # A queue is done when a value that is put into it now has arrived.
        jax.block_until_ready([jax.device_put(0.0, each) + 0 for each in jax.local_devices() if each.platform == "gpu"])
