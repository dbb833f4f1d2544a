"""Where the operations of compiled programs were written, as columns of events that ran them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from stepscope.readers.xplane.events import Batch, Words
from stepscope.readers.xplane.meanings import NO_CODE, Pooled, column
from stepscope.readers.xplane.programs import Programs
from stepscope.readers.xplane.wire import Positions


class Origins:
    """Looks up each operation once for all events of a plane."""

    def __init__(self, programs: Programs, pooled: Pooled, words: Words) -> None:
        self._programs = programs
        self._pooled = pooled
        self._words = words
        self._known: dict[tuple[int, int, int], tuple[int, int]] = {}

    def columns(
        self, batch: Batch, mine: Positions, row: Positions, operation: Positions, role: Mapping[str, int]
    ) -> dict[str, pl.Series]:
        """The columns call_stack and scope of chosen events; none where no event is of a compiled program.

        Args:
            row: of each event's name.
            operation: of each event, as `Batch.texts` gives it.
            role: by the statistic's name.
        """
        compiled = np.flatnonzero(operation[mine] != -1)
        if not compiled.size:
            return {}
        events = mine[compiled]
        program, has_program = batch.integers(role["program_id"])
        module = batch.texts(role["hlo_module"], self._words)
        key = np.stack([row[events], program[events], module[events]])
        different, first, inverse = np.unique(key, axis=1, return_index=True, return_inverse=True)
        found = []
        for (name, number, text), place in zip(different.T.tolist(), first.tolist(), strict=True):
            if (name, number, text) not in self._known:
                event = int(events[place])
                self._known[name, number, text] = self._look_up(
                    number if has_program[event] else None,
                    self._words.of(text),
                    self._words.of(int(operation[event])) or "",
                )
            found.append(self._known[name, number, text])
        stack, scope = (np.full(len(mine), NO_CODE, np.uint32) for _ in range(2))
        values = np.array(found, np.uint32).reshape(-1, 2)[inverse.ravel()]
        stack[compiled], scope[compiled] = values[:, 0], values[:, 1]
        return {"call_stack": column(stack), "scope": column(scope)}

    def _look_up(self, program: int | None, module: str | None, name: str) -> tuple[int, int]:
        operation = self._programs.operation(program, module, name)
        codes = self._pooled.codes([operation.call_stack, operation.scope])
        return int(codes[0]), int(codes[1])
