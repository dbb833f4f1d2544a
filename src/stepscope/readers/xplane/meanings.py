"""What each name of a plane's events means, worked out once for each name and looked up for many events at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers import names as common
from stepscope.readers.spill import StringPool
from stepscope.readers.xplane import names
from stepscope.readers.xplane.content import Mask, Positions
from stepscope.readers.xplane.events import Batch, Words
from stepscope.readers.xplane.names import LIBRARY_FILES
from stepscope.readers.xplane.plane import EventName, Plane, Programs

HOST_TABLES: Final = ("operators", "launches", "annotations", "frames")
MEMORY_EVENTS: Final = ("MemoryAllocation", "MemoryDeallocation")
LIBRARY: Final = "<library>"
"""Stands for the folder of a library's file, which JAX's tracer does not tell."""
NO_CODE: Final = 2**32 - 1
_MOST_LISTED: Final = 2**20
Codes = npt.NDArray[np.uint32]


def role_table(plane: Plane, roles: Sequence[str]) -> Positions:
    """By number of a statistic, its position among the wanted ones from 1 on, 0 for the others."""
    wanted = {name: place for place, name in enumerate(roles, 1)}
    found = {
        number: wanted[name] for number, name in plane.stat_names.items() if name in wanted and 0 <= number < 2**22
    }
    table = np.zeros(max(found, default=0) + 1, np.int64)
    for number, place in found.items():
        table[number] = place
    return table


class NameRows:
    """The names of a plane's events as rows 0 to n - 1.

    Attributes:
        names: by row.
    """

    def __init__(self, found: dict[int, EventName]) -> None:
        order = sorted(found)
        self._numbers = np.array(order, np.int64)
        self.names = [found[number] for number in order]
        self._rows: Positions | None = None
        if order and order[0] >= 0 and order[-1] < _MOST_LISTED:  # as in every real file
            self._rows = np.full(order[-1] + 2, -1, np.int64)  # the last stands for all higher numbers
            self._rows[self._numbers] = np.arange(len(order))

    def of(self, numbers: Positions) -> tuple[Positions, Mask]:
        """The row of each number, and whether it has one."""
        if not len(self._numbers):
            return np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.bool_)
        if self._rows is not None:
            row = self._rows.take(np.where(numbers < 0, len(self._rows) - 1, numbers), mode="clip")
            return np.maximum(row, 0), row >= 0
        place = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return place, self._numbers[place] == numbers


class Pooled:
    """Text of a gathering's pool by number, null for None."""

    def __init__(self, pool: StringPool) -> None:
        self._pool = pool

    def codes(self, words: Sequence[str | None]) -> Codes:
        """The number of each word, NO_CODE for None."""
        return self._pool.optional_codes(words).fill_null(NO_CODE).to_numpy()

    def constant(self, word: str | None, count: int) -> pl.Series:
        """A column of one word."""
        return pl.repeat(word, count, dtype=pl.String, eager=True) if word is None else self._repeat(word, count)

    def _repeat(self, word: str, count: int) -> pl.Series:
        return pl.repeat(self._pool.codes([word])[0], count, dtype=pl.UInt32, eager=True)


def column(codes: Codes) -> pl.Series:
    """Numbers of words as a column, NO_CODE as null."""
    series = pl.Series(codes)
    return series if not len(codes) or codes.max() != NO_CODE else series.replace(NO_CODE, None)


def nullable(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], has: Mask) -> pl.Series:
    """Values as a column, null where there are none."""
    series = pl.Series(values)
    return series if has.all() else pl.select(pl.when(pl.Series(has)).then(series)).to_series()


class HostMeanings:
    """Of each name: the table its events belong to, the name there, and what else follows.

    Attributes:
        table: index into HOST_TABLES.
        name: number of the name in the pool.
        kind: of launches.
        is_enqueue: whether it gives a TPU a program.
        is_memory, is_release: whether it is an allocation or a release, and which.
        texts: the name itself.
        file, line, function: of frames.
    """

    def __init__(self, rows: NameRows, on_python: bool, pooled: Pooled, unclear_files: UnclearFiles) -> None:
        self.texts = [name.name or name.display for name in rows.names]
        found = [names.host_name(text, on_python) for text in self.texts]
        self.table = np.array([HOST_TABLES.index(each.table) for each in found], np.int8)
        parts = [unclear_files.told(each.name) if each.table == "frames" else None for each in found]
        self.name = pooled.codes([part.name if part else each.name for each, part in zip(found, parts, strict=True)])
        self.kind = pooled.codes([each.kind for each in found])
        self.is_enqueue = np.array([names.is_enqueueing(text) for text in self.texts], np.bool_)
        self.is_memory = np.array([text in MEMORY_EVENTS for text in self.texts], np.bool_)
        self.is_release = np.array([text == MEMORY_EVENTS[1] for text in self.texts], np.bool_)
        self.file = pooled.codes([each.file if each else None for each in parts])
        self.line = np.array([each.line or -1 if each else -1 for each in parts], np.int64)
        self.function = pooled.codes([each.function if each else None for each in parts])


class HostFrame(NamedTuple):
    """A Python frame."""

    name: str
    file: str | None
    line: int | None
    function: str | None


class UnclearFiles:
    """The files of Python frames, whose names JAX's tracer writes without the folder.

    Where the source lines of compiled programs know a file of that name, it is that one. Else a name that files of JAX
    and its libraries have is taken for one of theirs, and gets LIBRARY for a folder.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._paths: dict[str, set[str]] = {}
        for path in files:
            self._paths.setdefault(path.rpartition("/")[2], set()).add(path)

    def told(self, name: str) -> HostFrame:
        """A frame "file(line): function" with the file as far as it is known."""
        file, line, function, _ = common.frame(name)
        if file is None or line is None or "/" in file:
            return HostFrame(name, file, line, function)
        paths = self._paths.get(file, set())
        if len(paths) == 1:
            file = next(iter(paths))
        elif file in LIBRARY_FILES:
            file = f"{LIBRARY}/{file}"
        return HostFrame(f"{file}({line}): {function}", file, line, function)


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
