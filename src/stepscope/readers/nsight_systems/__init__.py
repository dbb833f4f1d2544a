"""Reader for SQLite exports of Nsight Systems (`nsys export --type sqlite`), with the NVTX ranges that label spans."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Final

import polars as pl

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.gathering import EXPLANATIONS as COMMON_EXPLANATIONS
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.nsight_systems import activities
from stepscope.readers.nsight_systems import activities as others
from stepscope.readers.nsight_systems.database import MAGIC, Database, Strings
from stepscope.readers.nsight_systems.lanes import MOST_LANES, Lanes, Selection, TableReader
from stepscope.readers.source import ByteSource, Reader, ReadResult
from stepscope.trace import naming
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.model import StoreWriter
from stepscope.trace.window import StepRange, Window

_NUMBERED: Final = re.compile(
    r"(?P<label>(?:.*[^a-zA-Z]|.*[a-z](?=[SIB]))?(?:step|iteration|iter|batch))[\s#_:=/.\-\[(]{0,3}(?P<number>\d{1,18})(?:\D.*)?",
    re.IGNORECASE | re.DOTALL,
)
_UNNUMBERED: Final = re.compile(
    r"(?:\[pl\]\[profile\])?(?:(?:\[Strategy\])?\w+\.)?"
    r"(?:run_training_batch|train(?:ing)?[ _]?(?:step|iteration|batch))"
    r"|step|iteration|train_batch",
    re.IGNORECASE,
)
_FEWEST_UNNUMBERED: Final = 3
_LONGEST_NAME: Final = 200
_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "name": pl.String,
    "lane": pl.Int32,
}


def may_mark_steps(name: str) -> bool:
    return len(name) <= _LONGEST_NAME and (_NUMBERED.fullmatch(name) or _UNNUMBERED.fullmatch(name)) is not None


class StepMarks:
    """Ranges whose names may mark steps, collected until all of them are known."""

    def __init__(self) -> None:
        self._parts = [pl.DataFrame(schema=_SCHEMA)]

    def add(self, frame: pl.DataFrame) -> None:
        """Add ranges with columns start_ns, duration_ns, name and lane."""
        self._parts.append(frame.select(pl.col(name).cast(dtype) for name, dtype in _SCHEMA.items()))

    def numbered(self) -> pl.DataFrame:
        """Return all ranges with `step`, the number for ranges whose label marks steps, null for others.

        Of several possible labels, the one that covers the most time wins, so iterations win over the batches inside
        them.
        """
        rows = pl.concat(self._parts).sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
        labels = pl.DataFrame(
            [(name, *_label_and_number(name)) for name in rows["name"].unique()],
            schema={"name": pl.String, "label": pl.String, "number": pl.Int64},
            orient="row",
        )
        rows = rows.join(labels, on="name", how="left", maintain_order="left")
        for with_number in (True, False):
            candidates = rows.filter(pl.col("number").is_not_null() == with_number)
            best = _best(candidates, with_number)
            if best is not None:
                is_step = (pl.col("label") == best) & (pl.col("number").is_not_null() == with_number)
                order = pl.int_range(pl.len()).over("lane")
                number = pl.col("number") if with_number else order
                marked = rows.filter(is_step).with_columns(step=number)
                others = rows.filter(~is_step).with_columns(step=pl.lit(None, pl.Int64))
                return pl.concat([marked, others]).select(*_SCHEMA, "step")
        return rows.select(*_SCHEMA, step=pl.lit(None, pl.Int64))


def _label_and_number(name: str) -> tuple[str, int | None]:
    match = _NUMBERED.fullmatch(name)
    return (match["label"].lower(), int(match["number"])) if match else (name, None)


def _best(candidates: pl.DataFrame, with_number: bool) -> str | None:
    """The label whose ranges do not overlap on any thread and cover the most time, or None."""
    candidates = candidates.filter(pl.col("duration_ns") > 0)
    if candidates.is_empty():
        return None
    end = pl.col("start_ns") + pl.col("duration_ns")
    follows = (pl.col("start_ns") >= end.shift(1)).fill_null(True).all()
    grows = (pl.col("number").diff() > 0).fill_null(True).all() if with_number else pl.lit(True)
    fewest = 1 if with_number else _FEWEST_UNNUMBERED
    by_thread = candidates.group_by("label", "lane").agg(
        pl.len().alias("count"), follows.alias("follows"), grows.alias("grows"), pl.col("duration_ns").sum()
    )
    labels = (
        by_thread.group_by("label")
        .agg(pl.col("count").max(), pl.col("follows", "grows").all(), pl.col("duration_ns").max())
        .filter((pl.col("count") >= fewest) & pl.col("follows") & pl.col("grows"))
        .filter((pl.col("count") > 1) | ~pl.col("label").str.ends_with("batch"))
        .sort("duration_ns", "count", "label", descending=[True, True, False])
    )
    return None if labels.is_empty() else str(labels["label"][0])


NVTX: Final = "NVTX_EVENTS"
_RANGES: Final = (35, 37, 59, 60, 66, 68, 70, 71)
"""eventType of ranges: push/pop and start/end, each also from imported files."""
_MARKS: Final = (34, 65)
"""eventType of instants."""
_EMITTED: Final = (
    r"(?s)^(?<name>.+?)(?:, seq = (?<sequence>-?\d{1,18}))?(?:, op_id = (?<id>\d{1,18}))?"
    r"(?:, sizes = (?<shapes>\[[\[\]\d, -]*\]))?(?:, input_op_ids = \[.*\])?$"
)
"""Format of an operator written by torch.autograd.profiler.emit_nvtx."""
_OPERATOR: Final = re.compile(r"[A-Za-z_][\w.]*(?:::[\w.~<>]+)*(?:: [\w.:<>]+)?")
_MODULE: Final = re.compile(r"\{'Module': '([^'\n]{1,500})'")
"""Format of an nn.Module call written by the layer-wise hooks of NVIDIA and vLLM."""
_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    **dict.fromkeys(("start", "end", "eventType", "globalTid", "textId"), pl.Int64),
    "text": pl.String,
}


@dataclass
class Ranges(TableReader):
    """Reads NVTX ranges; call `read` once, then `finish` when everything else was gathered."""

    _marks: StepMarks = field(default_factory=StepMarks)
    _open: list[pl.DataFrame] = field(default_factory=list)
    has_shapes: bool = False

    def read(self) -> Iterator[None]:
        """Gather all ranges except those that may mark steps, yielding now and then to let the caller show progress."""
        where, parameters = self._selection.of_ranges(NVTX)
        for batch in self._database.batches(NVTX, _COLUMNS, where=where, parameters=parameters):
            batch = self._with_times(batch)
            text = self._strings.series(batch["textId"]).alias("registered")
            batch = batch.with_columns(
                self._lanes.threads(batch["globalTid"]).alias("lane"), pl.coalesce("text", text).alias("text")
            ).filter(pl.col("text").is_not_null())
            never_ended = batch.filter(pl.col("end").is_null())
            if not never_ended.is_empty():
                self._open.append(never_ended)
            self._add(self._selection.complete(NVTX, batch.filter(pl.col("end").is_not_null())))
            yield

    def finish(self, end: Callable[[], int]) -> None:
        """Gather the remaining ranges; those never ended are closed at `end`."""
        for batch in self._open:
            batch = batch.with_columns(end=pl.max_horizontal("start", pl.lit(end())))
            self._gathering.damage["open_range"] += batch.height
            self._add(self._selection.complete(NVTX, batch))
        self._add_annotations(self._marks.numbered())

    def _with_times(self, batch: pl.DataFrame) -> pl.DataFrame:
        kind = pl.col("eventType")
        if batch["eventType"].null_count() == batch.height:  # some exports lack the column
            return batch
        batch = batch.filter(kind.is_in(_RANGES + _MARKS))
        return batch.with_columns(end=pl.when(kind.is_in(_MARKS)).then("start").otherwise("end"))

    def _add(self, batch: pl.DataFrame) -> None:
        if batch.is_empty():
            return
        described = _described(batch["text"].unique())
        batch = batch.join(described, on="text", how="left", maintain_order="left")
        self.has_shapes |= batch["shapes"].null_count() < batch.height
        by_table = {str(table): part for (table,), part in batch.group_by("table", maintain_order=True)}
        if "operators" in by_table:
            self._gathering.add(
                "operators",
                by_table["operators"].select(
                    *("start_ns", "duration_ns", "name", "lane"), sequence_number="sequence", input_shapes="shapes"
                ),
            )
        if "frames" in by_table:
            self._gathering.add("frames", by_table["frames"].select("start_ns", "duration_ns", "name", "lane"))
        if "steps" in by_table:
            self._marks.add(by_table["steps"].select("start_ns", "duration_ns", "name", "lane"))
        if "annotations" in by_table:
            self._add_annotations(by_table["annotations"].with_columns(step=pl.lit(None, pl.Int64)))

    def _add_annotations(self, frame: pl.DataFrame) -> None:
        frame = frame.select("start_ns", "duration_ns", "name", "lane", kind=pl.lit("host"), step="step")
        self._gathering.add("annotations", frame)


def _described(texts: pl.Series) -> pl.DataFrame:
    """Parse the text of each range into columns text, name, sequence, shapes and table."""
    parts = texts.to_frame("text").with_columns(pl.col("text").str.extract_groups(_EMITTED).alias("parts"))
    parts = parts.unnest("parts").with_columns(
        pl.col("name").fill_null(pl.col("text")),
        pl.col("sequence").cast(pl.Int64, strict=False),
        emitted=pl.any_horizontal(pl.col("sequence", "id", "shapes").is_not_null()),
    )
    names = parts.select("name", "emitted").unique()
    meanings = [_meaning(name, emitted) for name, emitted in names.iter_rows()]
    found = names.with_columns(
        pl.Series("table", [table for table, _ in meanings], dtype=pl.String),
        pl.Series("shown", [name for _, name in meanings], dtype=pl.String),
    )
    parts = parts.join(found, on=["name", "emitted"], how="left", maintain_order="left")
    return parts.select("text", "sequence", "shapes", "table", name="shown")


@lru_cache(maxsize=65536)
def _meaning(name: str, emitted: bool) -> tuple[str, str]:
    """Return a range's table ("steps" if it may mark steps) and name; `emitted` if emit_nvtx wrote it."""
    if module := _MODULE.match(name):
        return "frames", f"nn.Module: {module[1]}"
    table = naming.host_slice_table(name)
    if table == "frames":
        return "frames", naming.frame_name(name)
    if table in (None, "launches"):  # a range is never a device API call, whatever its name
        if may_mark_steps(name):
            return "steps", name
        table = "operators" if emitted and _OPERATOR.fullmatch(name) else "annotations"
    return table or "annotations", name


