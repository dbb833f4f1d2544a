"""The telemetry of one process in one SQLite file, which stays consistent whenever the process dies.

    about    key, value: format, rank, process, started_unix_ns
    series   what is measured: source, name, device, unit
    samples  series, unix_ns, step, value; a null value could not be read
    missing  which series could not be read, why, and how often

`stepscope.trace.telemetry` reads it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stepscope import guard
from stepscope.errors import StepscopeError
from stepscope.files import private_file, private_folder
from stepscope.guard import sentence
from stepscope.threads import Lock, Thread

FORMAT_VERSION: Final = 1

NOT_A_NUMBER: Final = "nan"
"""SQLite converts NaN to null, which means "missing" here, so this word is stored instead."""

_TABLES: Final = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE series (id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, device TEXT, unit TEXT);
CREATE TABLE samples (series INTEGER NOT NULL, unix_ns INTEGER NOT NULL, step INTEGER, value);
CREATE TABLE missing (series INTEGER NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, unix_ns INTEGER NOT NULL,
                      PRIMARY KEY (series, reason));
"""
_BUSY_S: Final = 10.0


class Series(NamedTuple):
    """The identity of a measured series.

    Attributes:
        source: "log", "gradient", "activation", "optimizer", "throughput", "process", "machine" or "device".
        name: such as "loss" or "power_w".
        device: the device number, as in the trace; None if the series belongs to no device.
        unit: "bytes", "W", "share" (0 to 1) and so on; None if it has none or it is unknown.
    """

    source: str
    name: str
    device: str | None = None
    unit: str | None = None


class Sample(NamedTuple):
    """One value of a series; None if it could not be read."""

    series: Series
    unix_ns: int
    step: int | None
    value: float | None


