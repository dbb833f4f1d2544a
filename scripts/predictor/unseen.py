"""Whole iterations on GPUs that are in no timings: a test that nothing is learned from, and no choice is made by."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from scripts.predictor.graphs import derived_iteration
from stepscope.machine.devices import is_nvidia, named_device
from stepscope.predict.operation_times import guessed_band, operation_times
from stepscope.predict.operations import roofline_ns

CASES: Final = Path(__file__).parents[2] / "benchmarks" / "unseen_iterations.csv"
NAMES: Final = {"A100-80GB-PCIe": "A100-PCIe-80GB", "MI250": "MI250 (one of two dies)"}
_COLUMNS: Final = (
    "cases", "error", "bias", "NeuSight's error", "roofline's error", "measured within our range", "range / prediction",
)  # fmt: skip


def predicted(folder: Path) -> pl.DataFrame:
    """Each case with milliseconds predicted by the shipped model and the device table: ours, low, high, roofline."""
    cases = pl.read_csv(CASES)
    rows = [_one(folder, *case) for case in cases.select("gpu", "model", "mode", "length", "batch").rows()]
    return cases.hstack(pl.DataFrame(rows, schema=["vendor", "ours", "low", "high", "roofline"], orient="row"))


def _one(folder: Path, gpu: str, model: str, mode: str, length: int, batch: int) -> tuple[str | float, ...]:
    device = named_device(NAMES.get(gpu, gpu))
    graph = derived_iteration(folder, model, mode, length, batch)
    times = operation_times(graph.operations, device)
    low, high = times.low_ns, times.high_ns
    if not is_nvidia(device):
        low, high = guessed_band(times.ns, low, high, device)
    whole = (times.ns, low, high, roofline_ns(graph.operations, device))
    return device.vendor, *(float(graph.repeats @ ns) / 1e6 for ns in whole)


def table(cases: pl.DataFrame) -> str:
    """Markdown: a line for each GPU and maker; mean errors in percent."""
    lines = ["**whole iterations, fp32, GPUs that are in no timings**; the goals are 8 % (NVIDIA) and 11 % (AMD)", ""]
    lines += [f"| | {' | '.join(_COLUMNS)} |", "|---" + "|---:" * len(_COLUMNS) + "|"]
    groups = [part for _, part in cases.group_by("gpu", maintain_order=True)]
    groups += [part for _, part in cases.group_by("vendor", maintain_order=True)]
    for part in groups:
        name = part["gpu"][0] if part["gpu"].n_unique() == 1 else f"{part['vendor'][0]}, all"
        lines.append(f"| {name} | {' | '.join(_cells(part))} |")
    return "\n".join(lines)


def _cells(cases: pl.DataFrame) -> list[str]:
    measured, ours, low, high, roofline = (
        cases[name].to_numpy() for name in ("iteration_ms", "ours", "low", "high", "roofline")
    )
    held = int(((low <= measured) & (measured <= high)).sum())
    errors = [100 * np.abs(one / measured - 1).mean() for one in (ours, roofline)]
    bias, peer = 100 * (ours / measured - 1).mean(), cases["neusight_percent"].to_numpy().mean()
    width = f"{(low / ours).mean():.2f} to {(high / ours).mean():.2f}"
    return [
        str(len(measured)), f"{errors[0]:.1f}", f"{bias:+.1f}", f"{peer:.1f}", f"{errors[1]:.1f}", str(held), width,
    ]  # fmt: skip
