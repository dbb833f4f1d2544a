"""Whether the repetitions of a loop need one another's results, so that they cannot be put into one batch."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.loops import Loop
from stepscope.analysis.work import base_name
from stepscope.diagnosis.lines.repeats import CHOOSING, recomputed_prefixes
from stepscope.diagnosis.lines.source_loops import SourceLoops, carried_by
from stepscope.diagnosis.view import View
from stepscope.trace.program_facts import LoopFacts


class Dependencies:
    """Tells which loops of one view carry results from repetition to repetition."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._prefixes = [prefix.rows for prefix in recomputed_prefixes(view)]
        self._source_loops = SourceLoops(view)

    def carried(self, loop: Loop) -> tuple[str, ...] | None:
        """Names that carry results from one repetition to the next; () if there are none, None if that is unknown."""
        if any(np.isin(loop.operators[:1], rows).any() for rows in self._prefixes):
            return ("the sequence",)
        sources = self._sources(loop)
        if not sources:
            chooses = any(base_name(name) in CHOOSING for name in loop.body)
            return ("the chosen position",) if chooses else None
        return carried_by(sources)

    def runs(self, loop: Loop) -> int:
        """How often the program came to the loop, whose repetitions may belong to several turns of one around it."""
        return max((runs for _, runs in self._sources(loop)), default=1)

    def _sources(self, loop: Loop) -> list[tuple[LoopFacts, int]]:
        operators = self._view.trace.operators
        begin, last = int(operators["start_ns"][int(loop.operators[0])]), int(loop.operators[-1])
        end = int(operators["start_ns"][last] + operators["duration_ns"][last])
        return self._source_loops.between(begin, end, loop.repetitions)
