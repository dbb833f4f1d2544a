"""Which rows of the tables are wanted: those of a stretch of time, and what belongs to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import polars as pl

from stepscope.readers.nsight_systems.database import Database
from stepscope.trace.window import Window

_MARK_WORDS: Final = ("step", "iter", "batch")


class Selection:
    """Conditions in SQL for what a window takes of each table, with their parameters.

    Args:
        database: the tables.
        damage: takes rows without a time.
        window: the stretch on the file's clock; None for all of it.
        work_tables, call_table: tables of device work, and of the calls that gave it.
    """

    def __init__(
        self,
        database: Database,
        damage: Counter[str],
        window: Window | None,
        work_tables: Sequence[str],
        call_table: str,
    ) -> None:
        self._database = database
        self._damage = damage
        self._window = window
        self._work_tables = [table for table in work_tables if database.has(table, "start", "end", "correlationId")]
        self._call_table = call_table

    def overlap(self, table: str) -> tuple[str, tuple[int, ...]]:
        """Rows that reach into the window."""
        if self._window is None or not self._database.has(table, "start", "end"):
            return "", ()
        return (
            '"start" < ? AND ("end" >= ? OR "end" IS NULL)',
            (self._window.end_ns, self._window.start_ns),
        )

    def inside(self, table: str, column: str) -> tuple[str, tuple[int, ...]]:
        """Instants in the window."""
        if self._window is None or not self._database.has(table, column):
            return "", ()
        return f'"{column}" BETWEEN ? AND ?', (self._window.start_ns, self._window.end_ns)

    def of_work(self, table: str) -> tuple[str, tuple[int, ...]]:
        """Device work that reaches into the window or was given by a call in it."""
        where, parameters = self.overlap(table)
        if not where or table not in self._work_tables or not self._database.has(self._call_table, "correlationId"):
            return where, parameters
        inside, more = self.overlap(self._call_table)
        given = f'SELECT "correlationId" FROM "{self._call_table}" WHERE {inside}' if inside else "NULL"
        return f'({where}) OR "correlationId" IN ({given})', (*parameters, *more)

    def of_calls(self) -> tuple[str, tuple[int, ...]]:
        """Calls that reach into the window or gave a device work in it."""
        where, parameters = self.overlap(self._call_table)
        if not where or not self._database.has(self._call_table, "correlationId"):
            return where, parameters
        for table in self._work_tables:
            inside, more = self.overlap(table)
            where += f' OR "correlationId" IN (SELECT "correlationId" FROM "{table}" WHERE {inside})'
            parameters += more
        return where, parameters

    def of_ranges(self, table: str) -> tuple[str, tuple[int, ...]]:
        """Ranges that reach into the window, and all whose names may mark steps, which are counted from the first."""
        where, parameters = self.overlap(table)
        if not where:
            return where, parameters
        if self._database.has(table, "text"):
            where += "".join(f" OR \"text\" LIKE '%{word}%'" for word in _MARK_WORDS)
        if self._database.has(table, "textId") and self._database.has("StringIds", "id", "value"):
            like = " OR ".join(f"\"value\" LIKE '%{word}%'" for word in _MARK_WORDS)
            where += f' OR "textId" IN (SELECT "id" FROM "StringIds" WHERE {like})'
        return where, parameters

    def complete(self, table: str, frame: pl.DataFrame, *needed: str) -> pl.DataFrame:
        """The rows with a time, a lane and what is `needed`, with `start_ns` and `duration_ns` for start and end."""
        whole = frame.drop_nulls(["start", "end", "lane", *needed])
        if whole.height < frame.height:
            self._damage[f"incomplete_row:{table}"] += frame.height - whole.height
        return whole.with_columns(start_ns=pl.col("start"), duration_ns=pl.col("end") - pl.col("start")).drop(
            "start", "end"
        )
