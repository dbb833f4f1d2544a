"""Whether the repetitions of a loop need one another's results, so that they cannot be put into one batch."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.loops import Loop
from stepscope.analysis.work import base_name
from stepscope.diagnosis.lines.repeats import recomputed_prefixes
from stepscope.diagnosis.lines.visits import Visits
from stepscope.diagnosis.view import View
from stepscope.trace.program_facts import LoopFacts

_AS_OFTEN: Final = 0.2
"""Largest relative difference between a loop's repetitions and how often its body's line was reached."""
CHOOSING: Final = frozenset({"argmax", "multinomial", "topk", "bernoulli"})
"""Operators that choose from a result: in a loop, mostly the input of the next repetition."""


class Dependencies:
    """Tells which loops of one view carry results from repetition to repetition."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._prefixes = [prefix.rows for prefix in recomputed_prefixes(view)]
        self._loops: dict[str, list[LoopFacts]] = {}
        for loop in view.program.loops:
            self._loops.setdefault(loop.file, []).append(loop)

    def carried(self, loop: Loop) -> tuple[str, ...] | None:
        """Names that carry results from one repetition to the next; () if there are none, None if that is unknown."""
        if any(np.isin(loop.operators[:1], rows).any() for rows in self._prefixes):
            return ("the sequence",)
        sources = self._sources(loop)
        if not sources:
            chooses = any(base_name(name) in CHOOSING for name in loop.body)
            return ("the chosen position",) if chooses else None
        return next((source.carried for source, _ in sources if source.carried), ())

    def runs(self, loop: Loop) -> int:
        """How often the program came to the loop, whose repetitions may belong to several turns of one around it."""
        return max((runs for _, runs in self._sources(loop)), default=1)

    def _sources(self, loop: Loop) -> list[tuple[LoopFacts, int]]:
        """Innermost loops of the source whose body was reached as often as the operators repeat, while they ran.

        With each how often it was begun: from its first repetition to the last, its head is reached before each but the
        first, and once more at the end of each turn of a loop around it but the last.
        """
        operators, lane = self._view.trace.operators, self._view.lane
        begin, last = operators["start_ns"][int(loop.operators[0])], int(loop.operators[-1])
        end = operators["start_ns"][last] + operators["duration_ns"][last]
        lines = self._view.trace.lines
        mine = lines.filter(
            (pl.col("lane") == lane) & (pl.col("start_ns") + pl.col("duration_ns") > begin) & (pl.col("start_ns") < end)
        )
        mine = mine[Visits(mine).rows]
        counts = {(file, line): count for file, line, count in mine.group_by("file", "line").len().iter_rows()}
        found: dict[LoopFacts, int] = {}
        for (file, line), count in counts.items():
            loops = self._loops.get(file, ())
            around = [each for each in loops if each.first <= line <= each.last]
            is_head = any(each.line == line < each.first for each in loops)
            if not around or is_head or abs(count - loop.repetitions) > max(_AS_OFTEN * loop.repetitions, 1):
                continue
            innermost = min(around, key=lambda each: each.last - each.first)
            heads = counts.get((file, innermost.line), 0)
            found[innermost] = max(heads - loop.repetitions + 2, 1)
        return sorted(found.items(), key=lambda each: each[0].last - each[0].first)
