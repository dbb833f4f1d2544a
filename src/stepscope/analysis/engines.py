"""How a device's time divides among its engines, of accelerators whose queues are engines, such as Intel Gaudi.

Engines work side by side. Each moment counts for the first of those that work in it, in the order MME (matrix
products), TPC (all other computation), DMA (moving data), NIC (between devices): what remains for an engine is exposed,
hidden by none before it. habana_perf_tool divides the device time in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.idle import device_window
from stepscope.trace import Trace
from stepscope.trace.intervals import IntervalSet

ENGINES: Final[dict[str, str]] = {
    "MME": "matrix products",
    "TPC": "all other computation",
    "DMA": "moving data",
    "NIC": "between devices",
    "other": "engines of other kinds",
}
"""Engine -> what it does, in the order in which a moment is theirs."""
_BY_QUEUE: Final = {"MME": "MME", "TPC": "TPC", "NIC": "NIC", **dict.fromkeys(("DMA", "EDMA", "PDMA", "KDMA"), "DMA")}
_COMPUTING: Final = ("MME", "TPC")


@dataclass(frozen=True, slots=True)
class EngineTime:
    """One engine's part of a device's window, in whole nanoseconds.

    Attributes:
        busy_ns: when any of its units worked.
        exposed_ns: when no engine before it worked.
    """

    engine: str
    busy_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How a device's window divides: the engines' exposed_ns + idle_ns == window_ns.

    Attributes:
        engines: those that worked at all, in the order of ENGINES.
        computing_together_ns: when both MME and TPC worked.
    """

    device: str
    window_ns: int
    idle_ns: int
    computing_together_ns: int
    engines: tuple[EngineTime, ...]


def engine_of(queue: str | None) -> str | None:
    """The engine that a queue of this name is; None for queues of other kinds."""
    return _BY_QUEUE.get(queue or "")


def engine_uses(trace: Trace) -> tuple[EngineUse, ...]:
    """Of every device whose queues are engines, in order of its name."""
    queues = trace.device_work.select("device", "queue").unique()
    devices = queues.filter(pl.col("queue").is_in(_COMPUTING))["device"].unique().sort().to_list()
    return tuple(_engine_use(trace, device) for device in devices)


def _engine_use(trace: Trace, device: str) -> EngineUse:
    window = device_window(trace, device)
    work = trace.device_work.filter(pl.col("device") == device).with_columns(
        engine=pl.col("queue").replace_strict(_BY_QUEUE, default="other", return_dtype=pl.String)
    )
    present = [engine for engine in ENGINES if (work["engine"] == engine).any()]
    busy = {engine: busy_intervals(work.filter(pl.col("engine") == engine), window) for engine in present}
    times, covered = [], 0
    for position, engine in enumerate(present):
        until = busy_intervals(work.filter(pl.col("engine").is_in(present[: position + 1])), window).total_ns
        times.append(EngineTime(engine, busy[engine].total_ns, until - covered))
        covered = until
    return EngineUse(device, window.duration_ns, window.duration_ns - covered, _together(busy), tuple(times))


def _together(busy: dict[str, IntervalSet]) -> int:
    matrix, vector = (busy.get(engine) for engine in _COMPUTING)
    return 0 if matrix is None or vector is None else matrix.overlap_ns(vector)
