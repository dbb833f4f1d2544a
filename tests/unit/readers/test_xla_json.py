"""XLA's profile as a Chrome trace: the tables are those of the profile that it was made of."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.errors import NotATraceError
from stepscope.readers import open_trace
from stepscope.readers.xla_json import recognises
from stepscope.trace import Trace

PYTHON = os.environ.get("STEPSCOPE_JAX_PYTHON", "")
HOST, TPU, GPU = 701, 1, 2


def named(process: int, name: str, **threads: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}]
    for thread, thread_name in threads.items():
        tid = int(thread.removeprefix("t"))
        events.append({"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": thread_name}})
    return events


def event(process: int, thread: int, start: float, duration: float, name: str, **args: str) -> dict[str, Any]:
    more = {"args": args} if args else {}
    return {"ph": "X", "pid": process, "tid": thread, "ts": start, "dur": duration, "name": name, **more}


def profile() -> list[dict[str, Any]]:
    """A step on a TPU and one kernel on a GPU, as XLA's own converter writes them."""
    return [
        *named(HOST, "/host:CPU", t5="python", t6="pjrt-tpu-tasks/17"),
        *named(TPU, "/device:TPU:0", t1="Steps", t2="XLA Modules", t3="XLA Ops", t4="Framework Name Scope - from #3"),
        *named(GPU, "/device:GPU:1", t1="Stream #16(Kernel)", t2="XLA Ops - from #16"),
        *named(99, "a process of another tool", t1="x"),
        event(HOST, 5, 10.001, 89.999, "train", step_num="4", _r="1"),
        event(HOST, 5, 11.0, 60.5, "$train.py:12 step"),
        event(HOST, 5, 12.0, 5.25, "PjitFunction(step)"),
        event(HOST, 5, 13.0, 1e-06, "ThreadpoolListener::Record"),
        event(HOST, 5, 20.0, 3.0, "hipLaunchKernel", correlation_id="22"),
        event(HOST, 6, 14.0, 2.0, "ThreadpoolListener::Region"),
        event(TPU, 1, 15.0, 40.0, "4", step_num="4"),
        event(TPU, 2, 15.0, 40.0, "jit_step(123)", run_id="9"),
        event(TPU, 3, 15.0, 30.0, "fusion.1", long_name="%fusion.1 = f32[8]{0} fusion(%p)", hlo_category="loop fusion",
              tf_op="jit(step)/mul:", source="train.py:14", bytes_accessed="64"),
        event(TPU, 3, 46.0, 9.0, "all-reduce.2", long_name="%all-reduce.2 = f32[8]{0} all-reduce(%q)",
              hlo_category="all-reduce"),
        event(TPU, 4, 15.0, 30.0, "jit(step)"),
        event(GPU, 1, 24.0, 4.5, "gemm.kd", correlation_id="22", hlo_op="dot.1", hlo_module="jit_step",
              kernel_details=" grid:4,1,1 block:512,1,1 regs:32 occ_pct:50"),
        event(GPU, 2, 24.0, 4.5, "dot.1", long_name="1/dot.1"),
        event(99, 1, 1.0, 1.0, "something"),
        {},
    ]  # fmt: skip


