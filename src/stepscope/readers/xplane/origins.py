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
        self._rows: dict[tuple[int, int, int], int] = {}
        self._codes: list[tuple[int, int]] = []

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
        keys = zip(row[events].tolist(), program[events].tolist(), module[events].tolist(), strict=True)
        rows = []
        for place, key in enumerate(keys):  # one by one, for sorting them takes several times as long
            known = self._rows.get(key)
            if known is None:
                event = int(events[place])
                known = self._rows[key] = len(self._rows)
                self._codes.append(
                    self._look_up(
                        key[1] if has_program[event] else None,
                        self._words.of(key[2]),
                        self._words.of(int(operation[event])) or "",
                    )
                )
            rows.append(known)
        values = np.array(self._codes, np.uint32)[rows]
        stack, scope = (np.full(len(mine), NO_CODE, np.uint32) for _ in range(2))
        stack[compiled], scope[compiled] = values[:, 0], values[:, 1]
        return {"call_stack": column(stack), "scope": column(scope)}

    def _look_up(self, program: int | None, module: str | None, name: str) -> tuple[int, int]:
        operation = self._programs.operation(program, module, name)
        codes = self._pooled.codes([operation.call_stack, operation.scope])
        return int(codes[0]), int(codes[1])
