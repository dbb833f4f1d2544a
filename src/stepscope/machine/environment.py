"""Find what makes timings slow or noisy on this machine, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from stepscope.machine.checks import devices, memory, processor, settings
from stepscope.machine.observed import Machine, Observation, Runtime

__all__ = ["CHECKS", "Machine", "Observation", "Runtime", "inspect_environment", "observations_json"]

Check: TypeAlias = Callable[[Machine], Observation | list[Observation]]

CHECKS: Final[tuple[Check, ...]] = (
    processor.threads,
    processor.cpu_quota,
    processor.other_load,
    processor.governor,
    processor.turbo,
    processor.thermal_throttling,
    devices.device_state,
    devices.numa_affinity,
    devices.numa_balancing,
    memory.shared_memory,
    memory.memory_limit,
    memory.memory_pressure,
    memory.swap,
    memory.huge_pages,
    memory.allocator,
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
