"""What recording each event costs, measured on the steps of the same run that were not recorded.

A profiler works around each operator that it records, to note its name, its inputs' shapes and its memory, and Python
runs slower while lines are recorded. Steps of many small operators or of much Python may take several times as long
while they are recorded, and a promise that is a share of such a step holds for none of the others.

How much longer recorded steps are is measured in time on a processor, which other programs do not lengthen. It is
divided among the operators, up to what one costs; what they do not explain, among the time outside of operators if
lines were recorded; and the rest evenly. With a device, only operators are counted, since the device's work may hide
the host's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.diagnosis.recorded_faults import facts_of_steps, waiting_factor
from stepscope.trace import Trace
from stepscope.trace.window import Times, union
from stepscope.whatif import Change, Experiment, Graph

OPERATOR_NS: Final = 1_400.0
"""Measured cost of an operator with shapes and allocations; what a run's operators cost is measured on the run."""
MOST_SCALE: Final = 1.5
"""Largest multiple of OPERATOR_NS that counts as an operator's cost."""
MOST_OF_PYTHON: Final = 0.8
"""Largest share of the time outside of operators that recording lines explains: Python takes five times as long."""
_MOST_OF_A_PIECE: Final = 0.95


@dataclass(frozen=True, slots=True)
class RecordedEvents:
    """Cost of the events of a recording.

    Attributes:
        operator_ns: of an operator.
        change: removes the cost of all events.
    """

    operator_ns: float
    change: Change


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A thread's time between one border of an operator or line and the next; arrays of shape (n,)."""

    start: Times
    end: Times
    cost_ns: npt.NDArray[np.float64]  # of recording the operators that begin or end at its borders
    is_python: npt.NDArray[np.bool_]  # outside of operators


def recorded_events(experiment: Experiment, graph: Graph) -> RecordedEvents | None:
    """Measure what recording each event of the steps cost; None if no other steps were timed, or they took as long.

    Args:
        graph: the steps' graph without what else only the recording caused; its cost counts towards the difference.
    """
    wanted_ns = _slower_ns(experiment)
    pieces = _pieces(experiment)
    if wanted_ns <= 0 or not len(pieces.start):
        return None
    wanted_ns -= experiment.measured_ns / experiment.step_count - experiment.run(graph).step_ns
    wanted_ns *= experiment.step_count
    if wanted_ns <= 0:
        return None
    lanes = np.full(len(pieces.start), experiment.lane, np.int32)
    length_ns = np.maximum(graph.host_scale.length(lanes, pieces.start, pieces.end), 1).astype(np.float64)
    factors, scale = np.ones(len(length_ns)), 0.0
    if pieces.cost_ns.any():
        scale = min(wanted_ns / float(pieces.cost_ns.sum()), MOST_SCALE * waiting_factor(facts_of_steps(experiment)))
        factors = np.maximum(1 - scale * pieces.cost_ns / length_ns, 1 - _MOST_OF_A_PIECE)
    if experiment.device is None:
        parts = (pieces.is_python, MOST_OF_PYTHON), (np.ones(len(factors), np.bool_), _MOST_OF_A_PIECE)
        for some, most in parts if experiment.trace.lines.height else parts[1:]:
            left_ns = wanted_ns - float(((1 - factors) * length_ns).sum())
            theirs_ns = max(float((factors * length_ns)[some].sum()), 1.0)
            factors[some] *= 1 - min(max(left_ns / theirs_ns, 0.0), most)
    return RecordedEvents(
        scale * OPERATOR_NS, lambda _, graph: graph.with_host_time(lanes, pieces.start, pieces.end, factors)
    )


def _slower_ns(experiment: Experiment) -> float:
    """How much longer a recorded step takes than others, as the steps' other causes of waiting have it."""
    unrecorded = experiment.trace.metadata.unrecorded
    if unrecorded is None or not experiment.steps.height:
        return 0.0
    if experiment.device is not None:
        return float(unrecorded.recorded_step_ns - unrecorded.step_ns)
    steps = facts_of_steps(experiment)
    recorded_ns = [step.thread_processor_ns for step in steps if step.thread_processor_ns is not None]
    if unrecorded.processor_ns is None or not recorded_ns or len(recorded_ns) < len(steps):
        return 0.0
    return (sum(recorded_ns) / len(steps) - unrecorded.processor_ns) * waiting_factor(steps)


def _pieces(experiment: Experiment) -> _Pieces:
    """The steps' pieces on their thread: an operator costs as much before each of its borders as after it."""
    trace, lane, span = experiment.trace, experiment.lane, experiment.span
    begins, ends = _borders(trace, "operators", lane)
    at = np.concatenate([begins, ends, _borders(trace, "lines", lane)[0]])
    inside = (at >= span.start_ns) & (at <= span.end_ns)
    half_ns = np.repeat([OPERATOR_NS / 4, 0.0], [2 * len(begins), len(at) - 2 * len(begins)])[inside]
    ends_of_span = np.array([span.start_ns, span.end_ns], np.int64)
    borders, which = np.unique(np.concatenate([at[inside], ends_of_span]), return_inverse=True)
    near_ns = np.bincount(which.ravel(), np.append(half_ns, [0.0, 0.0]), len(borders)).astype(np.float64)
    covered = union(begins, ends)
    around = np.searchsorted(covered.starts, borders[:-1], side="right") - 1
    is_inside = (around >= 0) & (covered.ends[np.maximum(around, 0)] > borders[:-1]) if len(begins) else around >= 0
    return _Pieces(borders[:-1], borders[1:], near_ns[:-1] + near_ns[1:], ~is_inside)


def _borders(trace: Trace, table: str, lane: int) -> tuple[Times, Times]:
    rows = getattr(trace, table)
    mine = rows["lane"].to_numpy() == lane
    begins: Times = rows["start_ns"].to_numpy()[mine]
    return begins, begins + rows["duration_ns"].to_numpy()[mine]
