"""Telemetry as the processes of a run wrote it: one SQLite file each, which may still be growing.

`stepscope.record.telemetry.store` writes them. A file is untrusted like any trace: only values of the expected type
are taken from it.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from stepscope.errors import UsageError
from stepscope.trace.metadata import TraceWarning
from stepscope.trace.tables import rows_frame

FORMAT_VERSION: Final = 1

SAMPLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "process": pl.Int64,  # the system's number of the process
    "source": pl.String,  # log, gradient, activation, optimizer, throughput, process, machine, device
    "name": pl.String,
    "device": pl.String,  # null: about no device
    "unit": pl.String,
    "unix_ns": pl.Int64,  # wall clock, nanoseconds since 1970
    "step": pl.Int64,  # null: sampled, or nobody said
    "value": pl.Float64,  # null: it could not be had; NaN and infinities are values
}
MISSING_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "source": pl.String,
    "name": pl.String,
    "device": pl.String,
    "reason": pl.String,
    "count": pl.Int64,
}
SERIES: Final = ("rank", "source", "name", "device", "unit")
"""What tells one series from another."""

_ENDING: Final = ".sqlite"
_ROWS: Final = 200_000
_SAMPLES: Final = """
SELECT series, unix_ns, CASE WHEN typeof(step) = 'integer' THEN step END,
       CASE WHEN typeof(value) IN ('real', 'integer') THEN CAST(value AS REAL) END, coalesce(value = 'nan', 0)
FROM samples WHERE typeof(series) = 'integer' AND typeof(unix_ns) = 'integer'"""
_RAW: Final = {"series": pl.Int64, "unix_ns": pl.Int64, "step": pl.Int64, "value": pl.Float64, "is_nan": pl.Int64}
_KEPT: Final = {"series": pl.Int64, "source": pl.String, "name": pl.String, "device": pl.String, "unit": pl.String}


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What some processes logged and sampled.

    Attributes:
        samples: every value, in order of time; columns as in SAMPLE_SCHEMA.
        missing: what could not be had, why and how often; columns as in MISSING_SCHEMA.
        warnings: files that could not be read.
    """

    samples: pl.DataFrame
    missing: pl.DataFrame
    warnings: tuple[TraceWarning, ...] = ()

    def only(self, condition: pl.Expr) -> Telemetry:
        """The part for which a condition on columns of both tables holds, such as that of one rank."""
        return Telemetry(self.samples.filter(condition), self.missing.filter(condition), self.warnings)


def telemetry_files(path: str | Path) -> list[Path]:
    """The telemetry files that a path stands for: a file, a rank's or a run's folder, or a trace in one; sorted."""
    place = Path(path)
    if place.is_file():
        if place.name.endswith(_ENDING):
            return [place]
        return sorted(place.parent.glob(f"telemetry/*{_ENDING}"))
    patterns = (f"*{_ENDING}", f"telemetry/*{_ENDING}", f"rank*/telemetry/*{_ENDING}")
    return sorted({file for pattern in patterns for file in place.glob(pattern)})


def read_telemetry(files: Sequence[Path]) -> Telemetry:
    """Everything in these files; damaged ones are passed over with a warning. Raises UsageError if none can be read."""
    parts: list[list[pl.DataFrame]] = []
    warnings: list[TraceWarning] = []
    for file in files:
        try:
            *tables, is_whole = _read_file(file)
            parts.append(tables)
            if not is_whole:
                warnings.append(TraceWarning("telemetry", 1, f"{file} is damaged; what can be read of it is read"))
        except (sqlite3.Error, OSError, UsageError) as error:
            reason = "it holds no telemetry of stepscope" if "no such table" in str(error) else error
            warnings.append(TraceWarning("telemetry", 1, f"{file} could not be read: {reason}"))
    if files and not parts:
        raise UsageError(warnings[0].detail)
    samples = pl.concat([part[0] for part in parts] or [pl.DataFrame(schema=SAMPLE_SCHEMA)])
    missing = pl.concat([part[1] for part in parts] or [pl.DataFrame(schema=MISSING_SCHEMA)])
    return Telemetry(samples.sort("unix_ns", maintain_order=True), missing, tuple(warnings))


def _read_file(file: Path) -> tuple[pl.DataFrame, pl.DataFrame, bool]:
    """Its samples, what is missing, and whether its pages agree with each other."""
    with _opened(file) as connection:
        is_whole = connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        about = dict(connection.execute("SELECT key, value FROM about").fetchall())
        if _whole(about.get("format")) != FORMAT_VERSION:
            raise UsageError(f"its format is {about.get('format')!r}, and this stepscope reads {FORMAT_VERSION}")
        # In the order of their making, and the list of series last: what a sample names is then always in it.
        raw = [rows_frame(rows, _RAW) for rows in _chunks(connection.execute(_SAMPLES))]
        lacked = connection.execute(
            "SELECT series, CAST(reason AS TEXT), CAST(count AS INTEGER) FROM missing"
        ).fetchall()
        texts = ", ".join(f"CAST({name} AS TEXT)" for name in ("source", "name", "device", "unit"))
        series = rows_frame(connection.execute(f"SELECT id, {texts} FROM series").fetchall(), _KEPT)
    of_process = [
        pl.lit(_whole(about.get("rank")), pl.Int64).alias("rank"),
        pl.lit(_whole(about.get("process")), pl.Int64).alias("process"),
    ]
    value = pl.when(pl.col("is_nan") == 1).then(float("nan")).otherwise("value").alias("value")
    samples = pl.concat(raw or [rows_frame([], _RAW)]).with_columns(value)
    missing = rows_frame(lacked, {"series": pl.Int64, "reason": pl.String, "count": pl.Int64})
    return (
        samples.join(series, on="series", maintain_order="left").with_columns(of_process).select(list(SAMPLE_SCHEMA)),
        missing.join(series, on="series", maintain_order="left").with_columns(of_process).select(list(MISSING_SCHEMA)),
        is_whole,
    )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """The file for reading; its process may write on meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            connection = _connection(file)
        except sqlite3.OperationalError:
            # A log beside a file in a folder that may not be written to: SQLite wants to make an index of the log.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-")))
            for each in (file, file.with_name(f"{file.name}-wal")):
                if each.exists():
                    shutil.copyfile(each, folder / each.name)
            connection = _connection(folder / file.name)
        stack.callback(connection.close)
        connection.execute("BEGIN")  # all that follows sees the same moment
        yield connection


def _connection(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=10)
    try:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        connection.execute("SELECT count(*) FROM about").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _chunks(cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
    while rows := cursor.fetchmany(_ROWS):
        yield rows


def _whole(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 19 else None
