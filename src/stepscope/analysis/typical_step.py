"""The step to draw: the one most like the others in length and in what its time went to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.window import Window

Numbers = npt.NDArray[np.float64]


def typical_step(steps: pl.DataFrame, causes: pl.DataFrame) -> Window | None:
    """The complete step whose length and times by cause are nearest to the median ones; None where there is no step.

    Length alone would often choose the first step of a recording, whose device still works for the step before.

    Args:
        steps: as `stepscope.analysis.steps.step_table` finds them; incomplete ones count only where all are.
        causes: stretches with device, start_ns, duration_ns and cause; those of a device and a cause do not overlap.
    """
    steps = (steps.filter(pl.col("complete")) if steps["complete"].any() else steps).sort("start_ns")
    if steps.is_empty():
        return None
    starts = steps["start_ns"].to_numpy()
    lengths = steps["duration_ns"].to_numpy().astype(np.float64)
    times = [lengths]
    for _, stretches in causes.group_by("device", "cause", maintain_order=True):
        times.append(_covered(stretches, starts + steps["duration_ns"].to_numpy()) - _covered(stretches, starts))
    distance = np.sum([np.abs(each - np.median(each)) for each in times], axis=0)
    nearest = int(distance.argmin())
    return Window(int(starts[nearest]), int(starts[nearest]) + max(int(lengths[nearest]), 1))


def _covered(stretches: pl.DataFrame, until_ns: npt.NDArray[np.int64]) -> Numbers:
    """Nanoseconds of the stretches before each moment."""
    stretches = stretches.sort("start_ns")
    starts, lengths = stretches["start_ns"].to_numpy(), stretches["duration_ns"].to_numpy()
    before = np.concatenate([[0], np.cumsum(lengths)])
    last = np.searchsorted(starts, until_ns, side="right") - 1  # the stretch that began last
    known = np.maximum(last, 0)
    inside = np.minimum(until_ns - starts[known], lengths[known])
    return np.where(last < 0, 0, before[known] + inside).astype(np.float64)
