"""Which of several choices are worth a thought: those that nothing beats in everything at once."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the points that no other is below in one value without being above in the other.

    Less is better in both. The front begins with the least first value; of equal points all are on it.
    """
    order = sorted(range(len(points)), key=lambda at: points[at])
    front: list[int] = []
    for at in order:
        # In this order a point is beaten exactly where an earlier one, other than its equal, is no worse in the second.
        if not front or points[at][1] < points[front[-1]][1] or points[at] == points[front[-1]]:
            front.append(at)
    return front
