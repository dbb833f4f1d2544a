"""Throughput against batch size, for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import polars as pl

from stepscope.analysis.batch_size import GAIN, BatchModel, Line, Measurement
from stepscope.predict.data_parallel_settings import Reason, SettingsFromTrace
from stepscope.report.document import Block, Code, Document, Section, Table, Text, fields, section_if, texts
from stepscope.report.format import count, duration, share, size

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
    """One row per measurement, with what the fitted lines predict for it."""
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


def batch_document(model: BatchModel) -> Document:
    """Report the measurements, the lines fitted to them, and the recommendation."""
    parts = ((Table(batch_table(model)),), texts(*_lines(model)), texts(*verdict(model)))
    return Document("batch size", tuple(Section("", part, is_quiet=True) for part in parts))


def _lines(model: BatchModel) -> Iterator[str]:
    if model.time is not None:
        yield f"a step takes {_line(model.time, duration)}"
    if model.memory is not None:
        yield f"memory takes {_line(model.memory, size)}"
        if model.measurements[0].device == "cpu":
            yield "(of the host, what torch allocated while recording: what was there before is not counted)"
    for problem in model.problems:
        yield f"not answered: {problem}"


def _line(line: Line, write: Callable[[float], str]) -> str:
    """Format a line as "10.0 ms (± 0.2 ms) + 2.0 ms (± 0.1 ms) for each sample; explains 99.9 %"."""
    constant, slope = write(line.constant), write(line.slope)
    if line.constant_error is not None and line.slope_error is not None:
        constant += f" (± {write(line.constant_error)})"
        slope += f" (± {write(line.slope_error)})"
    explained = f"; the line explains {share(line.r_squared)}" if line.slope_error is not None else ""
    return f"{constant} and {slope} for each sample{explained}"


def verdict(model: BatchModel) -> Iterator[str]:
    """Recommend a batch size, in sentences."""
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
    """The batch model as JSON values."""
    return {
        "schema": 1,
        "measurements": batch_table(model),
        **fields(model, "time", "memory", "capacity_bytes", "kept_free", "largest_batch", "problems"),
        "samples_per_second_limit": model.throughput_limit,
        "verdict": list(verdict(model)),
    }


_SIZES: Final[dict[str, type[pl.DataType]]] = {
    "bucket_cap_mb": pl.String,
    "messages": pl.Float64,
    "communication_ns": pl.Float64,
    "exposed_ns": pl.Float64,
}


def data_parallel_document(found: SettingsFromTrace, *, file: str | None = None) -> Document:
    """Report each setting with its reason, the bucket sizes tried, and the code.

    Args:
        file: the file with the settings, which the code reads.
    """
    settings = [Section(f"{each.setting} = {_value(each)}", (Text(each.why),)) for each in found.reasons]
    sizes = (Table(_sizes(found)),) if found.sizes else ()
    blocks: tuple[Block, ...] = (
        Text(_head(found)),
        *settings,
        *section_if("Sizes of buckets, the mean step", *sizes),
        Section("In the program", (_code(found, file),)),
    )
    return Document("data parallel", blocks)


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
    """Bucket sizes, with neighbours that produce the same messages in one row (in a small model, all large ones)."""
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


def _code(found: SettingsFromTrace, file: str | None) -> Code | Text:
    given = found.settings.arguments()
    if not given:
        known = any(each.known for each in found.reasons)
        right = "torch's own settings are right, as far as the recording tells"
        unknown = "the recording does not tell which settings would be right"
        return Text(f"nothing to change: {right if known else unknown}")
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    made = f"DataParallelSettings.load({file!r})" if file is not None else f"DataParallelSettings({words})"
    return Code(
        f"model = DistributedDataParallel(model, {words})\n"
        "# or\n"
        "from stepscope.remedies import DataParallelSettings\n"
        f"settings = {made}\n"
        "model = settings.ddp(model)                       # or: Trainer(strategy=settings.lightning_strategy())"
    )


def data_parallel_json(found: SettingsFromTrace) -> dict[str, Any]:
    """The settings as JSON values, also read by `DataParallelSettings.load`."""
    written: dict[str, Any] = json.loads(found.settings.to_json())
    return {
        **written,
        "reasons": {each.setting: fields(each, "why", "known") for each in found.reasons},
        **fields(found, "step_ns", "ranks", "recorded_ranks", "latency_ns", "bandwidth_bytes_s"),
        "sizes": [
            {"bucket_cap_mb": each.megabytes, **fields(each, "messages", "communication_ns", "exposed_ns")}
            for each in found.sizes
        ],
    }
