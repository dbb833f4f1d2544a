"""Real traces read exactly: every number of facts.json, which an independent slow program computed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.diagnosis.ranks import diagnose_ranks
from stepscope.errors import NotATraceError
from stepscope.readers import open_trace, trace_files
from stepscope.trace import Trace

pytestmark = pytest.mark.traces

NOT_TRACES = {
    "execution_trace.json.gz": "a PyTorch execution trace",
    "memory_timeline.raw.gz": "a memory timeline",
}


def known_facts() -> list[Any]:
    """The lines of facts.json; a single None without the folder, for the fixture to skip."""
    path = Path(os.environ.get("STEPSCOPE_TRACES", "")) / "facts.json"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else [None]


def name_of(fact: Any) -> str:
    return str(fact["file"]) if fact else "none"


def union_ns(intervals: list[tuple[int, int]]) -> int:
    total = reached = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def device_figures(trace: Trace) -> dict[str, dict[str, int]]:
    figures = {}
    for (device,), work in trace.device_work.group_by("device"):
        spans = [(start, start + duration) for start, duration in work.select("start_ns", "duration_ns").iter_rows()]
        figures[str(device)] = {
            "events": len(spans),
            "busy_ns": union_ns(spans),
            "window_ns": max(end for _, end in spans) - min(start for start, _ in spans),
        }
    return figures


def steps(trace: Trace) -> list[list[int]]:
    rows = trace.annotations.filter((pl.col("kind") == "host") & pl.col("step").is_not_null())
    return sorted(list(row) for row in rows.select("step", "start_ns", "duration_ns").iter_rows())


def categories(trace: Trace) -> dict[str, int]:
    """Rows of each table, in the words of the facts' categories."""
    return {name: trace.table(name).height for name in ("operators", "launches", "device_work", "frames")}


def expected_categories(counts: dict[str, int], trace: Trace) -> dict[str, int]:
    host_annotations = trace.annotations.filter(pl.col("kind") == "host").height
    as_operators = counts.get("operator", 0) + counts.get("cpu_op", 0)
    if "operator" in counts:  # old files keep annotations among the operators
        as_operators -= host_annotations - counts.get("user_annotation", 0)
    return {
        "operators": as_operators,
        "launches": sum(counts.get(c, 0) for c in ("cuda_runtime", "cuda_driver", "runtime", "mtia_runtime")),
        "device_work": sum(
            counts.get(c, 0)
            for c in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events", "concurrent_kernel")
        ),
        "frames": counts.get("python_function", 0),
    }


@pytest.mark.parametrize("fact", known_facts(), ids=name_of)
def test_every_number_is_exact(traces_folder: Path, fact: Any) -> None:
    trace = open_trace(traces_folder / fact["file"])
    trace.check()
    distributed = fact["distributed"] or {}
    assert trace.metadata.events == fact["events"]
    assert trace.metadata.complete_events == fact["complete_events"]
    assert device_figures(trace) == fact["devices"]
    assert trace.device_work["launch"].null_count() == fact["unlaunched"]
    assert steps(trace) == fact["steps"]
    assert trace.metadata.rank == distributed.get("rank")
    assert trace.metadata.world_size == distributed.get("world_size")
    assert categories(trace) == expected_categories(fact["categories"], trace)
    assert trace.warnings == ()


def test_every_file_has_its_facts(traces_folder: Path) -> None:
    files = {str(path.relative_to(traces_folder)) for path in (traces_folder / "kineto").rglob("*.json*")}
    assert {fact["file"] for fact in known_facts()} == files


@pytest.mark.parametrize("name", sorted(NOT_TRACES))
def test_what_only_looks_like_a_trace_is_refused(traces_folder: Path, name: str) -> None:
    with pytest.raises(NotATraceError, match=NOT_TRACES[name]):
        open_trace(traces_folder / "not_a_trace" / name)


def test_each_of_these_is_known(traces_folder: Path) -> None:
    assert {path.name for path in (traces_folder / "not_a_trace").iterdir()} == set(NOT_TRACES)


def test_ranks_without_a_device_and_a_few_of_many_are_compared(traces_folder: Path) -> None:
    def found(name: str) -> list[str]:
        return [
            each.rule
            for each in diagnose_ranks([open_trace(file) for file in trace_files(traces_folder / "kineto" / name)])
        ]

    assert found("cpu_ddp_gloo") == ["late-rank"]
    assert found("ranks128_sampled") == []  # one that is not here may be the late one
