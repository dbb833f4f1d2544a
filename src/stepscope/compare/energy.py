"""Whether steps use less energy: measured joules a step of two programs beside each other, as their times are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stepscope.compare.statistics import compare_samples

StepEnergies: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""What used it ("gpu", "cpu" or "dram") -> for each run joules a step of each window that was measured."""


@dataclass(frozen=True, slots=True)
class EnergyComparison:
    """The energy of steps before and after.

    Attributes:
        kind: "gpu", "cpu" or "dram".
        before_j, after_j: mean joules a step.
        change: after_j / before_j - 1.
        change_low, change_high: its interval; None where nothing tells what is chance.
        confidence: of the interval, 0 to 1.
        before_windows, after_windows: how many were measured.
    """

    kind: str
    before_j: float
    after_j: float
    change: float
    change_low: float | None
    change_high: float | None
    confidence: float
    before_windows: int
    after_windows: int


def compared_energies(
    before: StepEnergies, after: StepEnergies, confidence: float = 0.95
) -> tuple[EnergyComparison, ...]:
    """What both sides measured; windows follow each other as steps do, and are compared by the same statistics."""
    found = []
    for kind in ("gpu", "cpu", "dram"):
        sides = [[run for run in side.get(kind, ()) if run] for side in (before, after)]
        if not all(sides):
            continue
        samples = compare_samples(*sides, confidence=confidence)
        if samples.before_ns is not None and samples.after_ns is not None and samples.change is not None:
            found.append(
                EnergyComparison(
                    kind,
                    samples.before_ns,
                    samples.after_ns,
                    samples.change,
                    samples.change_low,
                    samples.change_high,
                    samples.confidence,
                    samples.before_steps,
                    samples.after_steps,
                )
            )
    return tuple(found)
