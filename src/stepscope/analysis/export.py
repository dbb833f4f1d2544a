"""A trace as a Chrome-trace timeline for the Perfetto UI, with the causes of idle time as tracks of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import polars as pl

from stepscope.analysis.idle import idle_time
from stepscope.trace import Trace

_ROWS: Final = 100_000
_TABLES: Final = (
    ("annotations", "user_annotation"),
    ("frames", "python_function"),
    ("operators", "cpu_op"),
    ("launches", "cuda_runtime"),
    ("device_work", "kernel"),
    ("synchronisations", "synchronisation"),
)
_IDLE_PROCESS: Final = 1_000_000


def timeline(trace: Trace, idle: pl.DataFrame | None = None) -> Iterator[bytes]:
    """The pieces of a JSON document in the Chrome-trace format, in order.

    Args:
        idle: as `idle_time` gives it; computed if not given.

    Every slice of the trace is there with its exact time, with arrows from launches to the work they launched. Below
    each device stands a process "device N: why idle" with one slice a piece of idle time, named by its cause.
    """
    idle = idle_time(trace) if idle is None else idle
    yield b'{"displayTimeUnit": "ns", "stepscope": "idle causes by stepscope", "traceEvents": [\n'
    yield _names(trace, idle)
    processes = _process_numbers(trace)
    for table, category in _TABLES:
        rows = trace.table(table)
        for first in range(0, rows.height, _ROWS):
            yield _slices(rows.slice(first, _ROWS), category, processes)
    yield from _flows(trace, processes)
    for first in range(0, idle.height, _ROWS):
        yield _idle_slices(idle.slice(first, _ROWS), idle["device"].unique().sort().to_list())
    last = {"ph": "M", "name": "process_labels", "pid": _IDLE_PROCESS, "tid": 0, "args": {"labels": "stepscope"}}
    yield json.dumps(last).encode() + b"\n]}\n"


def _process_numbers(trace: Trace) -> pl.DataFrame:
    """The process number of each lane: viewers want whole numbers, traces have names too."""
    lanes = trace.lanes
    owner = pl.when(pl.col("device").is_not_null()).then(pl.format("device {}", "device")).otherwise("process")
    return lanes.select("lane", pid=owner.rank("dense").cast(pl.Int64))


def _names(trace: Trace, idle: pl.DataFrame) -> bytes:
    numbers = dict(_process_numbers(trace).iter_rows())
    events = []
    for lane in trace.lanes.iter_rows(named=True):
        pid = numbers[lane["lane"]]
        process = (
            f"device {lane['device']}" if lane["device"] is not None else (lane["process_name"] or lane["process"])
        )
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane["lane"], "args": {"name": lane["name"]}}
        )
    for number, device in enumerate(idle["device"].unique().sort().to_list()):
        name = f"device {device}: why idle"
        pid = _IDLE_PROCESS + number
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "cause"}})
    return b"".join(json.dumps(event).encode() + b",\n" for event in events)


def _microseconds(column: str) -> pl.Expr:
    """Nanoseconds as microseconds with three decimals, without going through floating point."""
    value = pl.col(column)
    return pl.format("{}.{}", value // 1000, (value % 1000).cast(pl.String).str.zfill(3))


def _quoted(column: pl.Series) -> pl.Series:
    """JSON strings, worked out once for each different value."""
    values = column.unique()
    quoted = pl.DataFrame({"value": values, "quoted": [json.dumps(value or "") for value in values]})
    return column.to_frame("value").join(quoted, on="value", how="left", nulls_equal=True, maintain_order="left")[
        "quoted"
    ]


def _lines(rows: pl.DataFrame, line: pl.Expr) -> bytes:
    return ("".join(rows.select(line.alias("line"))["line"])).encode()


def _slices(rows: pl.DataFrame, category: str, processes: pl.DataFrame) -> bytes:
    rows = rows.join(processes, on="lane", how="left", maintain_order="left").with_columns(name=_quoted(rows["name"]))
    line = pl.concat_str(
        pl.lit(f'{{"ph": "X", "cat": "{category}", "name": '),
        pl.col("name"),
        pl.lit(', "pid": '),
        pl.col("pid"),
        pl.lit(', "tid": '),
        pl.col("lane"),
        pl.lit(', "ts": '),
        _microseconds("start_ns"),
        pl.lit(', "dur": '),
        _microseconds("duration_ns"),
        pl.lit("},\n"),
    )
    return _lines(rows, line)


def _flows(trace: Trace, processes: pl.DataFrame) -> Iterator[bytes]:
    """Arrows from launches to device work; the work's row is the arrow's number."""
    calls = trace.launches.select(call_ns="start_ns", call_lane="lane").with_row_index("launch")
    work = trace.device_work.with_row_index("row").filter(pl.col("launch").is_not_null())
    work = work.select("row", "launch", "start_ns", "lane").join(calls, on="launch", how="inner", maintain_order="left")
    for first in range(0, work.height, _ROWS):
        part = work.slice(first, _ROWS)
        for phase, time, lane in (("s", "call_ns", "call_lane"), ("f", "start_ns", "lane")):
            rows = part.join(processes, left_on=lane, right_on="lane", how="left", maintain_order="left")
            binding = ', "bp": "e"' if phase == "f" else ""
            line = pl.concat_str(
                pl.lit(f'{{"ph": "{phase}", "cat": "launch", "name": "launch"{binding}, "id": '),
                pl.col("row"),
                pl.lit(', "pid": '),
                pl.col("pid"),
                pl.lit(', "tid": '),
                pl.col(lane),
                pl.lit(', "ts": '),
                _microseconds(time),
                pl.lit("},\n"),
            )
            yield _lines(rows, line)


def _idle_slices(idle: pl.DataFrame, devices: list[str]) -> bytes:
    numbers = pl.DataFrame({"device": devices, "pid": [_IDLE_PROCESS + number for number in range(len(devices))]})
    rows = idle.join(numbers, on="device", how="left", maintain_order="left")
    rows = rows.with_columns(trigger=_quoted(rows["trigger"]))
    line = pl.concat_str(
        pl.lit('{"ph": "X", "cat": "idle", "name": "'),
        pl.col("cause"),
        pl.lit('", "pid": '),
        pl.col("pid"),
        pl.lit(', "tid": 0, "ts": '),
        _microseconds("start_ns"),
        pl.lit(', "dur": '),
        _microseconds("duration_ns"),
        pl.lit(', "args": {"trigger": '),
        pl.col("trigger"),
        pl.lit(', "gap": '),
        pl.col("gap"),
        pl.lit("}},\n"),
    )
    return _lines(rows, line)
