"""How busy others keep the machine while a program runs."""

from __future__ import annotations

import os
import time

from stepscope.capture.environment_machine import Machine

try:
    import resource
except ImportError:  # not on Windows, where there is no /proc/stat either
    resource = None  # type: ignore[assignment]


class LoadMeter:
    """Counts, from its making on, the processor time of the whole machine and that of this process and its children."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._begun_s = time.monotonic()
        self._machine_s = _machine_seconds(self._machine)
        self._own_s = _own_seconds()

    def other_cores(self) -> float | None:
        """Cores that others kept busy since, on average; None where the system does not say.

        Children count when they have ended and been waited for.
        """
        seconds, machine_s, own_s = time.monotonic() - self._begun_s, _machine_seconds(self._machine), _own_seconds()
        if self._machine_s is None or machine_s is None or self._own_s is None or own_s is None or seconds <= 0:
            return None
        return max(machine_s - self._machine_s - (own_s - self._own_s), 0.0) / seconds


def _machine_seconds(machine: Machine) -> float | None:
    """Seconds that all cores together were busy, without what a hypervisor took."""
    try:
        words = (machine.read("proc/stat") or "").splitlines()[0].split()
        user, nice, system, _, _, irq, soft = map(int, words[1:8])
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    except (ValueError, IndexError, AttributeError):
        return None


def _own_seconds() -> float | None:
    if resource is None:
        return None
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
