"""What the operating system counted in the steps that findings are about, for the rules about the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stepscope.diagnosis.recorded_faults import whole_figure
from stepscope.diagnosis.view import View
from stepscope.program_facts import StepFacts
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_cause, together

HOST_WORK: Final = (
    "python", "dispatch", "optimizer", "compute", "untraced", "garbage_collection", "logging", "graph_tracing",
    "step_marker",
)  # fmt: skip
"""Causes of time in which the launching thread itself had work to do."""


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Sums over the counted steps of the span.

    Attributes:
        steps: the counted steps.
        length_ns: what they took by the clock.
    """

    steps: tuple[StepFacts, ...]
    length_ns: int

    def total(self, figure: Callable[[StepFacts], int | None]) -> int | None:
        """A figure's sum; None where a step does not have it."""
        values = [figure(step) for step in self.steps]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None

    def per_step(self, figure: Callable[[StepFacts], int | None]) -> float | None:
        """Its mean."""
        total = self.total(figure)
        return None if total is None else total / len(self.steps)

    def share(self, ns: int) -> float:
        """Time as a share of the counted steps', 0 to 1."""
        return min(ns / self.length_ns, 1.0) if self.length_ns else 0.0


def host_counts(view: View) -> HostCounts | None:
    """The counts of the complete steps; None where the recording has none."""
    wanted = set(view.complete_steps["index"].to_list())
    steps = tuple(step for step in view.program.steps if step.index in wanted and step.duration_ns > 0)
    return HostCounts(steps, sum(step.duration_ns for step in steps)) if steps else None


def host_work_ns(view: View) -> int:
    """Time in the span that the step spent on the launching thread's own work: with a device, its idle time for it."""
    pieces = view.pieces
    return int(pieces.filter(pieces["cause"].is_in(HOST_WORK))["duration_ns"].sum())


def scaled_host_work(factor: float) -> Change:
    """The threads' own work takes so many times as long."""
    causes = (cause for cause in HOST_WORK if cause != "compute")  # which is dispatch, on a machine without a device
    return together(*(scaled_cause(cause, factor) for cause in causes))


def whole(view: View, name: str) -> int | None:
    """A whole number among the process's figures."""
    return whole_figure(view.program, name)
