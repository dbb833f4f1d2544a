"""How much slower a device computes beside messages, which take some of its units and of its memory's bandwidth."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.intervals import IntervalSet, union
from stepscope.trace.nesting import Rows
from stepscope.whatif.experiment import Experiment

Numbers = npt.NDArray[np.float64]
BESIDE: Final = 0.9
ALONE: Final = 0.01
"""Of a kernel's time: from here on it ran beside messages, and up to here alone."""
LEAST_CALLS: Final = 2
LEAST_KINDS: Final = 10
"""So many calls of a kernel, either way, and so many kernels tell something."""


def slowdown_beside_messages(experiment: Experiment) -> float | None:
    """How many times as long kernels took beside messages as alone, 1 or more; None where the trace does not tell.

    Calls of one kernel are compared with one another: same name, grid, block and shared memory. With b and a the
    medians of a kernel's calls beside messages and alone, and n the number of those beside, it is the sum of n b over
    the sum of n a.
    """
    if experiment.device is None:
        return None
    table = experiment.trace.device_work.filter(pl.col("device") == experiment.device)
    works = table.filter((pl.col("kind") == "compute") & pl.col("grid").is_not_null() & (pl.col("duration_ns") > 0))
    messages = _spans(table.filter(pl.col("kind") == "communication"))
    if works.is_empty() or not len(messages.starts):
        return None
    share = share_beside(works["start_ns"].to_numpy(), works["duration_ns"].to_numpy(), messages)
    works = works.with_columns(share=share)
    beside = pl.col("duration_ns").filter(pl.col("share") >= BESIDE)
    alone = pl.col("duration_ns").filter(pl.col("share") <= ALONE)
    kernels = works.group_by("name", "grid", "block", "shared_memory_bytes").agg(
        beside=beside.median(), calls=beside.len(), alone=alone.median(), others=alone.len()
    )
    kernels = kernels.filter((pl.col("calls") >= LEAST_CALLS) & (pl.col("others") >= LEAST_CALLS))
    if kernels.height < LEAST_KINDS:
        return None
    calls = kernels["calls"].to_numpy()
    took, takes = (float(kernels[name].to_numpy() @ calls) for name in ("beside", "alone"))
    return max(took / takes, 1.0)


def share_beside(starts: Rows, lengths: Rows, messages: IntervalSet) -> Numbers:
    """The share of each interval in which there are messages, 0 to 1; shape (n,)."""
    shares: Numbers = messages.overlap_of(starts, starts + lengths) / np.maximum(lengths, 1)
    return shares


def _spans(table: pl.DataFrame) -> IntervalSet:
    return union(table["start_ns"].to_numpy(), (table["start_ns"] + table["duration_ns"]).to_numpy())
