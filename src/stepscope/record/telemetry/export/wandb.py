"""Telemetry as an offline run of Weights & Biases, one a rank; nothing is sent before `wandb sync` is called."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import polars as pl

from stepscope.errors import UsageError
from stepscope.record.telemetry.export._names import by_rank, full_name
from stepscope.trace.telemetry import Telemetry

NAME = "wandb"
_STEP: Final = "step"
_SECONDS: Final = "seconds"
_OLDEST: Final = (0, 19, 10)


def export(telemetry: Telemetry, folder: Path, *, project: str = "stepscope") -> list[Path]:
    """Write `wandb/offline-run-.../` for each rank. Series with steps are drawn over `step`, others over `seconds`.

    Raises:
        UsageError: the package wandb is not installed.
        OSError: the folder cannot be written.
    """
    try:
        wandb: Any = import_module("wandb")
    except ImportError as error:
        raise UsageError("an export to Weights & Biases needs its package: pip install wandb") from error
    if _version(wandb.__version__) < _OLDEST:
        raise UsageError(f"an export to Weights & Biases needs wandb 0.19.10 or newer; this is {wandb.__version__}")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for rank, samples in by_rank(telemetry.samples).items():
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
            _log(run, samples)
            made.append(Path(run.dir).parent)
        finally:
            run.finish()
    return made


def _log(run: Any, samples: pl.DataFrame) -> None:
    """Log what belongs together at once: what has the same moment and step."""
    kept = samples.filter(pl.col("value").is_not_null())
    for hidden in (_STEP, _SECONDS):
        run.define_metric(hidden, hidden=True)
    for row in kept.unique(["source", "name", "device"], maintain_order=True).iter_rows(named=True):
        if "*" not in row["name"]:  # which a definition takes for a pattern
            run.define_metric(_escaped(full_name(row)), step_metric=_SECONDS if row["step"] is None else _STEP)
    begun_ns = kept["unix_ns"][0] if kept.height else 0
    for group in kept.partition_by("unix_ns", "step", maintain_order=True):
        rows = group.rows(named=True)
        values = {full_name(row): row["value"] for row in rows}
        values["_timestamp"] = rows[0]["unix_ns"] / 1e9
        values[_SECONDS] = (rows[0]["unix_ns"] - begun_ns) / 1e9
        if rows[0]["step"] is not None:
            values[_STEP] = rows[0]["step"]
        run.log(values)


def _escaped(name: str) -> str:
    """A dot in a metric's definition stands for nesting, a backslash before it for itself."""
    return name.replace("\\", "\\\\").replace(".", "\\.")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