class Missing(NamedTuple):
    """The reason why a series could not be read."""

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
        # Rows come from the writer's thread, the last ones from the thread that closes; the writer's lock
        # serialises them.
        self._connection = sqlite3.connect(
            private_file(path), timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._numbers: dict[Series, int] = {}
        # With a write-ahead log a reader never blocks the program. Some network file systems do not support it;
        # SQLite then uses its rollback journal, which survives a kill as well.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(f"BEGIN;{_TABLES}COMMIT;")
        rows = {"format": str(FORMAT_VERSION), **about}.items()
        self._connection.executemany("INSERT INTO about VALUES (?, ?)", rows)

    def append(self, samples: Iterable[Sample], missing: Iterable[Missing] = ()) -> None:
        """Write all of these rows or, on an error, none."""
        known = self._numbers
        self._numbers = dict(known)
        is_written = False
        try:
            with self._connection as connection:  # commits the transaction, or rolls it back
                connection.execute("BEGIN")
                connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", map(self._sample_row, samples))
                connection.executemany(
                    "INSERT INTO missing VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1",
                    [(self._number(each.series), each.reason, each.unix_ns) for each in missing],
                )
            is_written = True
        finally:
            if not is_written:
                self._numbers = known

    def close(self) -> None:
        """Merge the write-ahead log into the file, unless another process is reading it."""
        try:
            self._connection.execute("PRAGMA busy_timeout=0")
            self._connection.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.OperationalError:
            pass  # a reader holds it: the log file stays, and all data remains readable
        finally:
            self._connection.close()

    def _sample_row(self, sample: Sample) -> tuple[int, int, int | None, float | str | None]:
        is_nan = sample.value is not None and math.isnan(sample.value)
        return self._number(sample.series), sample.unix_ns, sample.step, NOT_A_NUMBER if is_nan else sample.value

    def _number(self, series: Series) -> int:
        if series not in self._numbers:
            self._numbers[series] = len(self._numbers)
            self._connection.execute("INSERT INTO series VALUES (?, ?, ?, ?, ?)", (self._numbers[series], *series))
        return self._numbers[series]


FLUSH_S: Final = 1.0
"""Seconds between two writes, which is what a killed process loses at most."""
LONGEST_WAIT_S: Final = 5.0
"""How long a thread waits for a write of another one, whose disk may hang."""
MAXIMUM_WAITING: Final = 500_000
"""Maximum number of buffered rows while the disk fails; beyond it the oldest are dropped, and the file says how
many.
"""

_LOST_ROWS: Final = Series("telemetry", "rows")
_ABANDONED: Final[list[TelemetryStore]] = []
"""Stores of a parent process, kept alive because SQLite forbids using or closing them in a child."""


class Writer:
    """Takes rows from any thread and appends them to a file of this process, every second.

    Args:
        about: metadata of the file besides the process and the time.
    """

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        self.folder = folder
        self._about = about
        self._store: TelemetryStore | None = None
        self._begin()

    def _begin(self) -> None:
        self._samples: deque[Sample] = deque()
        self._missing: deque[Missing] = deque()
        self._dropped = 0
        self._warned = False
        self._writing = Lock()
        self._is_writing = False
        self._ended = threading.Event()
        self._thread: Thread | None = None

    def add(self, sample: Sample) -> None:
        """Append one row at the next write; after closing, rows are dropped."""
        if self._ended.is_set():
            return
        self._samples.append(sample)
        if self._thread is None:
            self._start()

    def lacks(self, series: Series, reason: str) -> None:
        self._missing.append(Missing(series, reason, time.time_ns()))
        if self._thread is None:
            self._start()

    @contextlib.contextmanager
    def guarded(self, series: Series) -> Iterator[None]:
        """Record any error in the block, of a driver, a device or a tensor subclass, as a missing value."""
        with guard.attempt() as noting:
            yield
        if noting.error is not None:
            self.lacks(series, sentence(noting.error))

    def flush(self) -> None:
        """Write the waiting rows, unless another write hangs.

        A failing disk is reported once, and the write is retried the next time.
        """
        with self._turn() as is_ours:
            if is_ours:
                self._write()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether the block may use the store: not while another thread does, or the block that it interrupts."""
        is_held = self._writing.acquire(timeout_s=LONGEST_WAIT_S)
        is_ours = is_held and not self._is_writing
        self._is_writing |= is_ours
        try:
            yield is_ours
        finally:
            if is_ours:
                self._is_writing = False
            if is_held:
                self._writing.release()

    def _write(self) -> None:
        samples = [self._samples.popleft() for _ in range(len(self._samples))]
        missing = [self._missing.popleft() for _ in range(len(self._missing))]
        if not samples and not missing:
            return
        if self._dropped:
            lost = f"{self._dropped} rows were lost while the disk accepted none"
            missing.append(Missing(_LOST_ROWS, lost, time.time_ns()))
        try:
            if self._store is None:
                self._store = self._opened()
            self._store.append(samples, missing)
            self._dropped = 0
        except (OSError, sqlite3.Error, StepscopeError) as error:
            self._keep(samples, [each for each in missing if each.series != _LOST_ROWS])
            self._warn(f"telemetry cannot be written into {self.folder}: {sentence(error)}")

    @guard.entry
    def close(self) -> None:
        """Write the waiting rows and close the file; one that hangs is waited for LONGEST_WAIT_S at most."""
        self._ended.set()
        with self._turn() as is_ours:
            if not is_ours:
                return
            self._write()
            if self._store is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._store.close()
                self._store = None

    def abandon(self) -> None:
        self._ended.set()
        self._samples.clear()
        self._missing.clear()

    def after_fork(self) -> None:
        """In a child process, leave the parent's file and rows alone and begin a file of its own."""
        if self._store is not None:
            _ABANDONED.append(self._store)
            self._store = None
        self._begin()

    def _start(self) -> None:
        with self._turn() as is_ours:
            if is_ours and self._thread is None and not self._ended.is_set():
                _close_with_child(self)
                self._thread = Thread(self._run)
                self._thread.start()

    @guard.entry(in_background=True)
    def _run(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self.flush()

    def _opened(self) -> TelemetryStore:
        process, now = os.getpid(), time.time_ns()
        about = {**self._about, "process": str(process), "started_unix_ns": str(now)}
        return TelemetryStore(self.folder / f"{now}-{process}.sqlite", about)

    def _keep(self, samples: list[Sample], missing: list[Missing]) -> None:
        self._samples.extendleft(reversed(samples))
        self._missing.extendleft(reversed(missing))
        while len(self._samples) > MAXIMUM_WAITING:
            self._samples.popleft()
            self._dropped += 1
        while len(self._missing) > MAXIMUM_WAITING:
            self._missing.popleft()

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            guard.tell(text)


def _close_with_child(writer: Writer) -> None:
    """Close the writer in a child forked by multiprocessing, which skips atexit but runs its own finalizers."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(writer, writer.close, exitpriority=10)
