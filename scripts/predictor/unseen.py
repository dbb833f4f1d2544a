"""Whole iterations on GPUs that are in no timings: a test that nothing is learned from, and no choice is made by."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from scripts.predictor.graphs import derived_iteration
from scripts.predictor.timings import public_device
from stepscope.machine.devices import named_device, with_measured_shares
from stepscope.predict.operation_times import guessed_band, operation_times, sustained_ns
from stepscope.predict.operations import roofline_ns
from stepscope.predict.ranges import step_band
from stepscope.predict.trace_operations import different_calls

CASES: Final = Path(__file__).parents[2] / "benchmarks" / "unseen_iterations.csv"
NAMES: Final = {"A100-80GB-PCIe": "A100-PCIe-80GB", "MI250": "MI250 (one of two dies)"}
_COLUMNS: Final = (
    "cases", "error", "bias", "error by peaks alone", "NeuSight's error", "roofline's error", "within our range",
    "range / prediction",
)  # fmt: skip


def predicted(folder: Path) -> pl.DataFrame:
    """Each case with milliseconds predicted: ours by the device table, low, high, by_peaks (the makers'), roofline."""
    cases = pl.read_csv(CASES)
    rows = [_one(folder, *case) for case in cases.select("gpu", "model", "mode", "length", "batch").rows()]
    schema = ["vendor", "ours", "low", "high", "by_peaks", "roofline"]
    return cases.hstack(pl.DataFrame(rows, schema=schema, orient="row"))


def _one(folder: Path, gpu: str, model: str, mode: str, length: int, batch: int) -> tuple[str | float, ...]:
    name = NAMES.get(gpu, gpu)
    device, graph = with_measured_shares(named_device(name)), derived_iteration(folder, model, mode, length, batch)
    operations, repeats = graph.operations, graph.repeats
    times = operation_times(operations, device)
    low, high = guessed_band(times.ns, times.low_ns, times.high_ns, device)
    is_guess = times.basis != "learned"
    low, high = np.where(is_guess, low, times.low_ns), np.where(is_guess, high, times.high_ns)
    kinds = np.where(is_guess, "datasheet", operations.kind)
    expected, every = repeats * times.ns, np.arange(len(repeats))
    low, high = step_band(expected, repeats * low, repeats * high, kinds, different_calls(operations), every)
    by_peaks = repeats * operation_times(operations, public_device(name)).ns
    ours = (sustained_ns(float(ns.sum())) / 1e6 for ns in (expected, low, high, by_peaks))
    return device.vendor, *ours, float(repeats @ roofline_ns(operations, device)) / 1e6


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
    measured, ours, low, high = (cases[name].to_numpy() for name in ("iteration_ms", "ours", "low", "high"))
    held = int(((low <= measured) & (measured <= high)).sum())
    errors = [100 * np.abs(cases[name].to_numpy() / measured - 1).mean() for name in ("ours", "by_peaks", "roofline")]
    bias, peer = 100 * (ours / measured - 1).mean(), cases["neusight_percent"].to_numpy().mean()
    width = f"{(low / ours).mean():.2f} to {(high / ours).mean():.2f}"
    return [
        str(len(measured)), f"{errors[0]:.1f}", f"{bias:+.1f}", f"{errors[1]:.1f}", f"{peer:.1f}", f"{errors[2]:.1f}",
        str(held), width,
    ]  # fmt: skip
