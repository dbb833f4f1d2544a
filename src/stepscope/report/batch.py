"""Throughput against batch size, for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from stepscope.analysis.batch_size import GAIN, BatchModel, Line, Measurement
from stepscope.predict.data_parallel_settings import Reason, SettingsFromTrace
from stepscope.report.format import count, duration, filled, share, size
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


_SIZES: Final[dict[str, type[pl.DataType]]] = {
    "bucket_cap_mb": pl.String,
    "messages": pl.Float64,
    "communication_ns": pl.Float64,
    "exposed_ns": pl.Float64,
}


def data_parallel_text(found: SettingsFromTrace, *, width: int, file: str | None = None) -> str:
    """Each setting with its reason, the sizes of buckets that were tried, and the code.

    Args:
        file: where the settings were written, for the code that reads them.
    """
    lines = [*filled(_head(found), width), ""]
    for reason in found.reasons:
        lines += [f"{reason.setting} = {_value(reason)}", *filled(reason.why, width, "    ", "    ")]
    if found.sizes:
        lines += ["", "Sizes of buckets, the mean step", *table_lines(_sizes(found), width=width)]
    lines += ["", "In the program", *_code(found, file)]
    return "\n".join(lines) + "\n"


def _head(found: SettingsFromTrace) -> str:
    among = f" among {found.ranks} ranks" if found.ranks is not None else ""
    head = f"Recorded steps{among} take {duration(found.step_ns)}."
    if found.latency_ns is not None and found.bandwidth_bytes_s is not None and found.sizes:
        speed = f"{found.bandwidth_bytes_s / 1e9:.2f} GB/s"
        head += f" A message takes {duration(found.latency_ns)}, and its bytes over {speed} each way."
        if found.recorded_ranks < 2:
            head += " Only one rank's trace was given: what it waits for the others counts as part of a message."
    return head


def _value(reason: Reason) -> str:
    if reason.value is None:
        return "(torch's own)" if reason.known else "(not known)"
    return f"{reason.value:g}" if not isinstance(reason.value, bool) else str(reason.value)


def _sizes(found: SettingsFromTrace) -> pl.DataFrame:
    """Sizes in a row that make the same messages share one line: of a small model all large ones do."""
    rows: list[tuple[str, float, float, float]] = []
    first = ""
    for each in found.sizes:
        size = "1, then 25" if each.megabytes is None else str(each.megabytes)
        costs = (each.messages, each.communication_ns, each.exposed_ns)
        if each.megabytes is not None and first and rows[-1][1:] == costs:
            rows[-1] = (f"{first} to {size}", *costs)
        else:
            rows.append((size, *costs))
            first = "" if each.megabytes is None else size
    return pl.DataFrame(rows, schema=dict(_SIZES), orient="row")


def _code(found: SettingsFromTrace, file: str | None) -> Iterator[str]:
    given = found.settings.arguments()
    if not given:
        yield "  " + (
            "nothing to change: torch's own settings are right, as far as the recording tells"
            if any(each.known for each in found.reasons)
            else "nothing to change: the recording does not tell which settings would be right"
        )
        return
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    yield f"  model = DistributedDataParallel(model, {words})"
    yield "or"
    yield "  from stepscope.remedies import DataParallelSettings"
    made = f"DataParallelSettings.load({file!r})" if file is not None else f"DataParallelSettings({words})"
    yield f"  settings = {made}"
    yield "  model = settings.ddp(model)                       # or: Trainer(strategy=settings.lightning_strategy())"


def data_parallel_json(found: SettingsFromTrace) -> dict[str, Any]:
    """The same for programs, and for `DataParallelSettings.load`."""
    written: dict[str, Any] = json.loads(found.settings.to_json())
    return {
        **written,
        "reasons": {each.setting: {"why": each.why, "known": each.known} for each in found.reasons},
        "step_ns": found.step_ns,
        "ranks": found.ranks,
        "recorded_ranks": found.recorded_ranks,
        "latency_ns": found.latency_ns,
        "bandwidth_bytes_s": found.bandwidth_bytes_s,
        "sizes": [
            {
                "bucket_cap_mb": each.megabytes,
                "messages": each.messages,
                "communication_ns": each.communication_ns,
                "exposed_ns": each.exposed_ns,
            }
            for each in found.sizes
        ],
    }
