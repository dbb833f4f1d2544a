"""Read the telemetry of a run's processes: one SQLite file for each, which may still be growing.

`stepscope.record.telemetry.store` writes the files. They are untrusted like any trace: only values of the expected type
are read.
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
    "process": pl.Int64,  # process id
    "source": pl.String,  # log, gradient, activation, optimizer, throughput, process, machine, device
    "name": pl.String,
    "device": pl.String,  # null if it does not belong to a device
    "unit": pl.String,
    "unix_ns": pl.Int64,  # wall clock, nanoseconds since 1970
    "step": pl.Int64,  # null if sampled, or unknown
    "value": pl.Float64,  # null if unavailable; NaN and infinities are values
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
"""Columns that identify a series."""

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
    """Logged and sampled values of one or more processes.

    Attributes:
        samples: every value, in order of time; columns as in SAMPLE_SCHEMA.
        missing: values that were unavailable, why and how often; columns as in MISSING_SCHEMA.
        warnings: files that could not be read.
    """

    samples: pl.DataFrame
    missing: pl.DataFrame
    warnings: tuple[TraceWarning, ...] = ()

    def only(self, condition: pl.Expr) -> Telemetry:
        """Return the part that satisfies a condition on columns of both tables, such as a rank."""
        return Telemetry(self.samples.filter(condition), self.missing.filter(condition), self.warnings)


def telemetry_files(path: str | Path) -> list[Path]:
    """Return the telemetry files, sorted, of a path: a file, a rank's or a run's folder, or a trace in one."""
    place = Path(path)
    if place.is_file():
        if place.name.endswith(_ENDING):
            return [place]
        return sorted(place.parent.glob(f"telemetry/*{_ENDING}"))
    patterns = (f"*{_ENDING}", f"telemetry/*{_ENDING}", f"rank*/telemetry/*{_ENDING}")
    return sorted({file for pattern in patterns for file in place.glob(pattern)})


def read_telemetry(files: Sequence[Path]) -> Telemetry:
    """Read these files, skipping damaged ones with a warning; raise UsageError if none can be read."""
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
    """Samples, missing values, and whether SQLite's quick check passed."""
    with _opened(file) as connection:
        is_whole = connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        about = dict(connection.execute("SELECT key, value FROM about").fetchall())
        if _whole(about.get("format")) != FORMAT_VERSION:
            raise UsageError(f"its format is {about.get('format')!r}, and this stepscope reads {FORMAT_VERSION}")
        # Series are read last, so that they include every series that a sample refers to.
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
    with contextlib.ExitStack() as stack:
        try:
            connection = _connection(file)
        except sqlite3.OperationalError:
            # In a read-only folder, SQLite cannot create the index it needs for a write-ahead log: use a copy.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-")))
            for each in (file, file.with_name(f"{file.name}-wal")):
                if each.exists():
                    shutil.copyfile(each, folder / each.name)
            connection = _connection(folder / file.name)
        stack.callback(connection.close)
        connection.execute("BEGIN")  # all queries see the same snapshot
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