_UNPACKED: Final = "unpacked.sqlite"
_LATEST: Final = 2**62
_EVENT_TABLES: Final = {
    **dict.fromkeys((activities.RUNTIME, *activities.DEVICE_TABLES, activities.SYNCHRONIZATION), "start"),
    **dict.fromkeys((NVTX, *others.HOST_CALLS, *others.OVERHEADS), "start"),
}
"""Tables of slices and their start column; the earliest start is the start of the trace."""
_READ: Final = {*_EVENT_TABLES, others.SCHEDULING, others.MEMORY, others.METRICS, activities.EVENT}
_OWN_TABLES: Final = ("TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS", "META_DATA_EXPORT")
_TIMES: Final = ("start", "timestamp", "rawTimestamp")
_NOT_EVENTS: Final = {"CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS", "CUDA_GRAPH_EXEC_EVENTS", "DIAGNOSTIC_EVENT"}

EXPLANATIONS: Final = {
    **COMMON_EXPLANATIONS,
    "damaged_table": "a table could not be read to its end: {}",
    "long_table": "a descriptive table is too long, and the rest of it was left out: {}",
    "wrong_type": "values of a wrong type were left out, by table and column: {}",
    "incomplete_row": "rows without a start, an end or a size were left out, by table: {}",
    "too_many_lanes": f"the file names more than {MOST_LANES:,} threads and streams; what the others did was left out",
    "open_range": "ranges that were still open at the end of the recording were ended there",
    "table_left_out": "events of kinds that a trace has no table for were left out: {}",
    "write_ahead_log": "the database has a write-ahead log (-wal), whose content was not read",
}


