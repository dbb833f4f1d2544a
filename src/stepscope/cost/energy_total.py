"""A whole run's energy: every rank's step together, over many iterations, and what it emits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stepscope.cost.carbon import Equivalence, Grid, emitted_kg, equivalences
from stepscope.cost.energy_parts import DeviceEnergy, HostEnergy, Pair, TraceEnergy, joules

_Part = TypeVar("_Part", DeviceEnergy, HostEnergy)


@dataclass(frozen=True, slots=True)
class EnergyAnswer:
    """The energy of one trace, or of several ranks that take the same steps.

    Attributes:
        traces: by rank.
        iterations: steps that the user asks about; None for those that were recorded.
        pue: what the data centre draws for each watt of its computers.
        grid: where the electricity comes from; None where the user did not say.
    """

    traces: tuple[TraceEnergy, ...]
    iterations: int | None = None
    pue: float = 1.0
    grid: Grid | None = None

    @property
    def step_nanojoules(self) -> Pair | None:
        """Of a step on all devices, processors and memory that have a number, each once; None where none has."""
        pairs = [each.nanojoules for each in counted_devices(self.traces) if each.nanojoules is not None]
        pairs += [(each.nanojoules, each.nanojoules) for each in counted_hosts(self.traces)]
        if not pairs:
            return None
        ordered = [(min(pair), max(pair)) for pair in pairs]
        return sum(pair[0] for pair in ordered), sum(pair[1] for pair in ordered)

    @property
    def unknown_devices(self) -> tuple[DeviceEnergy, ...]:
        """Devices that have no number, and are missing from every sum."""
        return tuple(each for each in counted_devices(self.traces) if each.nanojoules is None)

    @property
    def is_estimate(self) -> bool:
        """Whether any of it was not measured."""
        bases = {each.basis for each in counted_devices(self.traces)} | {
            each.basis for each in counted_hosts(self.traces)
        }
        return bool(bases & {"estimate", "given"})

    @property
    def steps(self) -> int:
        """How many steps `of_run` is about."""
        return self.iterations if self.iterations is not None else self.traces[0].step_count

    def of_run(self, step_nanojoules: Pair) -> tuple[float, float]:
        """The least and the most joules of an amount per step over all steps, with the data centre's share."""
        low, high = joules(step_nanojoules)
        return low * self.steps * self.pue, high * self.steps * self.pue

    def kilograms(self, run_joules: tuple[float, float]) -> tuple[float, float] | None:
        """Of CO2 equivalents; None where no grid is chosen."""
        if self.grid is None:
            return None
        return emitted_kg(run_joules[0], self.grid), emitted_kg(run_joules[1], self.grid)


def alike(kilograms: tuple[float, float]) -> Iterator[tuple[Equivalence, Equivalence]]:
    """The least and the most of an amount of CO2 as something else, for each thing that it is compared with."""
    yield from zip(equivalences(kilograms[0]), equivalences(kilograms[1]), strict=True)


def counted_devices(traces: Sequence[TraceEnergy]) -> list[DeviceEnergy]:
    """Every device once: one that several ranks measured counts with the first of them."""
    return _once([each for trace in traces for each in trace.devices])


def counted_hosts(traces: Sequence[TraceEnergy]) -> list[HostEnergy]:
    """Every processor and memory once; a power that the user gave counts where no rank's processors were measured."""
    found = _once([each for trace in traces for each in trace.hosts])
    measured = any(each.kind == "cpu" and each.basis == "measured" for each in found)
    return [each for each in found if not measured or each.kind != "cpu" or each.basis == "measured"]


def _once(parts: list[_Part]) -> list[_Part]:
    seen: set[str] = set()
    kept = []
    for part in parts:
        if part.identity is None or part.identity not in seen:
            kept.append(part)
        seen |= {part.identity} if part.identity is not None else set()
    return kept
