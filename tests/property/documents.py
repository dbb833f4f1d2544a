"""Traces as text with the place of each event known, and reading them under watch."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.readers import assembly, open_trace, source
from stepscope.readers.kineto import events as chunks
from stepscope.readers.kineto import events as events_module
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS


def event(name: str, category: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    place = {"pid": 0, "tid": 7} if category in ("kernel", "gpu_memcpy") else {"pid": 100, "tid": 101}
    times = {"ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": args}


def flow(phase: str, number: int, start: float) -> dict[str, Any]:
    return {"ph": phase, "id": number, "pid": 100, "tid": 101, "ts": start, "cat": "fwdbwd", "name": "fwdbwd"}


def every_kind() -> list[dict[str, Any]]:
    """A few events of each kind that the reader makes tables of."""
    result: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 100, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "ts": 0, "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        event("ProfilerStep#3", "user_annotation", 10.001, 900, **{"External id": 1}),
    ]
    for turn in range(6):
        start, launch = 20.125 + 100 * turn, {"correlation": 7 + turn, "External id": turn}
        shapes = {"Input Dims": [[8, 64], []], "Input type": ["float", "Scalar"]}
        place = {"device": 0, "stream": 7, "grid": [4, 1, 1], "block": [128, 1, 1]}
        usage = {"registers per thread": 32, "shared memory": 0, "est. achieved occupancy %": 12.5}
        memory = {"Device Type": 0, "Device Id": -1, "Addr": 4096, "Bytes": 64, "Total Allocated": 64}
        result += [
            event("aten::mm", "cpu_op", start, 30, **{"Sequence number": turn, "Fwd thread id": 0}, **shapes),
            event("file.py(3): forward", "python_function", start, 40, **{"Python id": turn, "Python parent id": None}),
            event("cudaLaunchKernel", "cuda_runtime", start + 1, 3, **launch),
            event('gemm<"16", \\ é %>', "kernel", start + 10, 12.5, **launch, **place, **usage),
            event("Memcpy HtoD", "gpu_memcpy", start + 30, 2, bytes=4096, **launch, device=0, stream=7),
            event("Stream Sync", "cuda_sync", start + 45, 2, stream=7, device=0, cuda_sync_kind="Stream Sync"),
            event("MmBackward0", "cpu_op", start + 50, 20, **{"Sequence number": turn, "Fwd thread id": 1}),
            flow("s", turn + 1, start),
            flow("f", turn + 1, start + 50),
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 101}
            | {"ts": start + 2, "args": memory},
            {"ph": "C", "name": "GPU 0 power", "pid": 0, "tid": 0, "ts": start, "args": {"watts": 250.5}},
        ]
    return result


class Document:
    """A trace as text, with the place of each event in it."""

    def __init__(self, events: list[Any], *, layout: str = "lines", base: bool = True) -> None:
        header = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Simulated"}], "with_stack": 1}
        header |= {"baseTimeNanoseconds": 1_700_000_000_000_000_000} if base else {}
        indent = {"lines": 1, "compact": None}[layout]
        text = json.dumps(header, indent=indent)[:-1].rstrip().encode() + b', "traceEvents": ['
        self.spans: list[tuple[int, int]] = []
        for number, value in enumerate(events):
            text += b",\n  " if number else b"\n  "
            encoded = json.dumps(value, indent=indent, ensure_ascii=False).encode()
            self.spans.append((len(text), len(text) + len(encoded)))
            text += encoded
        self.array = (text.rindex(b'"traceEvents"'), len(text))
        self.events = events
        self.text = text + b'\n], "distributedInfo": {"rank": 1, "world_size": 2}}'

    def whole_events(self, length: int) -> int:
        """How many events stand completely in the first `length` bytes."""
        return sum(end <= length for _, end in self.spans)

    def complete_events(self, length: int) -> int:
        """How many of those have a start and a duration."""
        return sum(end <= length and "dur" in value for value, (_, end) in zip(self.events, self.spans, strict=True))


EVERY_KIND = Document(every_kind())


@contextmanager
def small_pieces(wanted: bool = True) -> Iterator[None]:
    """Blocks, chunks, salvaged pieces and rows in memory so small that a short file has many."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(source, "BLOCK_BYTES", 700)
            patch.setattr(source, "_DAMAGE_STEP_BYTES", 100)
            patch.setattr(chunks, "CHUNK_BYTES", 1500)
            patch.setattr(events_module, "_SALVAGE_BYTES", 600)
            patch.setattr(assembly, "MEMORY_BYTES", 2000)
            patch.setattr(assembly, "PART_ROWS", 16)
        yield


def read(data: bytes, *, pieces: bool = False, name: str = "trace.json") -> Trace | StepscopeError:
    """The trace, checked, or the expected error; whichever it is, no temporary file stays."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, small_pieces(pieces):
        path = Path(folder) / name
        path.write_bytes(data)
        work = Path(folder) / "work"
        work.mkdir()
        patch.setattr(tempfile, "tempdir", str(work))
        trace: Trace | StepscopeError
        try:
            trace = open_trace(path)
        except StepscopeError as error:
            trace = error
        if isinstance(trace, StepscopeError):
            assert str(trace)
            assert list(work.iterdir()) == []
            return trace
        assert not list(work.rglob("spill-*"))
        trace.check()
        frames = {table: trace.table(table) for table in SCHEMAS}
        result = Trace.from_tables(frames, trace.metadata, trace.warnings)
        del trace
        gc.collect()
        assert list(work.iterdir()) == []
        return result


def read_trace(data: bytes, *, pieces: bool = False) -> Trace:
    result = read(data, pieces=pieces)
    assert isinstance(result, Trace), result
    return result


def kinds(trace: Trace) -> set[str]:
    return {warning.kind for warning in trace.warnings}


def tables(trace: Trace) -> dict[str, pl.DataFrame]:
    return {name: trace.table(name) for name in SCHEMAS}


def same_tables(one: Trace, other: Trace) -> bool:
    return all(frame.equals(other.table(name)) for name, frame in tables(one).items())
