"""Which loops of the user's source ran during a stretch of the main thread's time, by how often their lines ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import polars as pl

from stepscope.diagnosis.lines.visits import Visits
from stepscope.diagnosis.view import View
from stepscope.trace.program_facts import LoopFacts

_AS_OFTEN: Final = 0.2
"""Largest relative difference between a loop's repetitions and how often its body's line was reached."""


class SourceLoops:
    """The loops of the source that one view's program ran."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._loops: dict[str, list[LoopFacts]] = {}
        for loop in view.program.loops:
            self._loops.setdefault(loop.file, []).append(loop)

    def between(self, begin_ns: int, end_ns: int, repetitions: int) -> list[tuple[LoopFacts, int]]:
        """Innermost loops of the source whose body was reached so often in this time, the shortest first.

        With each how often it was begun: from its first repetition to the last, its head is reached before each but the
        first, and once more at the end of each turn of a loop around it but the last.
        """
        ends = pl.col("start_ns") + pl.col("duration_ns")
        lines = self._view.trace.lines
        mine = lines.filter((pl.col("lane") == self._view.lane) & (ends > begin_ns) & (pl.col("start_ns") < end_ns))
        mine = mine[Visits(mine).rows]
        counts = {(file, line): count for file, line, count in mine.group_by("file", "line").len().iter_rows()}
        found: dict[LoopFacts, int] = {}
        for (file, line), count in counts.items():
            loops = self._loops.get(file, ())
            around = [each for each in loops if each.first <= line <= each.last]
            is_head = any(each.line == line < each.first for each in loops)
            if not around or is_head or abs(count - repetitions) > max(_AS_OFTEN * repetitions, 1):
                continue
            innermost = min(around, key=lambda each: each.last - each.first)
            heads = counts.get((file, innermost.line), 0)
            found[innermost] = max(heads - repetitions + 2, 1)
        return sorted(found.items(), key=lambda each: each[0].last - each[0].first)


def carried_by(loops: Iterable[tuple[LoopFacts, int]]) -> tuple[str, ...]:
    """Names that carry results from one repetition to the next in the innermost loop that has any."""
    return next((loop.carried for loop, _ in loops if loop.carried), ())
