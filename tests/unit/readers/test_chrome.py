"""Chrome traces of tools that are no PyTorch profiler: read as well as their events tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.readers import open_trace
from stepscope.readers.kineto.events import EventStream
from stepscope.readers.source import ByteSource
from stepscope.trace import Trace


def opened(folder: Path, events: list[dict[str, Any]], **header: Any) -> Trace:
    path = folder / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": events} if header else events))
    trace = open_trace(path)
    trace.check()
    return trace


def event(phase: str, time: float, name: str = "", category: str = "", thread: Any = 1, **more: Any) -> dict[str, Any]:
    words = {"cat": category} if category else {}
    return {"ph": phase, "ts": time, "name": name, "pid": more.pop("pid", 7), "tid": thread, **words, **more}


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def kinds(trace: Trace) -> dict[str, int]:
    return {warning.kind: warning.count for warning in trace.warnings}


def test_beginnings_and_ends_are_slices(tmp_path: Path) -> None:
    events = [
        event("B", 10.001, "aten::mm", "cpu_op", args={"Input Dims": [[2, 3]]}),
        event("B", 11.0, "inner", "cpu_op"),
        event("B", 11.5, "of another thread", "cpu_op", thread="worker"),
        event("E", 12.25),
        event("E", 14.0, "aten::mm", args={"Sequence number": 4}),
        event("E", 15.0, thread="worker"),
        event("E", 16.0),
        event("B", 17.0, "never ends", "cpu_op"),
    ]

    trace = opened(tmp_path, events)

    assert rows(trace.operators, "start_ns", "duration_ns", "name", "input_shapes", "sequence_number") == [
        (0, 3_999, "aten::mm", "[[2, 3]]", 4),
        (999, 1_250, "inner", None, None),
        (1_499, 3_500, "of another thread", None, None),
    ]
    assert kinds(trace) == {"unclosed": 1, "unopened": 1}


def test_what_runs_beside_others_stands_on_a_row_of_its_own(tmp_path: Path) -> None:
    events = [
        event("b", 1, "request", "net", id="0x1"),
        event("b", 2, "request", "net", id="0x2"),
        event("e", 3, "request", "net", id="0x1"),
        event("e", 5, "request", "net", id="0x2", thread=2),
        event("n", 5, "mark", "net", id="0x2"),
    ]

    trace = opened(tmp_path, events)

    assert rows(trace.annotations, "start_ns", "duration_ns", "name", "kind") == [
        (0, 2_000, "request", "host"),
        (1_000, 3_000, "request", "host"),
    ]
    assert trace.lanes["thread"].to_list() == ["async net"]
    assert kinds(trace) == {"unknown_category": 2, "unsupported_phase": 1}


def test_names_tell_what_has_no_category(tmp_path: Path) -> None:
    events = [
        event("X", 1, "train.py(12): step", dur=9),
        event("X", 2, "aten::mm", dur=5),
        event("X", 3, "cudaLaunchKernel", dur=1),
        event("X", 5, "anything else", dur=1),
    ]

    trace = opened(tmp_path, events, displayTimeUnit="ms")

    assert rows(trace.frames, "file", "line", "function") == [("train.py", 12, "step")]
    assert trace.operators["name"].to_list() == ["aten::mm"]
    assert rows(trace.launches, "name", "kind", "operator") == [("cudaLaunchKernel", "launch", 0)]
    assert rows(trace.annotations, "name", "kind") == [("anything else", "host")]
    assert kinds(trace) == {"uncategorised": 4}


def test_a_process_for_each_device_and_names_for_rows(tmp_path: Path) -> None:
    """As tools write that put one process for each GPU and words where others have numbers."""
    events = [
        {"ph": "M", "name": "process_name", "pid": "GPU 1", "args": {"name": "GPU 1"}},
        event("X", 1, "gemm", "kernel", dur=2, pid="GPU 1", thread="stream 3"),
        event("X", 1, "gemm", "kernel", dur=2, pid="GPU 0", thread="stream 3", args={"grid": [1, 1, 1]}),
    ]

    trace = opened(tmp_path, events)

    assert rows(trace.device_work, "name", "device", "queue") == [("gemm", "GPU 1", "3"), ("gemm", "GPU 0", "3")]
    assert trace.lanes["kind"].to_list() == ["queue", "queue"]


@pytest.mark.slow
def test_events_of_nothing_come_in_chunks_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"[" + b"{}," * 4_000_000 + json.dumps(event("X", 1, "a", dur=2)).encode() + b"]")
    source = ByteSource(path)

    sizes = [len(chunk) for chunk in EventStream(source).chunks()]
    source.close()

    assert sum(sizes) == 4_000_001
    assert max(sizes) < 3_600_000
