"""Read and export the telemetry of a run's processes: one SQLite file each, which may still grow.

`stepscope.record.telemetry.store` writes the files. They are untrusted like any trace: only values of the expected type
are read. Each function that exports to another tool returns the files or folders that it made: missing values are left
out if the format cannot express them; NaN and infinities are kept.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import polars as pl

from stepscope.errors import UsageError
from stepscope.trace.metadata import TraceWarning
from stepscope.trace.tables import csv_text, rows_frame

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
                warnings.append(TraceWarning("telemetry", 1, f"{file} is damaged; its readable part is used"))
        except (sqlite3.Error, OSError, UsageError) as error:
            reason = "it contains no telemetry of stepscope" if "no such table" in str(error) else error
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


_STEP: Final = "step"
_SECONDS: Final = "seconds"
_OLDEST_WANDB: Final = (0, 19, 10)


def export_csv(telemetry: Telemetry, folder: Path, *, raw: bool = False) -> list[Path]:
    """Write every sample to `samples.csv` and the missing series to `missing.csv`.

    Null is empty, NaN is "NaN", infinities are "inf" and "-inf".

    Args:
        raw: keep text that a spreadsheet would read as a formula, as in `csv_text`.

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {folder / "samples.csv": telemetry.samples, folder / "missing.csv": telemetry.missing}
    for path, table in tables.items():
        path.write_bytes(csv_text(table, raw=raw))
    return list(tables)


def export_tensorboard(telemetry: Telemetry, folder: Path) -> list[Path]:
    """Write event files, one folder `rank<R>/` for each rank; view them with `tensorboard --logdir FOLDER`.

    A sample without a step gets its index in its series.

    Raises UsageError if the package tensorboard is not installed, OSError if the folder cannot be written.
    """
    try:
        writers: Any = import_module("tensorboard.summary.writer.event_file_writer")
        events: Any = import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
    except ImportError as error:
        raise UsageError("an export to TensorBoard needs its package: pip install tensorboard") from error
    folders = []
    for rank, samples in _by_rank(telemetry.samples).items():
        folders.append(folder / f"rank{rank}")
        writer = writers.EventFileWriter(str(folders[-1]))
        kept = samples.filter(pl.col("value").is_not_null())
        for series in kept.partition_by("source", "name", "device", maintain_order=True):
            name = _full_name(series.row(0, named=True))
            numbered = series.with_columns(pl.col("step").fill_null(pl.int_range(pl.len())))
            for unix_ns, step, value in numbered.select("unix_ns", "step", "value").iter_rows():
                summary = summaries.Summary(value=[summaries.Summary.Value(tag=name, simple_value=value)])
                writer.add_event(events.Event(wall_time=unix_ns / 1e9, step=step, summary=summary))
        writer.close()
    return folders


def export_wandb(telemetry: Telemetry, folder: Path, *, project: str = "stepscope") -> list[Path]:
    """Write an offline run of Weights & Biases for each rank; nothing is uploaded before `wandb sync` is called.

    Series with steps are plotted over `step`, others over `seconds`.

    Raises UsageError if the package wandb is not installed, OSError if the folder cannot be written.
    """
    try:
        wandb: Any = import_module("wandb")
    except ImportError as error:
        raise UsageError("an export to Weights & Biases needs its package: pip install wandb") from error
    if tuple(int(part) for part in re.findall(r"\d+", wandb.__version__)[:3]) < _OLDEST_WANDB:
        raise UsageError(f"an export to Weights & Biases needs wandb 0.19.10 or newer; this is {wandb.__version__}")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for rank, samples in _by_rank(telemetry.samples).items():
        settings = wandb.Settings(
            mode="offline", silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        run = wandb.init(
            project=project,
            dir=str(folder),
            name=f"rank{rank}",
            group=folder.name,
            reinit="create_new",
            settings=settings,
        )
        try:
            _log_to_wandb(run, samples)
            made.append(Path(run.dir).parent)
        finally:
            run.finish()
    return made


def _log_to_wandb(run: Any, samples: pl.DataFrame) -> None:
    kept = samples.filter(pl.col("value").is_not_null())
    for hidden in (_STEP, _SECONDS):
        run.define_metric(hidden, hidden=True)
    for row in kept.unique(["source", "name", "device"], maintain_order=True).iter_rows(named=True):
        if "*" not in row["name"]:  # a metric definition treats these as a pattern
            # A dot in a metric's definition means nesting; a backslash before it escapes it.
            escaped = _full_name(row).replace("\\", "\\\\").replace(".", "\\.")
            run.define_metric(escaped, step_metric=_SECONDS if row["step"] is None else _STEP)
    started_ns = kept["unix_ns"][0] if kept.height else 0
    for group in kept.partition_by("unix_ns", "step", maintain_order=True):
        rows = group.rows(named=True)
        values = {_full_name(row): row["value"] for row in rows}
        values["_timestamp"] = rows[0]["unix_ns"] / 1e9
        values[_SECONDS] = (rows[0]["unix_ns"] - started_ns) / 1e9
        if rows[0]["step"] is not None:
            values[_STEP] = rows[0]["step"]
        run.log(values)


def _full_name(row: dict[str, Any]) -> str:
    """Return a logged value's own name; for others, source and device too: "device0/power_w"."""
    if row["source"] in ("log", "gradient", "activation", "optimizer"):
        return str(row["name"])
    prefix = f"device{row['device']}" if row["device"] is not None else row["source"]
    return f"{prefix}/{row['name']}"


def _by_rank(samples: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """Return the samples of each rank, ascending; a file without a rank counts as rank 0."""
    ranked = samples.with_columns(pl.col("rank").fill_null(0)).sort("rank", "unix_ns", maintain_order=True)
    return {group["rank"][0]: group for group in ranked.partition_by("rank", maintain_order=True)}
