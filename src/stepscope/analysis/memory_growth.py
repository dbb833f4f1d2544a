"""Memory that grows from step to step: how fast, and which lines' blocks are never given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.memory import DeviceMemory
from stepscope.analysis.memory_places import PLACE_SCHEMA
from stepscope.trace.intervals import Times

_UNSETTLED: Final = 2
"""Blocks of the last steps may still be given back: gradients, the loss and the batch live until the next step."""

ACCUMULATED_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    **PLACE_SCHEMA,
    "category": pl.String,
    "bytes_per_step": pl.Int64,
    "blocks_per_step": pl.Float64,
}


@dataclass(frozen=True)
class MemoryGrowth:
    """How a device's memory develops over the steps.

    Attributes:
        level_bytes: what was allocated at the end of each complete step; shape (steps,).
        slope_bytes: per step, the median slope between all pairs of steps (Theil and Sen): single steps do not move it.
        kept_bytes: of each step but the last two, what was allocated in it and never given back; shape (steps - 2,).
        accumulated: who allocated that; columns as in ACCUMULATED_SCHEMA, the most first.
    """

    level_bytes: Times
    slope_bytes: float
    kept_bytes: Times
    accumulated: pl.DataFrame

    @property
    def leak_bytes(self) -> int:
        """What stays behind of every step, 0 unless each step leaves something and the level rises.

        A cache that fills leaves something of its first steps only; one of limited size gives back what it takes.
        """
        if not len(self.kept_bytes) or self.kept_bytes.min() <= 0 or self.slope_bytes <= 0:
            return 0
        return int(min(float(np.median(self.kept_bytes)), self.slope_bytes))


def memory_growth(memory: DeviceMemory) -> MemoryGrowth | None:
    """The development over the complete steps; None with fewer than two."""
    steps = memory.steps.sort("start_ns")
    if steps.height < 2:
        return None
    start = steps["start_ns"].to_numpy()
    end = start + steps["duration_ns"].to_numpy()
    at = np.searchsorted(memory.levels["start_ns"].to_numpy(), end, side="right") - 1
    level = np.where(at >= 0, memory.levels["allocated_bytes"].to_numpy()[np.maximum(at, 0)], 0)
    settled = max(steps.height - _UNSETTLED, 0)
    left = memory.blocks.filter(
        (pl.col("start_ns") >= int(start[0])) & (pl.col("end_ns").is_null() | (pl.col("end_ns") >= int(end[-1])))
    )
    number = np.searchsorted(start, left["start_ns"].to_numpy(), side="right") - 1
    left = left.with_columns(step=pl.Series(number)).filter(pl.col("step") < settled)
    kept = np.zeros(settled, np.int64)
    np.add.at(kept, left["step"].to_numpy(), left["bytes"].to_numpy())
    return MemoryGrowth(level, _theil_sen(level), kept, _accumulated(left, settled))


def _theil_sen(values: Times) -> float:
    """The median of the slopes between all pairs of values, or of those of up to 500 of them."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), 500)).astype(np.int64))
    first, second = np.triu_indices(len(chosen), 1)
    rise = values[chosen[second]] - values[chosen[first]]
    return float(np.median(rise / (chosen[second] - chosen[first])))


def _accumulated(left: pl.DataFrame, steps: int) -> pl.DataFrame:
    """Places that leave something behind in every step."""
    columns = [*PLACE_SCHEMA, "category"]
    table = (
        left.group_by(columns)
        .agg(in_steps=pl.col("step").n_unique(), bytes_per_step=pl.col("bytes").sum() // max(steps, 1), blocks=pl.len())
        .filter(pl.col("in_steps") == steps)
        .with_columns(blocks_per_step=pl.col("blocks") / max(steps, 1))
        .sort("bytes_per_step", *columns, descending=[True, *[False] * len(columns)])
    )
    return table.select([pl.col(name).cast(dtype) for name, dtype in ACCUMULATED_SCHEMA.items()])
