"""Export telemetry to other tools; each function returns the files or folders that it made.

Missing values are left out if the format cannot express them; NaN and infinities are kept.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import polars as pl

from stepscope.errors import UsageError
from stepscope.trace.tables import csv_text
from stepscope.trace.telemetry import Telemetry

_STEP: Final = "step"
_SECONDS: Final = "seconds"
_OLDEST_WANDB: Final = (0, 19, 10)


def export_csv(telemetry: Telemetry, folder: Path, *, raw: bool = False) -> list[Path]:
    """Write every sample to `samples.csv` and the missing series to `missing.csv`.

    Null is empty, NaN is "NaN", infinities are "inf" and "-inf".

    Args:
        raw: keep text that a spreadsheet would read as a formula, as in `csv_text`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {folder / "samples.csv": telemetry.samples, folder / "missing.csv": telemetry.missing}
    for path, table in tables.items():
        path.write_bytes(csv_text(table, raw=raw))
    return list(tables)


def export_tensorboard(telemetry: Telemetry, folder: Path) -> list[Path]:
    """Write event files, one folder `rank<R>/` for each rank; view them with `tensorboard --logdir FOLDER`.

    A sample without a step gets its index in its series.

    Raises:
        UsageError: the package tensorboard is not installed.
        OSError: the folder cannot be written.
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

    Raises:
        UsageError: the package wandb is not installed.
        OSError: the folder cannot be written.
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
    begun_ns = kept["unix_ns"][0] if kept.height else 0
    for group in kept.partition_by("unix_ns", "step", maintain_order=True):
        rows = group.rows(named=True)
        values = {_full_name(row): row["value"] for row in rows}
        values["_timestamp"] = rows[0]["unix_ns"] / 1e9
        values[_SECONDS] = (rows[0]["unix_ns"] - begun_ns) / 1e9
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
