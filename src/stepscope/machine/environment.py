"""Find what makes timings slow or noisy on this machine, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from stepscope.machine.checks import devices, host, settings
from stepscope.machine.observed import Machine, Observation, Runtime

__all__ = ["CHECKS", "Machine", "Observation", "Runtime", "inspect_environment", "observations_json"]

Check: TypeAlias = Callable[[Machine], Observation | list[Observation]]

CHECKS: Final[tuple[Check, ...]] = (
    host.threads,
    host.cpu_quota,
    host.other_load,
    host.governor,
    host.turbo,
    host.thermal_throttling,
    devices.device_state,
    devices.numa_affinity,
    devices.numa_balancing,
    host.shared_memory,
    host.memory_limit,
    host.memory_pressure,
    host.swap,
    host.huge_pages,
    host.allocator,
    settings.debug_settings,
    settings.program_settings,
    settings.garbage_collector,
    settings.versions,
    settings.power_supply,
)
"""All checks, in the order of the report."""

_ORDER: Final = ("problem", "note", "fine", "unknown")


def inspect_environment(machine: Machine) -> list[Observation]:
    """Run every check on the machine and the process; problems come first, then notes, fine and unknown."""
    found: list[Observation] = []
    for check in CHECKS:
        said = check(machine)
        found.extend(said if isinstance(said, list) else [said])
    return sorted(found, key=lambda observation: _ORDER.index(observation.verdict))


def observations_json(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """Convert observations to JSON values with keys check, verdict, title, read, why, change."""
    return [asdict(observation) for observation in observations]
