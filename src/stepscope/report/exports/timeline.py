"""A trace as a Chrome-trace timeline for the Perfetto UI, with tracks of idle causes and of the critical path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import polars as pl

from stepscope.analysis.idle import idle_time
from stepscope.report.exports.json_text import PART_ROWS, lines, microseconds, quoted
from stepscope.trace import Trace

_TABLES: Final = (
    ("annotations", "user_annotation"),
    ("frames", "python_function"),
    ("operators", "cpu_op"),
    ("launches", "cuda_runtime"),
    ("device_work", "kernel"),
    ("synchronisations", "synchronisation"),
)
_IDLE_PROCESS: Final = 1_000_000
_PATH_PROCESS: Final = 999_999


def timeline(trace: Trace, idle: pl.DataFrame | None = None, path: pl.DataFrame | None = None) -> Iterator[bytes]:
    """Yield the pieces of a JSON document in the Chrome-trace format, in order.

    Args:
        idle: as `idle_time` returns it; computed if not given.
        path: the critical path, columns start_ns, duration_ns, kind, cause, name; no such track without it.

    The document holds every slice of the trace with its exact time, and arrows from launches to the work they launched.
    Below each device a process "device N: why idle" has one slice per idle gap, named by its cause; above them,
    "critical path" has one slice per piece of it, named by what the steps waited for.
    """
    idle = idle_time(trace) if idle is None else idle
    yield b'{"displayTimeUnit": "ns", "stepscope": "idle causes by stepscope", "traceEvents": [\n'
    yield _names(trace, idle)
    if path is not None and path.height:
        yield _named_track(_PATH_PROCESS, "critical path", "what the steps waited for")
        for first in range(0, path.height, PART_ROWS):
            yield _path_slices(path.slice(first, PART_ROWS))
    processes = _process_numbers(trace)
    for table, category in _TABLES:
        rows = trace.table(table)
        for first in range(0, rows.height, PART_ROWS):
            yield _slices(rows.slice(first, PART_ROWS), category, processes)
    yield from _flows(trace, processes)
    for first in range(0, idle.height, PART_ROWS):
        yield _idle_slices(idle.slice(first, PART_ROWS), idle["device"].unique().sort().to_list())
    last = {"ph": "M", "name": "process_labels", "pid": _IDLE_PROCESS, "tid": 0, "args": {"labels": "stepscope"}}
    yield json.dumps(last).encode() + b"\n]}\n"


def _process_numbers(trace: Trace) -> pl.DataFrame:
    """The process number of each lane: viewers require integers, but traces have process names too."""
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
    tracks = [
        _named_track(_IDLE_PROCESS + number, f"device {device}: why idle", "cause")
        for number, device in enumerate(idle["device"].unique().sort().to_list())
    ]
    return b"".join([*(json.dumps(event).encode() + b",\n" for event in events), *tracks])


def _named_track(pid: int, process: str, thread: str) -> bytes:
    names = {"process_name": process, "thread_name": thread}
    events = [{"ph": "M", "name": key, "pid": pid, "tid": 0, "args": {"name": name}} for key, name in names.items()]
    return b"".join(json.dumps(event).encode() + b",\n" for event in events)


def _at(time: str, thread: str) -> tuple[str | pl.Expr, ...]:
    """Process, thread and time of an event."""
    return ', "pid": ', pl.col("pid"), ', "tid": ', pl.col(thread), ', "ts": ', microseconds(pl.col(time))


def _slices(rows: pl.DataFrame, category: str, processes: pl.DataFrame) -> bytes:
    name = quoted(rows["name"].fill_null(""))
    rows = rows.join(processes, on="lane", how="left", maintain_order="left").with_columns(name=name)
    head = f'{{"ph": "X", "cat": "{category}", "name": '
    return lines(
        rows, head, pl.col("name"), *_at("start_ns", "lane"), ', "dur": ', microseconds(pl.col("duration_ns")), "},\n"
    )


def _flows(trace: Trace, processes: pl.DataFrame) -> Iterator[bytes]:
    """Arrows from launches to device work; the arrow's id is the work's row."""
    calls = trace.launches.select(call_ns="start_ns", call_lane="lane").with_row_index("launch")
    work = trace.device_work.with_row_index("row").filter(pl.col("launch").is_not_null())
    work = work.select("row", "launch", "start_ns", "lane").join(calls, on="launch", how="inner", maintain_order="left")
    for first in range(0, work.height, PART_ROWS):
        part = work.slice(first, PART_ROWS)
        for head, time, lane in (
            ('{"ph": "s", "cat": "launch", "name": "launch", "id": ', "call_ns", "call_lane"),
            ('{"ph": "f", "bp": "e", "cat": "launch", "name": "launch", "id": ', "start_ns", "lane"),
        ):
            rows = part.join(processes, left_on=lane, right_on="lane", how="left", maintain_order="left")
            yield lines(rows, head, pl.col("row"), *_at(time, lane), "},\n")


def _path_slices(path: pl.DataFrame) -> bytes:
    on_host = pl.format("host: {}", pl.col("cause").fill_null("unknown"))
    resource = pl.when(pl.col("kind") == "host").then(on_host).otherwise(pl.col("kind").str.replace_all("_", " "))
    name = quoted(path["name"].fill_null(""))
    rows = path.with_columns(pid=pl.lit(_PATH_PROCESS), thread=pl.lit(0), resource=resource, name=name)
    return lines(
        rows,
        '{"ph": "X", "cat": "critical path", "name": "',
        pl.col("resource"),
        '"',
        *_at("start_ns", "thread"),
        ', "dur": ',
        microseconds(pl.col("duration_ns")),
        ', "args": {"what": ',
        pl.col("name"),
        "}},\n",
    )


def _idle_slices(idle: pl.DataFrame, devices: list[str]) -> bytes:
    numbers = pl.DataFrame({"device": devices, "pid": [_IDLE_PROCESS + number for number in range(len(devices))]})
    rows = idle.join(numbers, on="device", how="left", maintain_order="left").with_columns(
        trigger=quoted(idle["trigger"].fill_null("")), thread=pl.lit(0)
    )
    arguments = (', "args": {"trigger": ', pl.col("trigger"), ', "gap": ', pl.col("gap"))
    return lines(
        rows,
        '{"ph": "X", "cat": "idle", "name": "',
        pl.col("cause"),
        '"',
        *_at("start_ns", "thread"),
        ', "dur": ',
        microseconds(pl.col("duration_ns")),
        *arguments,
        "}},\n",
    )
