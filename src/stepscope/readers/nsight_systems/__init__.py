"""Reader for SQLite exports of Nsight Systems (`nsys export --type sqlite`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final

import polars as pl

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.gathering import EXPLANATIONS as COMMON_EXPLANATIONS
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.nsight_systems import activities, ranges
from stepscope.readers.nsight_systems import activities as others
from stepscope.readers.nsight_systems.database import MAGIC, Database, Strings
from stepscope.readers.nsight_systems.places import MOST_LANES, Places, Selection
from stepscope.readers.source import ByteSource, Found, Reader
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.store_writing import StoreWriter
from stepscope.trace.window import StepRange, Window

_UNPACKED: Final = "unpacked.sqlite"
_LATEST: Final = 2**62
_EVENT_TABLES: Final = {
    **dict.fromkeys((activities.RUNTIME, *activities.DEVICE_TABLES, activities.SYNCHRONIZATION), "start"),
    **dict.fromkeys((ranges.NVTX, *others.HOST_CALLS, *others.OVERHEADS), "start"),
}
"""Tables of slices and their start column; the earliest start is the start of the trace."""
_READ: Final = {*_EVENT_TABLES, others.SCHEDULING, others.MEMORY, others.METRICS, activities.EVENT}
_OWN_TABLES: Final = ("TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS", "META_DATA_EXPORT")
_TIMES: Final = ("start", "timestamp", "rawTimestamp")
_NOT_EVENTS: Final = {"CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS", "CUDA_GRAPH_EXEC_EVENTS", "DIAGNOSTIC_EVENT"}

EXPLANATIONS: Final = {
    **COMMON_EXPLANATIONS,
    "damaged_table": "a table could not be read to its end: {}",
    "long_table": "a table that describes the recording is longer than any is, and its rest was left out: {}",
    "wrong_type": "values of a wrong type were left out, by table and column: {}",
    "incomplete_row": "rows without a start, an end or a size were left out, by table: {}",
    "too_many_lanes": f"the file names more than {MOST_LANES:,} threads and streams; what the others did was left out",
    "open_range": "ranges that were still open at the end of the recording were ended there",
    "table_left_out": "events that no table of a trace holds were left out: {}",
    "write_ahead_log": "a write-ahead log (-wal) lies beside the database, and what stands in it was not read",
}


def recognises(head: bytes) -> bool:
    """Whether a file starts like an SQLite database; `read` checks which program wrote it."""
    return head.startswith(MAGIC)


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> Found:
    """Read an export of Nsight Systems into the tables of `writer`.

    The recorded process's environment (META_DATA_CAPTURE, TARGET_INFO_SYSTEM_ENV) and output are never queried.

    Raises:
        NotATraceError: the database is not an Nsight Systems export.
        UnreadableTraceError: no event in it could be read.
        UsageError: the requested steps do not exist.
    """
    damage: Counter[str] = Counter()
    with _file(source, writer.directory, damage) as path, Database(path, source.name, damage) as database:
        _refuse_others(database)
        reading = _Reading(database, writer, damage, window)
        for _ in reading.tables():
            if source.total_bytes is not None:
                source.progress(min(database.read_bytes, source.total_bytes), source.total_bytes)
        return reading.finish(window, steps)


class _Reading:
    def __init__(self, database: Database, writer: StoreWriter, damage: Counter[str], window: Window | None) -> None:
        self._database = database
        self._writer = writer
        self._gathering = Gathering(writer.directory, damage=damage)
        origin = None if window is None else database.extreme("min", _EVENT_TABLES)
        wanted = None if window is None else _shifted(window, origin or 0)
        self._gathering.origin_ns = origin
        selection = Selection(database, damage, wanted, activities.DEVICE_TABLES, activities.RUNTIME)
        strings = Strings(database, self._gathering.pool)
        self._places = Places(database, self._gathering, strings)
        parts = (database, self._gathering, strings, self._places, selection)
        self._activities = activities.Activities(*parts)
        self._ranges = ranges.Ranges(*parts)
        self._others = others.Others(*parts)

    def tables(self) -> Iterator[None]:
        yield from chain(self._activities.read(), self._ranges.read(), self._others.read())

    def finish(self, window: Window | None, steps: StepRange | None) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        gathering, database = self._gathering, self._database
        self._ranges.finish(self._end)
        if not gathering.complete_events and window is None:
            raise UnreadableTraceError(
                f"{database.name} is an export of Nsight Systems without an event that could be read: "
                "record with nsys profile --trace=cuda,nvtx,osrt"
            )
        self._count_left_out()
        read = gathering.write(self._writer, window, steps)
        recorded = {"shapes": self._ranges.has_shapes, "memory": self._others.has_memory}
        metadata = Metadata(
            path=database.name,
            format="nsight_systems",
            events=gathering.events,
            complete_events=gathering.complete_events,
            rank=self._places.rank,
            origin_unix_ns=self._origin_unix_ns(),
            devices=self._places.devices(),
            recorded=tuple(part for part, is_there in recorded.items() if is_there) or None,
            window=read,
        )
        return metadata, warnings(gathering.damage, EXPLANATIONS)

    def _end(self) -> int:
        """On the file's clock; open ranges are closed there."""
        details = self._database.whole("ANALYSIS_DETAILS", {"stopTime": pl.Int64}, 100)
        stops = [stop for stop in details["stopTime"] if stop is not None]
        return max(stops, default=self._database.extreme("max", dict.fromkeys(_EVENT_TABLES, "end")) or 0)

    def _origin_unix_ns(self) -> int | None:
        """The file counts from the start of capture, or by the machine's clock."""
        columns = {"utcEpochNs": pl.Int64, "systemClockNs": pl.Int64}
        rows = self._database.whole("TARGET_INFO_SESSION_START_TIME", columns, 100)
        if rows.height != 1 or rows["utcEpochNs"][0] is None or self._gathering.origin_ns is None:
            return None
        unix_ns = int(rows["utcEpochNs"][0]) + self._gathering.origin_ns - int(rows["systemClockNs"][0] or 0)
        return unix_ns if 0 < unix_ns < _LATEST else None

    def _count_left_out(self) -> None:
        for table, columns in self._database.tables.items():
            has_events = table not in _READ | _NOT_EVENTS and any(time in columns for time in _TIMES)
            if has_events and self._database.is_filled(table):
                self._gathering.damage[f"table_left_out:{table}"] += 1
        if self._places.has_too_many_lanes:
            self._gathering.damage["too_many_lanes"] += 1


