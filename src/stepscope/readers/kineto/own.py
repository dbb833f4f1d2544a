"""What a Chrome trace of `stepscope export` says beyond Kineto's words, so that it reads back to the same tables.

Such a file is a Kineto trace like any other. What Kineto has no word for, or would be read back differently, stands
under names that begin with "stepscope": an entry of the header with the metadata, metadata events with the lanes, the
links and those references between rows that do not follow from times and numbers, and arguments of single events.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
import polars as pl

from stepscope.readers.kineto.events import DECODE_ERRORS
from stepscope.readers.kineto.fields import Int64
from stepscope.trace.model import Metadata, TraceWarning
from stepscope.trace.program_facts import from_header
from stepscope.trace.tables import SCHEMAS

HEADER: Final = "stepscopeExport"
"""Entry of the header: an object with version, metadata (as in store.json) and warnings."""
VERSION: Final = 1
EVENT: Final = "stepscope"
"""Name of the metadata events that hold links and references of rows."""
LANE: Final = "stepscope lane"
"""Argument of the metadata event that names a thread: the row of `lanes`."""
ROWS_OF: Final = "stepscope rows of lane"
"""Argument of the metadata event that names a thread which is none: the number of the lane whose rows stand there."""
NULL: Final = "stepscope null"
"""Argument: the columns that are null although the event says otherwise, separated by commas."""
PREFIX: Final = "stepscope "
"""What an argument that holds a column is called, before the column's name."""
TABLES: Final = {
    "cpu_op": "operators",
    "cuda_runtime": "launches",
    "kernel": "device_work",
    "gpu_memcpy": "device_work",
    "gpu_memset": "device_work",
    "python_function": "frames",
    "stepscope_line": "lines",
    "stepscope_module": "modules",
    "user_annotation": "annotations",
    "gpu_user_annotation": "annotations",
    "overhead": "annotations",
    "trace": "annotations",
    "cuda_sync": "synchronisations",
}
"""Category of an event in such a file -> the table that it is a row of."""
REFERENCES: Final = {"operators": "parent", "frames": "parent", "launches": "operator", "device_work": "launch"}
"""Table -> its column of row numbers."""
UNWRITTEN: Final = frozenset({"start_ns", "duration_ns", "lane", *REFERENCES.values()})
"""Columns that never stand in the arguments of an event."""
_HEADER: Final = re.compile(rb'"' + HEADER.encode() + rb'"\s*:')
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_MOST_WARNINGS: Final = 1000
_LONGEST_TEXT: Final = 4096


class Header(msgspec.Struct):
    """The entry of the header."""

    version: int = 0
    metadata: Metadata = Metadata()
    warnings: tuple[TraceWarning, ...] = ()


class Lane(msgspec.Struct):
    """A row of `lanes`, but for its number."""

    kind: str | None = None
    process: str | None = None
    process_name: str | None = None
    thread: str | None = None
    name: str | None = None
    rank: int | None = None
    device: str | None = None
    queue: str | None = None


class ThreadName(msgspec.Struct):
    """The arguments of an event that names a thread."""

    lane: Lane | None = msgspec.field(default=None, name=LANE)
    rows_of: int | None = msgspec.field(default=None, name=ROWS_OF)


class Rows(msgspec.Struct):
    """The arguments of an event that holds links (kinds, sources, targets) or references (rows, targets)."""

    table: str
    column: str = ""
    kinds: list[str | None] = []
    sources: list[int | None] = []
    rows: list[int] = []
    targets: list[int | None] = []


def is_own(head: bytes) -> bool:
    """Whether the text before a document's events says that `stepscope export` wrote it."""
    return _HEADER.search(head.partition(b'"traceEvents"')[0]) is not None


def _arguments(table: str) -> type[msgspec.Struct]:
    """A type for the arguments that hold columns of a table; what is not there is UNSET."""
    types: dict[type[pl.DataType], Any] = {pl.Int64: Int64, pl.Int32: Int32, pl.Float64: float | str}
    fields: list[Any] = [
        (column, types.get(dtype, str) | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET, name=PREFIX + column))
        for column, dtype in SCHEMAS[table].items()
        if column not in UNWRITTEN
    ]
    null = ("null_columns", str, msgspec.field(default="", name=NULL))
    return msgspec.defstruct(f"Own_{table}", [*fields, null])


_ARGUMENTS: Final = {table: _arguments(table) for table in SCHEMAS if table not in ("lanes", "links")}


def columns_of(table: str, raw: bytes) -> dict[str, Any]:
    """The columns that an event's arguments set; None where they make one null.

    Raises:
        ValueError: an argument is of a wrong type.
    """
    try:
        found = msgspec.json.decode(raw, type=_ARGUMENTS[table])
    except DECODE_ERRORS as error:
        raise ValueError(str(error)) from error
    values = {
        column: _number(value) if SCHEMAS[table][column].is_float() else value
        for column in found.__struct_fields__
        if column != "null_columns" and (value := getattr(found, column)) is not msgspec.UNSET
    }
    null = {column: None for column in found.null_columns.split(",") if column in SCHEMAS[table]}  # type: ignore[attr-defined]
    return {column: value for column, value in (values | null).items() if column not in UNWRITTEN}


def _number(value: float | str) -> float:
    """A number that JSON has no word for is text: nan, inf, -inf."""
    return float(value)


def with_header(metadata: Metadata, value: Any, damage: Counter[str]) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """The metadata of the trace that was exported, and its warnings; path, counts and window are the file's own."""
    try:
        header = msgspec.convert(value, Header)
    except (msgspec.ValidationError, RecursionError):
        damage["damaged_header"] += 1
        return metadata, ()
    told = header.metadata
    own = replace(
        told,
        path=metadata.path,
        format=told.format[:_LONGEST_TEXT] or metadata.format,
        events=metadata.events,
        complete_events=metadata.complete_events,
        origin_unix_ns=_int64(told.origin_unix_ns),
        rank=_int64(told.rank),
        world_size=_int64(told.world_size),
        window=metadata.window or told.window,
        program=metadata.program or from_header(value.get("metadata", {}).get("program")),
    )
    return own, tuple(header.warnings[:_MOST_WARNINGS])


def _int64(value: int | None) -> int | None:
    return value if value is not None and abs(value) < 2**63 else None


def decoded(raws: Sequence[bytes], kind: type[msgspec.Struct], damage: Counter[str]) -> list[Any]:
    """Each argument object as that type; what is none is left out and counted."""
    found = []
    for raw in raws:
        try:
            found.append(msgspec.json.decode(raw, type=kind))
        except DECODE_ERRORS:
            damage["damaged_arguments"] += 1
    return found
