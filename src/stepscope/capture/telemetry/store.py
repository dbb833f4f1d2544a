"""One process's telemetry as one SQLite file, which is whole at every moment, whenever the process dies.

    about    key, value: format, rank, process, started_unix_ns
    series   what is measured: source, name, device, unit
    samples  series, unix_ns, step, value; a null value was asked for and could not be had
    missing  which series could not be had, why, and how often

`stepscope.trace.telemetry` reads it.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stepscope.whole_files import private_file, private_folder

FORMAT_VERSION: Final = 1

NOT_A_NUMBER: Final = "nan"
"""SQLite turns a NaN into null, which means something else here: the word is kept instead."""

_TABLES: Final = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE series (id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, device TEXT, unit TEXT);
CREATE TABLE samples (series INTEGER NOT NULL, unix_ns INTEGER NOT NULL, step INTEGER, value);
CREATE TABLE missing (series INTEGER NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, unix_ns INTEGER NOT NULL,
                      PRIMARY KEY (series, reason));
"""
_BUSY_S: Final = 10.0


class Series(NamedTuple):
    """What is measured.

    Attributes:
        source: who measures: "log", "gradient", "activation", "optimizer", "throughput", "process", "machine" or
            "device".
        name: what, such as "loss" or "power_w".
        device: the accelerator, as the trace numbers it; None where it is about none.
        unit: "bytes", "W", "share" (0 to 1) and so on; None where it has none or nobody said.
    """

    source: str
    name: str
    device: str | None = None
    unit: str | None = None


class Sample(NamedTuple):
    """One value of a series; None where it could not be had."""

    series: Series
    unix_ns: int
    step: int | None
    value: float | None


class Missing(NamedTuple):
    """That a series could not be had, and why."""

    series: Series
    reason: str
    unix_ns: int


class TelemetryStore:
    """Appends rows to a new file.

    Raises:
        sqlite3.Error, OSError: the file cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        private_folder(path.parent)
        # Rows come from the writer's thread, the last ones from whichever thread closes; the writer's lock keeps order.
        self._connection = sqlite3.connect(
            private_file(path), timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._numbers: dict[Series, int] = {}
        # With a write-ahead log a reader never makes the program wait. Some network file systems cannot have one;
        # SQLite then keeps its rollback journal, which survives a kill as well.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(f"BEGIN;{_TABLES}COMMIT;")
        rows = {"format": str(FORMAT_VERSION), **about}.items()
        self._connection.executemany("INSERT INTO about VALUES (?, ?)", rows)

    def append(self, samples: Iterable[Sample], missing: Iterable[Missing] = ()) -> None:
        """Write all of these rows or, where that fails, none."""
        known = len(self._numbers)
        self._connection.execute("BEGIN")
        try:
            self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", map(self._sample_row, samples))
            self._connection.executemany(
                "INSERT INTO missing VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1",
                [(self._number(each.series), each.reason, each.unix_ns) for each in missing],
            )
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._numbers = dict(list(self._numbers.items())[:known])
            raise

    def close(self) -> None:
        """Leave one plain file without a log beside it, where nobody reads it just now."""
        try:
            self._connection.execute("PRAGMA busy_timeout=0")
            self._connection.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.OperationalError:
            pass  # a reader holds it: the log stays, and everything in it can be read
        finally:
            self._connection.close()

    def _sample_row(self, sample: Sample) -> tuple[int, int, int | None, float | str | None]:
        value: float | str | None = sample.value
        if sample.value is not None and math.isnan(sample.value):
            value = NOT_A_NUMBER
        return self._number(sample.series), sample.unix_ns, sample.step, value

    def _number(self, series: Series) -> int:
        if series not in self._numbers:
            self._numbers[series] = len(self._numbers)
            self._connection.execute("INSERT INTO series VALUES (?, ?, ?, ?, ?)", (self._numbers[series], *series))
        return self._numbers[series]
