"""The lines that a thread came to, each with the time until it went on, calls included, and the line that called it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times


@dataclass
class _Open:
    """A function that is running, with the visit of the line that it is at."""

    function: int
    visit: int


class Visits:
    """The visits of one thread to lines, in order.

    A thread returns to the line that it left a function at, which goes on that visit. The functions that were open
    before the first line are unknown: what does not begin at the first line seen of a function returns to one of these.
    Each row of a function of one line is a visit, because a return to it looks like a call.

    Args:
        lines: rows of `lines` of one thread in order; columns file, function, line, start_ns, duration_ns.

    Attributes:
        rows: for each visit the row that began it.
        parents: for each visit the visit of the calling line, -1 where it is unknown.
    """

    def __init__(self, lines: pl.DataFrame) -> None:
        self._lines = lines
        self._starts = lines["start_ns"].to_numpy()
        self._ends = self._starts + lines["duration_ns"].to_numpy()
        self._rows: list[int] = []
        self._parents: list[int] = []
        self._last: list[int] = []  # the last row of each visit or of what it called
        self._follow()
        self.rows: Rows = np.array(self._rows, np.int64)
        self.parents: Rows = np.array(self._parents, np.int64)

    @cached_property
    def starts(self) -> Times:
        """When each visit began."""
        starts: Times = self._starts[self.rows]
        return starts

    @cached_property
    def ends(self) -> Times:
        """When the thread went on from each visit."""
        ends: Times = self._ends[np.array(self._last, np.int64)]
        return ends

    def place(self, visit: int) -> tuple[str, int, str]:
        """The file, line and function of a visit."""
        row = self._lines.row(int(self.rows[visit]), named=True)
        return row["file"], row["line"], row["function"]

    def at(self, time_ns: int) -> int:
        """The innermost visit at a time, -1 before the first."""
        row = int(np.searchsorted(self._starts, time_ns, side="right")) - 1
        return self._visit_of_row[row] if row >= 0 else -1

    def holds(self, visit: int, times: Times) -> bool:
        """Whether one of these times, which are in order, is in a visit."""
        first = int(np.searchsorted(times, self.starts[visit]))
        return first < len(times) and bool(times[first] < self.ends[visit])

    def outermost(self, visit: int, without: Times) -> int:
        """The outermost visit around this one, or itself, that holds none of these times, which are in order."""
        while (parent := int(self.parents[visit])) >= 0 and not self.holds(parent, without):
            visit = parent
        return visit

    def _follow(self) -> None:
        codes = self._lines.select("line", code=pl.struct("file", "function").rank("dense"))
        codes = codes.with_columns(first=pl.col("line").min().over("code"), last=pl.col("line").max().over("code"))
        self._visit_of_row: list[int] = []
        running: list[_Open] = []
        left_at: dict[int, int] = {}
        for row, (line, function, first, last) in enumerate(codes.select("line", "code", "first", "last").iter_rows()):
            names = [each.function for each in running]
            if function in names[:-1] and first < last and left_at.get(function) == line:
                self._close(running, names.index(function) + 1, row)
            elif names and function == names[-1]:
                self._begin(row, running[:-1])
                self._close(running, len(running) - 1, row)
                running.append(_Open(function, len(self._rows) - 1))
            elif names and line != first:
                self._close(running, 0, row)
                self._begin(row, [])
                running.append(_Open(function, len(self._rows) - 1))
            else:
                self._begin(row, running)
                running.append(_Open(function, len(self._rows) - 1))
            left_at[function] = line
            self._visit_of_row.append(running[-1].visit)
        self._close(running, 0, self._lines.height)

    def _begin(self, row: int, around: list[_Open]) -> None:
        self._rows.append(row)
        self._parents.append(around[-1].visit if around else -1)
        self._last.append(row)

    def _close(self, running: list[_Open], kept: int, row: int) -> None:
        for each in running[kept:]:
            self._last[each.visit] = row - 1
        del running[kept:]
