"""Shared by rules about the host: its own work, and the operating system's counts of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stepscope.diagnosis.view import View
from stepscope.trace.program_facts import StepFacts
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_cause, together

HOST_WORK: Final = (
    "python", "dispatch", "optimizer", "compute", "untraced", "garbage_collection", "logging", "graph_tracing",
    "step_marker",
)  # fmt: skip
"""Causes of time that the launching thread spent on its own work."""


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Sums of the operating system's counts over the complete steps of the span.

    Attributes:
        length_ns: wall time of the steps.
    """

    steps: tuple[StepFacts, ...]
    length_ns: int

    def total(self, figure: Callable[[StepFacts], int | None]) -> int | None:
        known = [value for step in self.steps if (value := figure(step)) is not None]
        return sum(known) if known and len(known) == len(self.steps) else None

    def per_step(self, figure: Callable[[StepFacts], int | None]) -> float | None:
        total = self.total(figure)
        return None if total is None else total / len(self.steps)

    def share(self, ns: int) -> float:
        """A time as a share of the counted steps' wall time, 0 to 1."""
        return min(ns / self.length_ns, 1.0) if self.length_ns else 0.0


def host_counts(view: View) -> HostCounts | None:
    """The counts of the complete steps; None if the recording has none."""
    wanted = set(view.complete_steps["index"].to_list())
    steps = tuple(step for step in view.program.steps if step.index in wanted and step.duration_ns > 0)
    return HostCounts(steps, sum(step.duration_ns for step in steps)) if steps else None


def host_work_ns(view: View) -> int:
    """Time in the span spent on the launching thread's own work; with a device, the device's idle time during it."""
    return int(view.pieces_of(*HOST_WORK)["duration_ns"].sum())


def scaled_host_work(factor: float) -> Change:
    """Multiply the time of the threads' own work; "compute" is left out, because without a device it is dispatch."""
    return together(*(scaled_cause(cause, factor) for cause in HOST_WORK if cause != "compute"))
