"""Throughput against batch size, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from stepscope.analysis.batch_size import GAIN, BatchModel, Line, Measurement
from stepscope.report.format import count, duration, share, size
from stepscope.report.tables import table_lines

_BATCH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "batch_size": pl.Int64,
    "steps": pl.Int64,
    "step_ns": pl.Float64,
    "line_ns": pl.Float64,
    "samples_per_second": pl.Float64,
    "memory_bytes": pl.Int64,
    "line_memory_bytes": pl.Float64,
}


def batch_table(model: BatchModel) -> pl.DataFrame:
    """One row for each measurement, with what the lines give for it."""
    rows = [
        (
            each.batch_size,
            each.steps,
            each.step_ns,
            None if model.time is None else model.time.at(each.batch_size),
            each.throughput,
            each.memory_bytes,
            None if model.memory is None else model.memory.at(each.batch_size),
        )
        for each in model.measurements
    ]
    return pl.DataFrame(rows, schema=dict(_BATCH_SCHEMA), orient="row")


def batch_text(model: BatchModel, *, width: int) -> str:
    """The measurements, the lines through them, and what follows."""
    lines = [*table_lines(batch_table(model), width=width), "", *_lines(model), "", *verdict(model)]
    return "\n".join(lines) + "\n"


def _lines(model: BatchModel) -> Iterator[str]:
    if model.time is not None:
        yield f"a step takes {_line(model.time, duration)}"
    if model.memory is not None:
        yield f"memory takes {_line(model.memory, size)}"
        if model.measurements[0].device == "cpu":
            yield "  (of the host, what torch allocated while recording: what was there before is not counted)"
    for problem in model.problems:
        yield f"not answered: {problem}"


def _line(line: Line, write: Any) -> str:
    """Such as "10.0 ms (± 0.2 ms) + 2.0 ms (± 0.1 ms) for each sample; explains 99.9 %"."""
    constant, slope = write(line.constant), write(line.slope)
    if line.constant_error is not None and line.slope_error is not None:
        constant += f" (± {write(line.constant_error)})"
        slope += f" (± {write(line.slope_error)})"
    explained = f"; the line explains {share(line.r_squared)}" if line.slope_error is not None else ""
    return f"{constant} and {slope} for each sample{explained}"


def verdict(model: BatchModel) -> Iterator[str]:
    """What to do, in sentences."""
    best = max(model.measurements, key=lambda each: each.throughput)
    rate = count(round(best.throughput, 1))
    fastest = f"The fastest of the measured sizes is {best.batch_size}: {rate} samples a second"
    limit = model.throughput_limit
    if limit is not None:
        reached = best.throughput / limit
        yield f"{fastest}, {share(reached)} of the {count(round(limit, 1))} that no size exceeds."
        half = model.batch_for(0.9 * limit)
        if half is not None and half > 0:
            yield f"90 % of them take a batch of {count(round(half))}."
    else:
        yield f"{fastest}."
    if model.largest_batch is not None and model.capacity_bytes is not None:
        yield (
            f"The largest batch that fits into {size(model.capacity_bytes)} with {share(model.kept_free)} of it left "
            f"free is about {count(model.largest_batch)}{_beyond(model)}."
        )
        yield from _advice(model, best, model.largest_batch)


def _beyond(model: BatchModel) -> str:
    """How far the answer lies outside of what was measured."""
    largest = model.measurements[-1].batch_size
    if model.largest_batch is None or model.largest_batch <= 2 * largest:
        return ""
    return f", {model.largest_batch / largest:.0f} times the largest that was measured: try it before relying on it"


def _advice(model: BatchModel, best: Measurement, largest: int) -> Iterator[str]:
    expected = model.throughput(largest)
    if expected is None or largest <= best.batch_size:
        return
    gain = expected / best.throughput - 1
    if gain >= GAIN:
        yield f"It would bring {share(gain)} more samples a second than {best.batch_size}."
    else:
        yield f"It would bring no more than {share(max(gain, 0.0))}: the batch size is large enough."


def batch_json(model: BatchModel) -> dict[str, Any]:
    """The same for programs."""
    return {
        "schema": 1,
        "measurements": batch_table(model).rows(named=True),
        "time": _line_json(model.time),
        "memory": _line_json(model.memory),
        "capacity_bytes": model.capacity_bytes,
        "kept_free": model.kept_free,
        "largest_batch": model.largest_batch,
        "samples_per_second_limit": model.throughput_limit,
        "problems": list(model.problems),
        "verdict": list(verdict(model)),
    }


def _line_json(line: Line | None) -> dict[str, float | None] | None:
    if line is None:
        return None
    names = ("slope", "constant", "slope_error", "constant_error", "r_squared")
    return {name: getattr(line, name) for name in names}
