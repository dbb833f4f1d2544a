"""Times of a run's unrecorded steps, from the process's report beside its trace in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from stepscope.record.run_folder import recording_of
from stepscope.record.step_times import Stretch
from stepscope.trace.metadata import UnrecordedSteps
from stepscope.trace.model import Trace

_COLD_STEPS: Final = 2
"""First steps of a program, which are longer than others."""
_FEWEST: Final = 3
"""Fewest steps of a kind for a median."""


def unrecorded_steps(stretches: object) -> UnrecordedSteps | None:
    """Compare steps that no profiler recorded with those that one did; None if there are too few of a kind.

    Args:
        stretches: in the form written by `StepTimes.to_json`.
    """
    parts = [part for each in stretches if (part := Stretch.from_json(each))] if isinstance(stretches, list) else []
    parts = [part for part in parts if part.first_step > _COLD_STEPS]
    recorded_ns = [ns for part in parts if part.recorded for ns in part.durations_ns]
    others = [part for part in parts if not part.recorded]
    others_ns = [ns for part in others for ns in part.durations_ns]
    if min(len(recorded_ns), len(others_ns)) < _FEWEST:
        return None

    def typical(counts: Iterable[Sequence[int]]) -> int | None:
        known = [each for part in counts for each in part]
        return round(median(known)) if len(known) == len(others_ns) else None

    return UnrecordedSteps(
        len(others_ns),
        round(median(others_ns)),
        round(median(recorded_ns)),
        typical(part.processor_ns for part in others),
        typical(part.faults for part in others),
    )


def with_unrecorded_steps(trace: Trace, path: str | Path) -> Trace:
    """Add the times of the run's unrecorded steps to a trace in the folder of a run."""
    content = recording_of(Path(path)) if trace.metadata.program is not None else {}
    unrecorded = unrecorded_steps(content.get("step_times"))
    return replace(trace, metadata=replace(trace.metadata, unrecorded=unrecorded)) if unrecorded is not None else trace
