"""What is said of the energy of a step: of devices, processors and memory, and the parts that it is made of.

Energies are whole nanojoules (a watt for a nanosecond), so that parts add up exactly. Where a power is known only
between bounds, an energy is a pair: all firsts belong to one bound and add up, and so do all seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from stepscope.cost.energy_estimate import J_PER_NJ
from stepscope.cost.energy_measured import MissingCounter
from stepscope.trace import TraceWarning

Basis: TypeAlias = Literal["measured", "sampled", "estimate", "given"]
"""By a counter; from samples that telemetry took; by a formula; by a power that the user gave."""
Pair: TypeAlias = tuple[int, int]

NO_OPERATOR: Final = "(no operator)"
KINDS: Final = ("computation", "communication", "copies")


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """What the user says of the hardware; None where nothing is said.

    Attributes:
        device_watts, idle_watts: of each device, while it works at full power and without work.
        cpu_watts: of the processors together, whichever rank they work for.
    """

    device_watts: float | None = None
    idle_watts: float | None = None
    cpu_watts: float | None = None


@dataclass(frozen=True, slots=True)
class EnergyPart:
    """A part of a step's energy.

    Attributes:
        kind: "idle" (by cause), "busy" (by kind of work), "operator" (busy again, by operator) or "host" (by cause).
        name: the cause, kind or operator.
        ns: how long it takes of a step.
        nanojoules: of a step; see the module.
    """

    kind: str
    name: str
    ns: int
    nanojoules: Pair


@dataclass(frozen=True, slots=True)
class Powers:
    """What a device draws without work and with it, watts."""

    idle_w: float
    busy_w: float


@dataclass(frozen=True, slots=True)
class FindingEnergy:
    """A finding's saving in energy.

    Attributes:
        saving_ns: of a step.
        busy_ns: the device's work that would go, of a step: the least and the most.
        nanojoules: of a step, the least and the most.
    """

    rule: str
    title: str
    saving_ns: int
    busy_ns: Pair
    nanojoules: Pair


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """What one device uses in a step.

    Attributes:
        device, name: as in the trace.
        basis: how the total was had; None where it could not be.
        how: the counter or formula, and where its figures come from; or why there is no number.
        step_ns: how long the step took that the energy is of.
        nanojoules: of a step; None where there is no number.
        parts: idle by cause and busy by kind; add up to `nanojoules`, first to first and second to second.
        operators: the busy parts again, by operator, the costliest first.
        window_joules: of measured energy, joules per step of each window.
        identity: the same for the same hardware, whichever rank it is seen from; None where nothing tells.
        powers: what it draws, in the order of the pairs; None where there is no number.
    """

    device: str
    name: str | None
    basis: Basis | None
    how: str
    step_ns: int
    nanojoules: Pair | None = None
    parts: tuple[EnergyPart, ...] = ()
    operators: tuple[EnergyPart, ...] = ()
    window_joules: tuple[float, ...] = ()
    identity: str | None = None
    powers: tuple[Powers, Powers] | None = None

    def of_kind(self, kind: str) -> Pair:
        """The sum of the parts of this kind."""
        mine = [part.nanojoules for part in self.parts if part.kind == kind]
        return sum(pair[0] for pair in mine), sum(pair[1] for pair in mine)

    @property
    def idle_share(self) -> tuple[float, float] | None:
        """The least and the most that idle time can be of the device's energy, 0 to 1; None without a number."""
        if self.nanojoules is None or self.powers is None or not all(self.nanojoules):
            return None
        idle = self.of_kind("idle")
        if self.basis != "estimate":
            shares = [part / whole for part, whole in zip(idle, self.nanojoules, strict=True)]
            return min(shares), max(shares)
        busy_ns = sum(part.ns for part in self.parts if part.kind == "busy")
        least, most = self.powers
        # The work draws the most in the one extreme, the least in the other, but never less than the rest.
        slow = max(least.busy_w, most.idle_w) * busy_ns
        return idle[0] / max(idle[0] + most.busy_w * busy_ns, 1), idle[1] / max(idle[1] + slow, 1)


@dataclass(frozen=True, slots=True)
class HostEnergy:
    """What processors or memory use in a step: the whole machine's, whatever else ran on it.

    Attributes:
        kind: "cpu" or "dram".
        device: number of the package, or "all".
        parts: on a machine without an accelerator the main thread's time by cause; adds up to `nanojoules`.
    """

    kind: str
    device: str
    basis: Basis
    how: str
    step_ns: int
    nanojoules: int
    parts: tuple[EnergyPart, ...] = ()
    window_joules: tuple[float, ...] = ()
    identity: str | None = None


@dataclass(frozen=True, slots=True)
class TraceEnergy:
    """The energy of one trace's steps.

    Attributes:
        step_ns: the mean step in the trace, recorded with the profiler.
        stepped: whether there are steps; otherwise the whole recording counts as one.
        missing: counters that gave no number, and why.
        findings: what each finding's saving is in energy, in the order of the findings.
    """

    path: str
    format: str
    rank: int | None
    step_ns: int
    step_count: int
    stepped: bool
    devices: tuple[DeviceEnergy, ...]
    hosts: tuple[HostEnergy, ...]
    missing: tuple[MissingCounter, ...] = ()
    findings: tuple[FindingEnergy, ...] = ()
    warnings: tuple[TraceWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledEnergy:
    """Energy of a device's steps from samples that were taken anyway: joules per step, or why there are none."""

    device: str
    step_joules: float | None
    how: str


def joules(nanojoules: Pair) -> tuple[float, float]:
    """A pair as the least and the most joules."""
    return min(nanojoules) * J_PER_NJ, max(nanojoules) * J_PER_NJ


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """A total divided by weights into whole parts that add up to it; nothing where there are no weights."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    ends = [total * sum_so_far // whole for sum_so_far in itertools.accumulate(weights)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]
