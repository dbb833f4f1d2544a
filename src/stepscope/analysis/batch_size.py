"""Growth of step time and memory with the batch size: a straight line through the measurements.

    time(b)   = s * b + c        throughput(b) = b / time(b), which approaches 1 / s
    memory(b) = m * b + k        largest batch = (capacity * (1 - kept free) - k) / m

Fitted by least squares, with standard errors of slope and constant if three or more sizes were measured. The formulas
are those of DeepView's batch size model (Yu et al., "Skyline", UIST 2020), which likewise refuses lines without a
positive slope, and time lines whose throughput limit a measurement exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepscope.analysis.memory import device_memories
from stepscope.analysis.steps import step_summary, step_table
from stepscope.errors import UsageError
from stepscope.trace import Trace

GAIN: Final = 0.05
"""Least throughput gain, as a share, for which a larger batch is recommended."""
TOLD_APART: Final = 2.0
"""Standard errors by which a slope must exceed zero to be significant."""


@dataclass(frozen=True, slots=True)
class Measurement:
    batch_size: int
    step_ns: float  # median complete step
    steps: int  # number of complete steps
    memory_bytes: int | None = None  # peak memory in use; None where not recorded
    capacity_bytes: int | None = None  # the device's memory; None where unknown
    device: str | None = None  # device of the memory figures; None where not recorded

    @property
    def throughput(self) -> float:
        return self.batch_size / self.step_ns * 1e9


@dataclass(frozen=True, slots=True)
class Line:
    """value(b) = slope * b + constant."""

    slope: float
    constant: float
    slope_error: float | None  # standard error; None with two sizes, which any line fits
    constant_error: float | None  # standard error; None with two sizes, which any line fits
    r_squared: float  # share of the values' variance that the line explains

    def at(self, batch_size: float) -> float:
        return self.slope * batch_size + self.constant


@dataclass(frozen=True, slots=True)
class BatchModel:
    """Model fitted to the measurements, in order of batch size."""

    measurements: tuple[Measurement, ...]
    time: Line | None  # nanoseconds per step; None where refused, with the reason in `problems`
    memory: Line | None  # bytes in use; None where refused or not recorded
    capacity_bytes: int | None  # usable memory; None where unknown
    kept_free: float  # share of it that stays free
    problems: tuple[str, ...]  # why a part is missing, in sentences

    @property
    def throughput_limit(self) -> float | None:
        """Samples per second that no batch size can reach."""
        return None if self.time is None else 1e9 / self.time.slope

    @property
    def largest_batch(self) -> int | None:
        """Largest batch that fits; None where the memory line or size is unknown."""
        if self.memory is None or self.capacity_bytes is None:
            return None
        return max(
            math.floor((self.capacity_bytes * (1 - self.kept_free) - self.memory.constant) / self.memory.slope), 0
        )

    def throughput(self, batch_size: float) -> float | None:
        return None if self.time is None else batch_size / self.time.at(batch_size) * 1e9

    def batch_for(self, throughput: float) -> float | None:
        """Batch size at which the line reaches this many samples per second; None where no size does."""
        if self.time is None or throughput * self.time.slope >= 1e9:
            return None
        return throughput * self.time.constant / (1e9 - throughput * self.time.slope)


def measurement_of(trace: Trace, batch_size: int) -> Measurement:
    """Measure a trace that was recorded with this batch size.

    Raises:
        UsageError: the trace has no complete step.
    """
    steps = step_table(trace)
    summary = step_summary(steps)
    if not summary.count:
        raise UsageError(f"{trace.metadata.path} has no complete step, so it cannot say how long one takes")
    memory = next(iter(device_memories(trace, steps=steps)), None)
    return Measurement(
        batch_size=batch_size,
        step_ns=float(summary.median_ns),
        steps=summary.count,
        memory_bytes=None if memory is None else memory.reserved_bytes or memory.peak_bytes,
        capacity_bytes=None if memory is None else memory.capacity_bytes,
        device=None if memory is None else memory.device,
    )


def batch_size_of(trace: Trace) -> int | None:
    """Batch size recorded for the trace's loaders; None without loaders or with several sizes."""
    program = trace.metadata.program
    sizes = {loader.batch_size for loader in program.loaders if loader.batch_size} if program is not None else set()
    return sizes.pop() if len(sizes) == 1 else None


def batch_model(
    measurements: Sequence[Measurement], *, capacity_bytes: int | None = None, kept_free: float = 0.1
) -> BatchModel:
    """Fit the lines through two measurements or more.

    Args:
        capacity_bytes: available memory, instead of the device's.
        kept_free: share of it to keep free as a safety margin.

    Raises:
        UsageError: fewer than two different batch sizes.
    """
    rows = sorted(measurements, key=lambda each: each.batch_size)
    sizes = [each.batch_size for each in rows]
    if len(set(sizes)) < 2:
        raise UsageError("at least two different batch sizes are needed to tell how a step grows with the batch")
    problems: list[str] = []
    time = _time_line(rows, problems)
    memory = _memory_line(rows, problems)
    known = [each.capacity_bytes for each in rows if each.capacity_bytes]
    capacity = capacity_bytes if capacity_bytes is not None else min(known, default=None)
    if memory is not None and capacity is None:
        problems.append("the size of the memory is unknown: give it with --memory-limit")
    return BatchModel(tuple(rows), time, memory, capacity, kept_free, tuple(problems))


def _time_line(rows: Sequence[Measurement], problems: list[str]) -> Line | None:
    line = fitted([each.batch_size for each in rows], [each.step_ns for each in rows])
    if line.slope <= 0:
        problems.append("a step takes no longer with a larger batch: the sizes are too small to show where that ends")
        return None
    if line.slope_error is not None and line.slope < TOLD_APART * line.slope_error:
        problems.append("the times vary too much to show how they grow: record more steps (--steps 20)")
        return None
    best = max(each.throughput for each in rows)
    if best > 1e9 / line.slope:
        problems.append(
            f"{best:,.0f} samples a second were measured, more than the line through the sizes allows for any batch: "
            "time does not grow in a straight line here"
        )
        return None
    return line


def _memory_line(rows: Sequence[Measurement], problems: list[str]) -> Line | None:
    known = [each for each in rows if each.memory_bytes is not None]
    if len({each.batch_size for each in known}) < 2:
        problems.append("memory was not recorded for two sizes")
        return None
    if len({each.device for each in known}) > 1:
        problems.append("memory was recorded on different devices")
        return None
    line = fitted([each.batch_size for each in known], [float(each.memory_bytes or 0) for each in known])
    if line.slope <= 0:
        problems.append("memory does not grow with the batch: the sizes are too small to show how much fits")
        return None
    return line


def fitted(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """Least-squares line, with standard errors from the residuals; needs two sizes or more."""
    x, y = np.asarray(sizes, np.float64), np.asarray(values, np.float64)
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    constant = float(y.mean() - slope * x.mean())
    residual = float(((y - slope * x - constant) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    explained = 1.0 - residual / total if total else 1.0
    if len(x) < 3:
        return Line(slope, constant, None, None, explained)
    variance = residual / (len(x) - 2)
    constant_error = math.sqrt(variance * (1 / len(x) + float(x.mean()) ** 2 / spread))
    return Line(slope, constant, math.sqrt(variance / spread), constant_error, explained)
