"""Traces of a few events, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepscope.readers import open_trace
from stepscope.trace import Trace

Rows = list[tuple[Any, ...]]


def complete(name: str, category: str, start: Any, duration: Any, **more: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 2, "ts": start, "dur": duration}
    return event | more


def kernel(start: Any, duration: Any, correlation: int | None = None, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7} | ({} if correlation is None else {"correlation": correlation})
    return complete("gemm", "kernel", start, duration, pid=0, tid=7, args=args) | more


def launch(start: Any, correlation: int, name: str = "cudaLaunchKernel", duration: Any = 2) -> dict[str, Any]:
    return complete(name, "cuda_runtime", start, duration, args={"correlation": correlation})


def flow(phase: str, number: int, category: str, start: Any, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "id": number, "cat": category, "name": category, "pid": 1, "tid": 2, "ts": start} | more


def opened(tmp_path: Path, document: Any, **how: Any) -> Trace:
    """The trace of a document: text as it is, anything else as JSON; a list stands for its events."""
    path = tmp_path / "trace.json"
    if isinstance(document, list):
        document = {"traceEvents": document}
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    trace = open_trace(path, **how)
    trace.check()
    return trace


def rows(trace: Trace, table: str, *columns: str) -> Rows:
    return trace.table(table).select(columns).rows()


def counted(trace: Trace) -> dict[str, int]:
    return {warning.kind: warning.count for warning in trace.warnings}
