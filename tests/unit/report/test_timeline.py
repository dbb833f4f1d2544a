"""The exported timeline's track of the critical path."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from stepscope.report.exports.chrome import timeline
from stepscope.trace import Trace
from stepscope.whatif import Experiment
from stepscope.whatif.critical_path import critical_path
from tests.unit.waiting_twice import waiting_twice


def path_events(trace: Trace, path: pl.DataFrame | None) -> list[dict[str, Any]]:
    events = json.loads(b"".join(timeline(trace, path=path)))["traceEvents"]
    return [event for event in events if event["pid"] == 999_999]


def test_the_critical_path_is_a_track_without_holes() -> None:
    trace = waiting_twice(steps=2)

    names, pieces = [], []
    for event in path_events(trace, critical_path(Experiment(trace))):
        names += [event["args"]["name"]] if event["ph"] == "M" else []
        pieces += [(event["name"], event["ts"], event["dur"], event["args"]["what"])] if event["ph"] == "X" else []

    assert names == ["critical path", "what the steps waited for"]
    assert pieces[:4] == [
        ("host: input", 0.0, 300.0, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        ("launch latency", 300.0, 20.0, "gemm"),
        ("compute", 320.0, 400.0, "gemm"),
        ("host: synchronisation", 720.0, 5.0, "cudaDeviceSynchronize"),
    ]
    assert [start + length for _, start, length, _ in pieces[:-1]] == [start for _, start, _, _ in pieces[1:]]


def test_hostile_names_stay_text_and_without_a_path_there_is_no_track() -> None:
    trace = waiting_twice(steps=1)
    hostile = pl.DataFrame(
        [(0, 5, "host", None, '"}}],\n')], schema=["start_ns", "duration_ns", "kind", "cause", "name"], orient="row"
    )

    assert path_events(trace, hostile)[-1]["args"] == {"what": '"}}],\n'}
    assert path_events(trace, hostile)[-1]["name"] == "host: unknown"
    assert path_events(trace, None) == path_events(trace, hostile.clear()) == []
    assert path_events(Trace.from_tables({}), None) == []
