"""Telemetry as TensorBoard event files, one folder a rank; view them with `tensorboard --logdir FOLDER`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.errors import UsageError
from stepscope.record.telemetry.export._names import by_rank, named_series
from stepscope.trace.telemetry import Telemetry

NAME = "tensorboard"


def export(telemetry: Telemetry, folder: Path) -> list[Path]:
    """Write `rank<R>/` for each rank. A sample without a step takes its number in its series.

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
    for rank, samples in by_rank(telemetry.samples).items():
        folders.append(folder / f"rank{rank}")
        writer = writers.EventFileWriter(str(folders[-1]))
        for name, series in named_series(samples).items():
            numbered = series.with_columns(pl.col("step").fill_null(pl.int_range(pl.len())))
            for unix_ns, step, value in numbered.select("unix_ns", "step", "value").iter_rows():
                summary = summaries.Summary(value=[summaries.Summary.Value(tag=name, simple_value=value)])
                writer.add_event(events.Event(wall_time=unix_ns / 1e9, step=step, summary=summary))
        writer.close()
    return folders
