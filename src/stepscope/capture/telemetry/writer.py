"""Rows wait in memory until a thread of its own writes them: logging never waits for a disk."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepscope.capture import guard
from stepscope.capture.guard import sentence
from stepscope.capture.telemetry.store import Missing, Sample, Series, TelemetryStore
from stepscope.errors import StepscopeError

FLUSH_S: Final = 1.0
"""Seconds between two writes, and so what a killed process loses at most."""
MAXIMUM_WAITING: Final = 500_000
"""Rows kept while the disk takes none; beyond them the oldest go, and the file says how many."""

_LOST_ROWS: Final = Series("telemetry", "rows")
_ABANDONED: Final[list[TelemetryStore]] = []
"""Stores of a parent process: SQLite forbids to use or close them in a child, so they are kept from being freed."""


class Writer:
    """Takes rows from any thread and appends them to a file of this process, every second.

    Args:
        folder: where the file goes; it is made when there is something to write.
        about: what the file says of itself besides its process and time.
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
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, sample: Sample) -> None:
        """Append one row, soon; after the end, none."""
        if self._ended.is_set():
            return
        self._samples.append(sample)
        if self._thread is None:
            self._start()

    def lacks(self, series: Series, reason: str) -> None:
        """Note that a series could not be had, and why."""
        self._missing.append(Missing(series, reason, time.time_ns()))
        if self._thread is None:
            self._start()

    @contextlib.contextmanager
    def guarded(self, series: Series) -> Iterator[None]:
        """What fails inside is noted as missing, whatever a driver, a device or a tensor subclass may raise."""
        with guard.attempt() as noting:
            yield
        if noting.error is not None:
            self.lacks(series, sentence(noting.error))

    def flush(self) -> None:
        """Write what waits. A disk that takes nothing is complained of once, and tried again the next time."""
        with self._writing:
            samples = [self._samples.popleft() for _ in range(len(self._samples))]
            missing = [self._missing.popleft() for _ in range(len(self._missing))]
            if not samples and not missing:
                return
            if self._dropped:
                lost = f"{self._dropped} rows were lost while the disk took none"
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
        """Write what waits and close the file."""
        self._ended.set()
        self.flush()
        with self._writing:
            if self._store is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._store.close()
                self._store = None

    def abandon(self) -> None:
        """Write no more."""
        self._ended.set()
        self._samples.clear()
        self._missing.clear()

    def after_fork(self) -> None:
        """In a child process: leave the parent's file and rows to the parent, and begin a file of its own."""
        if self._store is not None:
            _ABANDONED.append(self._store)
            self._store = None
        self._begin()

    def _start(self) -> None:
        with self._writing:
            if self._thread is None and not self._ended.is_set():
                _close_with_child(self)
                self._thread = threading.Thread(target=self._run, name="stepscope telemetry writer", daemon=True)
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
    """A child that multiprocessing forked ends without what atexit was told, but calls its own finalizers."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(writer, writer.close, exitpriority=10)
