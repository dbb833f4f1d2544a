"""What makes timings slow or noisy on this machine, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from stepscope.capture import (
    environment_devices,
    environment_memory,
    environment_processor,
    environment_settings,
)
from stepscope.capture.environment_machine import Machine, Observation, Runtime

__all__ = ["CHECKS", "Machine", "Observation", "Runtime", "inspect_environment", "observations_json"]

Check: TypeAlias = Callable[[Machine], Observation | list[Observation]]

CHECKS: Final[tuple[Check, ...]] = (
    environment_processor.threads,
    environment_processor.cpu_quota,
    environment_processor.other_load,
    environment_processor.governor,
    environment_processor.turbo,
    environment_processor.thermal_throttling,
    environment_devices.device_state,
    environment_devices.numa_affinity,
    environment_devices.numa_balancing,
    environment_memory.shared_memory,
    environment_memory.memory_limit,
    environment_memory.memory_pressure,
    environment_memory.swap,
    environment_memory.huge_pages,
    environment_memory.allocator,
    environment_settings.debug_settings,
    environment_settings.program_settings,
    environment_settings.garbage_collector,
    environment_settings.versions,
    environment_settings.power_supply,
)
"""Everything that is looked at, in the order of the report."""

_ORDER: Final = ("problem", "note", "fine", "unknown")


def inspect_environment(machine: Machine) -> list[Observation]:
    """What each check says of the machine and the process on it: problems first, then notes, fine and unknown."""
    found: list[Observation] = []
    for check in CHECKS:
        said = check(machine)
        found.extend(said if isinstance(said, list) else [said])
    return sorted(found, key=lambda observation: _ORDER.index(observation.verdict))


def observations_json(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """The observations as JSON values: keys check, verdict, title, read, why, change."""
    return [asdict(observation) for observation in observations]