def _shifted(window: Window, origin: int) -> Window:
    return Window(
        max(min(window.start_ns + origin, _LATEST), -_LATEST), max(min(window.end_ns + origin, _LATEST), -_LATEST)
    )


@contextmanager
def _file(source: ByteSource, directory: Path, damage: Counter[str]) -> Iterator[Path]:
    """Yield the database as a file, unpacked if needed; raise UnreadableTraceError if unpacking fails."""
    if source.plain_path is not None:
        log = Path(f"{source.plain_path}-wal")
        if log.is_file() and log.stat().st_size:
            damage["write_ahead_log"] += 1
        yield source.plain_path
        return
    unpacked = directory / _UNPACKED
    try:
        try:
            with unpacked.open("wb") as file:
                for block in source.blocks():
                    file.write(block)
        except OSError as error:
            raise UnreadableTraceError(f"{source.name} cannot be unpacked: {error.strerror}") from error
        if source.damage:
            raise UnreadableTraceError(f"{source.name} cannot be unpacked: {source.damage}, and a part is no database")
        yield unpacked
    finally:
        if os.path.exists(unpacked):
            unpacked.unlink()


def _refuse_others(database: Database) -> None:
    """Raise an error that says what the database is, if it is not an export of Nsight Systems."""
    tables = database.tables
    if any(table in tables for table in _READ) and ("StringIds" in tables or any(own in tables for own in _OWN_TABLES)):
        return
    if any(table.startswith("rocpd_") for table in tables):
        raise NotATraceError(
            f"{database.name} is a rocpd database of rocprofv3, which is not read: "
            "record with rocprofv3 --output-format json, and give that file"
        )
    if any(table in tables for table in _OWN_TABLES) and "StringIds" in tables:
        raise UnreadableTraceError(
            f"{database.name} is an export of Nsight Systems without events: "
            "record with nsys profile --trace=cuda,nvtx,osrt"
        )
    raise NotATraceError(
        f"{database.name} is an SQLite database, but no export of Nsight Systems: "
        "it has none of that profiler's tables of events"
    )


READER: Final = Reader("nsight_systems", recognises, read)
