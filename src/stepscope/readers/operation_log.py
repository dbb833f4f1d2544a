"""Logs of the operations of all ranks of a job, as training frameworks write them: a Parquet file, or a Chrome trace.

Parquet: one row for each operation of a worker in a step, columns dp_rank, stage, step, optype, start_ts and duration
(seconds), seq_id, and where they are known rank, mc and gmc (model chunks). Chrome trace: a list of events; processes
are data-parallel ranks ("DP rank [2]"), threads streams of a worker ("PP rank 1, TP rank 0, compute"), and arguments
have step, seq_id and model_chunk.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, cast

import msgspec
import polars as pl

from stepscope.errors import UnreadableTraceError
from stepscope.readers.source import memory_limit

LOG_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "dp_rank": pl.Int64,  # number of the data-parallel rank
    "stage": pl.Int64,  # pipeline stage
    "rank": pl.Int64,  # number of the worker; -1 where unknown
    "step": pl.Int64,
    "optype": pl.String,  # such as "forward-compute"
    "seq_id": pl.Int64,  # number among the worker's operations of this type in the step
    "mc": pl.Int64,  # model chunk of the stage; -1 where unknown
    "gmc": pl.Int64,  # the same in the whole model; -1 where unknown
    "start_s": pl.Float64,
    "duration_s": pl.Float64,
}
"""Columns of a log of operations: one row for each operation of each worker in each step."""

_NEEDED: Final = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
_PARQUET: Final = b"PAR1"
_HEAD_BYTES: Final = 1 << 16
_LARGEST_BYTES: Final = 1 << 30
"""Of a Chrome trace, unpacked."""
_TIMES_DECODED: Final = 10
"""Memory that a decoded Chrome trace takes, in times its unpacked size."""
_ROW_BYTES: Final = 200
"""Memory that an operation takes while the log is read and replayed; packed it may be a fraction of a byte."""
_LATEST_S, _LONGEST_S = 1e12, 1e8
"""Times beyond these cannot be."""
_MARKS: Final = (b'"forward-compute"', b'"backward-compute"')
_MOST_STAGES: Final = 4096
_WORKER: Final = re.compile(r"PP rank (\d{1,6})\b")
_RANK: Final = re.compile(r"DP rank \[?(\d{1,6})\b")


def operation_log(path: str | Path) -> pl.DataFrame | None:
    """The operations in a file, columns as in LOG_SCHEMA; None if it is something else.

    Raises:
        UnreadableTraceError: it is a log of operations, but damaged or incomplete.
    """
    try:
        head = _head(path)
    except (OSError, EOFError, zlib.error):
        return None  # the readers of traces say what is wrong with it
    if head.startswith(_PARQUET):
        return _of_parquet(path)
    is_timeline = head.lstrip()[:1] == b"[" and any(mark in head for mark in _MARKS) and b'"seq_id"' in head
    return _of_timeline(path) if is_timeline else None


def _head(path: str | Path) -> bytes:
    with _unpacked(path) as file:
        return file.read(_HEAD_BYTES)


def _unpacked(path: str | Path) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_packed else file


def _of_parquet(path: str | Path) -> pl.DataFrame | None:
    try:
        columns = pl.read_parquet_schema(path)
        if any(name not in columns for name in _NEEDED):
            return None
        _check_room(path, pl.scan_parquet(path).select(pl.len()).collect().item() * _ROW_BYTES)
        rows = pl.read_parquet(path, columns=[*_NEEDED, *(each for each in ("rank", "mc", "gmc") if each in columns)])
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UnreadableTraceError(f"{path} is a damaged Parquet file: {error}") from error
    return _conformed(path, rows.rename({"start_ts": "start_s", "duration": "duration_s"}))


_Id: TypeAlias = int | float | str | None


class _Event(msgspec.Struct):
    ph: str | None = None
    name: str | None = None
    pid: _Id = None
    tid: _Id = None
    ts: float | None = None
    dur: float | None = None
    args: dict[str, Any] | None = None


def _check_room(path: str | Path, needed: int) -> None:
    if needed > memory_limit():
        raise UnreadableTraceError(f"{path} is a log of more operations than the memory has room for")


def _of_timeline(path: str | Path) -> pl.DataFrame:
    try:
        with _unpacked(path) as file:
            data = file.read(_LARGEST_BYTES + 1)
        _check_room(path, len(data) * _TIMES_DECODED)
        if len(data) > _LARGEST_BYTES:
            raise UnreadableTraceError(f"{path} has more than {_LARGEST_BYTES >> 30} GiB, unpacked")
        events = msgspec.json.decode(data, type=list[_Event])
    except RecursionError as error:
        raise UnreadableTraceError(f"{path} is a damaged log of operations: it is nested too deeply") from error
    except (OSError, EOFError, ValueError, zlib.error, msgspec.MsgspecError) as error:
        raise UnreadableTraceError(f"{path} is a damaged log of operations: {error}") from error
    stages = _named(events, "thread_name", ("pid", "tid"), _WORKER)
    ranks = _named(events, "process_name", ("pid",), _RANK)
    rows = []
    for event in events:
        arguments, place = event.args, (event.pid, event.tid)
        if event.ph != "X" or arguments is None or place not in stages:
            continue
        rows.append((
            ranks.get((event.pid,), event.pid), stages[place], arguments.get("step"), event.name,
            arguments.get("seq_id"), arguments.get("model_chunk", -1), event.ts, event.dur,
        ))  # fmt: skip
    names = ("dp_rank", "stage", "step", "optype", "seq_id", "mc", "start_s", "duration_s")
    try:
        table = pl.DataFrame(rows, schema={name: LOG_SCHEMA[name] for name in names}, orient="row", strict=False)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableTraceError(f"{path} is a damaged log of operations: {error}") from error
    seconds = (pl.col(name) / 1e6 for name in ("start_s", "duration_s"))
    own = pl.col("mc") * (pl.col("stage").max() + 1) + pl.col("stage")
    return _conformed(path, table.with_columns(*seconds, gmc=pl.when(pl.col("mc") >= 0).then(own)))


def _named(
    events: Iterable[_Event], kind: str, keys: tuple[str, ...], pattern: re.Pattern[str]
) -> dict[tuple[_Id, ...], int]:
    """The numbers in the names of processes or threads."""
    found = {}
    for event in events:
        if event.name == kind and event.args is not None:
            match = pattern.search(str(event.args.get("name")))
            if match is not None:
                found[tuple(getattr(event, key) for key in keys)] = int(match[1])
    return found


def _conformed(path: str | Path, rows: pl.DataFrame) -> pl.DataFrame:
    """The log's columns and types, each step's times from its first operation.

    Raises:
        UnreadableTraceError: a value is missing or cannot be.
    """
    try:
        if any(kind.is_nested() for kind in rows.dtypes):
            raise pl.exceptions.InvalidOperationError
        rows = rows.select(
            (pl.col(name) if name in rows.columns else pl.lit(-1)).cast(kind, strict=False).alias(name)
            for name, kind in LOG_SCHEMA.items()
        ).with_columns(pl.col("rank", "mc", "gmc").fill_null(-1))
    except pl.exceptions.PolarsError as error:
        raise UnreadableTraceError(f"{path} is a log of operations, but a column is of another type") from error
    least = {"dp_rank": 0, "stage": 0, "seq_id": 0, "duration_s": 0}
    bad = rows.filter(
        pl.any_horizontal(pl.all().is_null())
        | ~(pl.col("start_s").abs() < _LATEST_S)
        | ~(pl.col("duration_s") < _LONGEST_S)
        | pl.any_horizontal(pl.col(name) < value for name, value in least.items())
        | (pl.col("stage") >= _MOST_STAGES)
    )
    if bad.height or not rows.height:
        what = f"{bad.height} of its {rows.height} operations lack a value or have an impossible one"
        raise UnreadableTraceError(f"{path} is a log of operations, but {what if rows.height else 'it is empty'}")
    return rows.with_columns(pl.col("start_s") - pl.col("start_s").min().over("step"))