def recognises(head: bytes) -> bool:
    """Whether a file starts like an SQLite database; `read` checks which program wrote it."""
    return head.startswith(MAGIC)


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
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
        self._lanes = Lanes(database, self._gathering, strings)
        parts = (database, self._gathering, strings, self._lanes, selection)
        self._activities = activities.Activities(*parts)
        self._ranges = Ranges(*parts)
        self._others = others.Others(*parts)

    def tables(self) -> Iterator[None]:
        yield from chain(self._activities.read(), self._ranges.read(), self._others.read())

    def finish(self, window: Window | None, steps: StepRange | None) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        gathering, database = self._gathering, self._database
        self._ranges.finish(self._end)
        if not gathering.complete_events and window is None:
            raise UnreadableTraceError(
                f"{database.name} is an export of Nsight Systems without a readable event: "
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
            rank=self._lanes.rank,
            origin_unix_ns=self._origin_unix_ns(),
            devices=self._lanes.devices(),
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
        if self._lanes.has_too_many_lanes:
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
            raise UnreadableTraceError(
                f"{source.name} cannot be unpacked: {source.damage}, and part of a database cannot be read"
            )
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
            f"{database.name} is a rocpd database of rocprofv3, which is not supported: "
            "record with rocprofv3 --output-format json, and give that file"
        )
    if any(table in tables for table in _OWN_TABLES) and "StringIds" in tables:
        raise UnreadableTraceError(
            f"{database.name} is an export of Nsight Systems without events: "
            "record with nsys profile --trace=cuda,nvtx,osrt"
        )
    raise NotATraceError(
        f"{database.name} is an SQLite database, but not an export of Nsight Systems: "
        "it has none of that profiler's event tables"
    )


READER: Final = Reader("nsight_systems", recognises, read)
