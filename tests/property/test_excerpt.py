"""A window of a stored trace is what reading the file with that window gives, and only what it needs is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import NoStepMarksError, StepscopeError, UsageError
from stepscope.readers import assembly, open_trace
from stepscope.trace import Trace, TraceWarning, model
from stepscope.trace.cache import TraceCache
from stepscope.trace.metadata import Metadata
from stepscope.trace.model import StoreWriter
from stepscope.trace.tables import SCHEMAS, conform
from stepscope.trace.window import StepRange, Window
from tests.property.documents import small_pieces
from tests.simulator import Machine, kineto_bytes
from tests.simulator.strategies import programs
from tests.unit.small_traces import complete, flow, kernel

RECORDING = Path(__file__).parents[1] / "fixtures" / "gpt2_batched_loss_cpu.json.gz"


def tables_of(trace: Trace) -> dict[str, pl.DataFrame]:
    """The tables with the places of lanes instead of their numbers: lanes that begin after a window are not read."""
    places = trace.lanes.select("lane", "process", "thread", lane_device="device", lane_queue="queue")
    tables = {name: trace.table(name) for name in SCHEMAS if name != "lanes"}
    return {
        name: table.join(places, on="lane", how="left", maintain_order="left").drop("lane")
        if "lane" in table.columns
        else table
        for name, table in tables.items()
    }


def written(tmp_path: Path, events: list[dict[str, Any]]) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def outcome(path: Path, cache: TraceCache | None, **asked: Any) -> tuple[Any, ...]:
    try:
        trace = open_trace(path, cache=cache, **asked)
    except StepscopeError as error:
        return type(error), str(error)
    trace.check()
    return trace.metadata, trace.warnings, tables_of(trace)


def check_same(path: Path, cache: TraceCache, **asked: Any) -> None:
    direct, stored = outcome(path, None, **asked), outcome(path, cache, **asked)
    assert direct[:2] == stored[:2]
    if len(direct) == 3:
        assert [name for name in direct[2] if not direct[2][name].equals(stored[2][name])] == []


@st.composite
def windows(draw: st.DrawFn) -> Window:
    start = draw(st.integers(0, 400))
    return Window(start, start + draw(st.integers(1, 400)))


@settings(deadline=None, max_examples=20)
@given(machine=programs(), windows=st.lists(windows(), min_size=1, max_size=4), small=st.booleans())
def test_windows_of_any_program(
    tmp_path_factory: pytest.TempPathFactory, machine: Machine, windows: list[Window], small: bool
) -> None:
    folder = tmp_path_factory.mktemp("excerpt")
    path = folder / "trace.json"
    path.write_bytes(kineto_bytes(machine))
    with small_pieces(small):
        for window in windows:
            check_same(path, TraceCache(folder / "cache"), window=window)
        check_same(path, TraceCache(folder / "cache"), steps=StepRange(0, 1))


@pytest.mark.parametrize("steps", [StepRange(3, 4), StepRange(0, 2**62), StepRange(70, 80)])
def test_steps_of_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: StepRange) -> None:
    monkeypatch.setattr(assembly, "PART_ROWS", 300)
    check_same(RECORDING, TraceCache(tmp_path), steps=steps)


def test_only_the_parts_of_a_window_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "PART_ROWS", 200)
    cache = TraceCache(tmp_path)
    whole = open_trace(RECORDING, cache=cache)
    middle = int(whole.operators["start_ns"].to_numpy().mean())
    looked: list[str] = []
    checksum = model.checksum

    def noted(path: Path) -> str:
        looked.append(path.name)
        return checksum(path)

    monkeypatch.setattr(model, "checksum", noted)

    part = open_trace(RECORDING, cache=cache, window=Window(middle, middle + 100_000))

    parts = len(whole.parts("operators"))
    assert 0 < part.operators.height < whole.operators.height
    assert parts > 5
    assert sum(name.startswith("operators") for name in looked) < parts / 2


def test_a_damaged_part_is_noticed_where_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "PART_ROWS", 200)
    cache = TraceCache(tmp_path)
    end = int(open_trace(RECORDING, cache=cache).operators["start_ns"][-1])
    (entry,) = cache.entries()
    last = max(entry.directory.glob("operators-*"))
    last.write_bytes(last.read_bytes()[:-1] + b"?")

    check_same(RECORDING, cache, window=Window(0, 1_000))
    assert caplog.messages == []
    check_same(RECORDING, cache, window=Window(end - 1_000, end + 1))
    assert [message for message in caplog.messages if last.name in message]
    caplog.clear()
    check_same(RECORDING, cache, window=Window(end - 1_000, end + 1))
    assert caplog.messages == []


def test_a_trace_that_may_not_be_kept_has_windows_too(tmp_path: Path) -> None:
    check_same(RECORDING, TraceCache(tmp_path, limit_bytes=0), window=Window(0, 10**7))


def test_what_the_whole_trace_knows_stays_known(tmp_path: Path) -> None:
    # given: two works, each linked to its launch by a flow alone
    events = [
        complete("aten::mm", "cpu_op", 0, 30),
        *(complete("cudaLaunchKernel", "cuda_runtime", at, 2) for at in (10, 20)),
        *(flow("s", number, "ac2g", at) for number, at in ((1, 10), (2, 20))),
        *(kernel(at, 10, None) for at in (40, 60)),
        *(flow("f", number, "ac2g", at, tid=7, pid=0) for number, at in ((1, 40), (2, 60))),
    ]
    path = written(tmp_path, events)
    trace = open_trace(path, cache=TraceCache(tmp_path / "cache"), window=Window(15_000, 100_000))
    assert trace.launches["start_ns"].to_list() == [20_000]
    assert trace.device_work["launch"].to_list() == [None, 0]


def test_lines_and_modules_are_cut_at_the_edges(tmp_path: Path) -> None:
    rows = {"start_ns": [0, 5, 20], "duration_ns": [10, 15, 10], "name": ["a", "b", "c"], "lane": [0, 0, 0]}
    lanes = {"lane": [0], "kind": ["host_thread"]}

    def build(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        for table in ("lines", "modules"):
            writer.write_part(table, conform(table, pl.DataFrame(rows)))
        writer.write_part("lanes", conform("lanes", pl.DataFrame(lanes)))
        return Metadata(), ()

    TraceCache(tmp_path / "cache").add("0" * 64, build).save(tmp_path / "saved")
    for table in ("lines", "modules"):
        part = open_trace(tmp_path / "saved", window=Window(8, 20)).table(table)
        assert part.select("start_ns", "duration_ns", "name").rows() in (
            [(8, 12, "b"), (8, 2, "a")],
            [(8, 2, "a"), (8, 12, "b")],
        )


def test_steps_that_do_not_exist(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path / "cache")
    path = written(tmp_path, [complete("ProfilerStep#3", "user_annotation", 0, 5), complete("a", "cpu_op", 0, 1)])
    with pytest.raises(UsageError, match="it has steps 3 to 3"):
        open_trace(path, cache=cache, steps=StepRange(5, 6))
    path.write_text(path.read_text().replace("ProfilerStep#3", "anything"))
    with pytest.raises(NoStepMarksError):
        open_trace(path, cache=cache, steps=StepRange(3, 3))