def opened(folder: Path, events: list[dict[str, Any]], *, cut: int = 0) -> Trace:
    document = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events}
    text = json.dumps(document, separators=(",", ":")).encode()
    path = folder / "host.trace.json.gz"
    path.write_bytes(gzip.compress(text[: len(text) - cut]))
    trace = open_trace(path)
    trace.check()
    return trace


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def test_events_are_what_they_are_in_the_profile(tmp_path: Path) -> None:
    trace = opened(tmp_path, profile())

    assert rows(trace.annotations, "start_ns", "duration_ns", "name", "step")[0] == (0, 89_999, "train", 4)
    assert rows(trace.frames, "start_ns", "duration_ns", "line", "function") == [(999, 60_500, 12, "step")]
    assert rows(trace.operators, "start_ns", "duration_ns", "name") == [(1_999, 5_250, "PjitFunction(step)")]
    assert rows(trace.launches, "start_ns", "name", "kind", "correlation") == [(9_999, "hipLaunchKernel", "launch", 22)]
    assert rows(trace.device_work, "start_ns", "duration_ns", "name", "kind", "device", "scope") == [
        (4_999, 30_000, "fusion.1", "compute", "0", "jit(step)/mul"),
        (13_999, 4_500, "gemm", "compute", "1", None),
        (35_999, 9_000, "all-reduce.2", "communication", "0", None),
    ]
    assert rows(trace.device_work[1:2], "grid", "block", "registers", "occupancy", "launch") == [
        ("4,1,1", "512,1,1", 32, 0.5, 0)
    ]
    assert trace.device_work["call_stack"][0].startswith("train.py(14)")
    assert [device.device for device in trace.metadata.devices] == ["0", "1"]
    assert trace.metadata.format == "xla_json"
    assert [(warning.kind, warning.count) for warning in trace.warnings] == [("unknown_process", 1)]


def test_what_precedes_a_cut_is_read(tmp_path: Path) -> None:
    trace = opened(tmp_path, profile(), cut=60)

    assert trace.device_work.height == 3
    assert "truncated" in {warning.kind for warning in trace.warnings}


def test_arguments_of_any_kind_cost_no_event(tmp_path: Path) -> None:
    events = [
        *named(HOST, "/host:CPU", t5="python"),
        event(HOST, 5, 1.0, 1.0, "a", step_num="many", long_name="\ud800", size="5.37GB"),
        {**event(HOST, 5, 2.0, 1.0, "b"), "args": {"tf_op": ["x"], "run_id": 10**30, "f": 1.5, "n": None}},
        {**event(HOST, 5, 3.0, 1.0, "c"), "args": []},
        {**event(HOST, 5, 4.0, 1.0, "d"), "dur": -5},
        event(HOST, 5, -3.0, 1.0, "e"),
        event(HOST, 5, 1e30, 1.0, "f"),
    ]

    trace = opened(tmp_path, events)

    assert [name for name in trace.annotations["name"] if name in "abcd"] == ["a", "b", "c"]
    assert ("time_out_of_range", 2) in {(warning.kind, warning.count) for warning in trace.warnings}


def test_processes_of_xla_without_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotATraceError, match="without a single event"):
        opened(tmp_path, named(HOST, "/host:CPU", t5="python"))


def test_it_is_told_by_the_names_of_processes() -> None:
    assert recognises(json.dumps({"traceEvents": profile()}).encode())
    assert recognises(json.dumps(named(TPU, "/device:TPU:0")).encode())
    assert not recognises(json.dumps({"traceEvents": named(1, "python3")}).encode())
    assert not recognises(b'{"name": "/host:CPU"}')


PROGRAM = """
import sys
import jax, jax.numpy as jnp
step = jax.jit(lambda w, x: jnp.tanh(x @ w) @ w)
w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
step(w, x).block_until_ready()
jax.profiler.start_trace(sys.argv[1])
for index in range(3):
    with jax.profiler.StepTraceAnnotation("train", step_num=index):
        step(w, x).block_until_ready()
jax.profiler.stop_trace()
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="STEPSCOPE_JAX_PYTHON names no Python with JAX; scripts/test sets it")
def test_both_files_of_a_real_recording_say_the_same(tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([PYTHON, "-c", textwrap.dedent(PROGRAM), tmp_path], env=environment, check=True, capture_output=True)
    (profile_path,) = tmp_path.rglob("*.xplane.pb")
    (json_path,) = tmp_path.rglob("*.trace.json.gz")

    expected, found = open_trace(profile_path), open_trace(json_path)

    assert (expected.metadata.format, found.metadata.format) == ("xplane", "xla_json")
    assert found.annotations["step"].to_list() == [0, 1, 2]
    for table in ("operators", "launches", "frames", "annotations"):
        columns = [name for name in expected.table(table).columns if name not in ("call_stack", "scope", "lane")]
        assert found.table(table).select(columns).equals(expected.table(table).select(columns)), table
