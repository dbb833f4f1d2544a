"""Part 5: what predictions are learned from and tested with: timings of operators, recorded workloads, power."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import polars as pl

from benchmarks.gpu_campaign.faults import keep
from benchmarks.gpu_campaign.plan import At
from benchmarks.gpu_campaign.remedies import program
from stepscope.record.telemetry.log import Telemetry
from stepscope.trace.telemetry import read_telemetry, telemetry_files
from tests.zoo import measure

_DEVICE: Final = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons", "energy_j",
                  "utilization_share")  # fmt: skip
_INTERVAL_S: Final = 0.1
_RECORDED_S: Final = 18
"""The recording, 50 steps without it, and ten seconds in which energy is measured."""


def recorded(at: At, name: str) -> dict[str, Any]:
    """Record a workload: its trace, steps without a profiler, the energy of steps, power and clocks meanwhile."""
    options = ["--energy", "--steps", "3", *(("--warmup", "1", "--exit-after") if at.is_dry else ())]
    run = measure.record_words([*program(at, name), "--seconds", str(_RECORDED_S)], name, at.work, options)
    keep(at, run, name)
    said = json.loads((run / "run.json").read_text(encoding="utf-8"))
    recording = said["recordings"][0]
    return {**{key: recording.get(key) for key in ("step_times", "energy")}, "telemetry": _summary(_samples(run))}


def power(at: At, _: str) -> dict[str, Any]:
    """Power, clocks and temperature of the idle device, under products, and under copies; `power.parquet` has all.

    The idle device holds no context yet: torch is imported afterwards.
    """
    seconds = 1.0 if at.is_dry else 10.0
    phases = [("idle", _sampled(at, "idle", seconds, None))]
    import torch

    side = 64 if at.is_dry else 8192
    device = torch.device(at.device)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    zeros = torch.zeros_like(left)
    works: dict[str, Callable[[], object] | None] = {
        "products": lambda: left @ right,
        "products of zeros": lambda: zeros @ zeros,
        "copies": lambda: left.clone(),
        "idle with a context": None,
    }

    def pause() -> None:
        time.sleep(0.01)

    def busy(name: str) -> None:
        work = works[name]
        for _ in range(20):
            (work or pause)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    phases += [(name, _sampled(at, name, seconds, functools.partial(busy, name))) for name in works]
    table = pl.concat([table.with_columns(phase=pl.lit(name)) for name, table in phases])
    table.write_parquet(at.keep / "power.parquet", compression="zstd")
    return {"phases": {name: _summary(table) for name, table in phases}, "interval_s": _INTERVAL_S}


def _sampled(at: At, name: str, seconds: float, busy: Callable[[], None] | None) -> pl.DataFrame:
    """Samples of the device while `busy` is called again and again, or nothing is done."""
    folder = at.work / f"telemetry-{name.replace(' ', '-')}"
    with Telemetry(folder, interval_s=_INTERVAL_S):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            (busy or (lambda: time.sleep(0.05)))()
    return _samples(folder)


def _samples(folder: Path) -> pl.DataFrame:
    """Columns unix_ns, name, device, unit, value of the devices' counters."""
    samples = read_telemetry(telemetry_files(folder)).samples
    chosen = (pl.col("source") == "device") & pl.col("name").is_in(_DEVICE)
    return samples.filter(chosen).select("unix_ns", "name", "device", "unit", "value")


def _summary(samples: pl.DataFrame) -> dict[str, Any]:
    """By counter: least, median and most; of energy the joules that passed, of reasons all their bits."""
    found: dict[str, Any] = {}
    for (name,), rows in samples.drop_nulls("value").group_by("name", maintain_order=True):
        values = rows["value"]
        found[str(name)] = {"low": values.min(), "median": values.median(), "high": values.max()}
        if name == "throttle_reasons":
            found[str(name)] = {"seen": sorted({int(value) for value in values})}
    return found
