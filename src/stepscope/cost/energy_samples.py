"""Energy of recorded steps from what telemetry sampled anyway: the counter of energy where there is one, else power.

Power between two samples is taken to change evenly (the trapezoid rule), and so is the counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.cost.energy_parts import SampledEnergy
from stepscope.trace import Window
from stepscope.trace.telemetry import Telemetry

FEWEST_SAMPLES: Final = 3
"""Samples inside the steps below which they tell nothing of them."""
_SERIES: Final = {"energy_j": "its counter of energy, sampled", "power_w": "its power, sampled"}


def sampled_energy(
    telemetry: Telemetry, origin_unix_ns: int | None, window: Window, step_count: int
) -> tuple[SampledEnergy, ...]:
    """Joules per step of every device whose power or energy was sampled; or why its samples do not tell.

    Args:
        origin_unix_ns: the wall clock at the trace's time 0.
        window: from the first step's start to the last one's end.
        step_count: steps in it.
    """
    wanted = pl.col("name").is_in(list(_SERIES)) & (pl.col("source") == "device") & pl.col("value").is_finite()
    samples = telemetry.samples.filter(wanted & pl.col("device").is_not_null())
    if origin_unix_ns is None or samples.is_empty():
        return ()
    start, end = origin_unix_ns + window.start_ns, origin_unix_ns + window.end_ns
    return tuple(_devices(samples, start, end, step_count))


def _devices(samples: pl.DataFrame, start: int, end: int, step_count: int) -> Iterator[SampledEnergy]:
    for (device,), rows in samples.sort("unix_ns").group_by("device", maintain_order=True):
        found = [_integrated(rows.filter(pl.col("name") == name), name, start, end) for name in _SERIES]
        told = next((each for each in found if each is not None), None)
        if told is None:
            inside = rows.filter(pl.col("unix_ns").is_between(start, end))["unix_ns"].n_unique()
            seconds = (end - start) / 1e9
            few = f"its power was sampled {inside} times in the {seconds:.3g} s of the steps, which tells too little"
            yield SampledEnergy(str(device), None, few)
        else:
            joules, number, name = told
            yield SampledEnergy(str(device), joules / step_count, f"{_SERIES[name]} {number} times during the steps")


def _integrated(rows: pl.DataFrame, name: str, start: int, end: int) -> tuple[float, int, str] | None:
    """Joules between two moments, and how many samples tell; None where too few do, or none lies on either side."""
    rows = rows.unique("unix_ns", keep="last", maintain_order=True)
    times, values = rows["unix_ns"].to_numpy(), rows["value"].to_numpy()
    inside = (times >= start) & (times <= end)
    if inside.sum() < FEWEST_SAMPLES or times[0] > start or times[-1] < end:
        return None
    first, last = np.interp([start, end], times, values)
    if name == "energy_j":
        return (float(last - first), int(inside.sum()), name) if last > first else None
    joules = _trapezoid(np.r_[start, times[inside], end], np.r_[first, values[inside], last])
    return (joules, int(inside.sum()), name) if joules > 0 else None


def _trapezoid(times: npt.NDArray[Any], watts: npt.NDArray[Any]) -> float:
    return float(np.sum(np.diff(times) / 1e9 * (watts[1:] + watts[:-1]) / 2))
