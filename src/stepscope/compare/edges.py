"""The first and the last recorded step, where they are unlike the others and would hide what the others tell.

The first step after a profiler started is often cold (it waits for what began before the recording), and the profiler's
stop falls into the last one. Such a step is left out where it is longer or shorter than every step between, and further
from their median than `FARTHEST` of their median absolute deviations (scaled to a standard deviation, Hampel 1974) and
than `LEAST_SHARE` of that median. A step in the middle is never left out, however long it takes: that is what the
program does.

The deviation of so few steps is small by chance at times; what that costs is simulated in
`tests/unit/test_comparison_statistics.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, TypeAlias

Edge: TypeAlias = Literal["first", "last"]

FEWEST_BETWEEN: Final = 3
"""Steps that must be between the first and the last; of fewer nothing is left out."""
FARTHEST: Final = 8.0
FARTHEST_OF_THREE: Final = 24.0
"""Instead of `FARTHEST` where there are only three steps between, which tell little of how much they scatter."""
LEAST_SHARE: Final = 0.2
_TO_STANDARD_DEVIATION: Final = 1.4826


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A step of a recording that does not count.

    Attributes:
        trace: which of its side's traces it is in, from 0.
        index: the step's number.
        edge: whether it is the recording's first or its last.
        duration_ns: its length.
        shortest_ns, longest_ns: of the steps between the first and the last.
    """

    trace: int
    index: int
    edge: Edge
    duration_ns: int
    shortest_ns: int
    longest_ns: int


def far_edges(step_ns: Sequence[float]) -> tuple[Edge, ...]:
    """Which of "first" and "last" lie far from the steps between them.

    Args:
        step_ns: times of a recording's consecutive steps.
    """
    between = step_ns[1:-1]
    if len(between) < FEWEST_BETWEEN:
        return ()
    middle = median(between)
    deviation = _TO_STANDARD_DEVIATION * median(abs(ns - middle) for ns in between)
    farthest = FARTHEST_OF_THREE if len(between) == FEWEST_BETWEEN else FARTHEST
    limit = max(farthest * deviation, LEAST_SHARE * middle)
    edges: tuple[tuple[Edge, float], ...] = (("first", step_ns[0]), ("last", step_ns[-1]))
    return tuple(edge for edge, ns in edges if abs(ns - middle) > limit and not min(between) <= ns <= max(between))


def left_out(steps: Mapping[int, int], trace: int = 0) -> Iterator[LeftOut]:
    """The steps of a recording that do not count.

    Args:
        steps: the nanoseconds of each complete step by its number, in order.
        trace: for `LeftOut.trace`.
    """
    lengths = list(steps.values())
    for edge in far_edges(lengths):
        index = list(steps)[0 if edge == "first" else -1]
        yield LeftOut(trace, index, edge, steps[index], min(lengths[1:-1]), max(lengths[1:-1]))
