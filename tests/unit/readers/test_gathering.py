"""Rows that a reader gathers in any order become sorted, nested and linked tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from stepscope.readers import assembly
from stepscope.readers.gathering import EXPLANATIONS, Gathering, warnings
from stepscope.trace.metadata import Metadata
from stepscope.trace.model import StoreWriter, Trace, open_unsealed
from stepscope.trace.naming import frame_name, host_slice_table
from stepscope.trace.window import StepRange, Window


def _gathered(directory: Path) -> Gathering:
    """Two steps; in the first an operator inside another launches a kernel, in the second there is nothing."""
    gathered = Gathering(directory)
    thread = gathered.lane("t", kind="host_thread", process="1", thread="2", name="main")
    queue = gathered.lane("q", kind="queue", process="0", thread="7", name="stream 7", device="0", queue="7")
    work = {"start_ns": [1_500], "duration_ns": [200], "name": ["gemm"], "lane": [queue], "correlation": [9]}
    gathered.add("device_work", pl.DataFrame({**work, "kind": ["compute"], "device": ["0"], "queue": ["7"]}))
    gathered.add(
        "operators",
        pl.DataFrame(
            {"start_ns": [1_200, 1_100], "duration_ns": [50, 300], "name": ["aten::mm", "aten::linear"], "lane": thread}
        ),
    )
    gathered.add(
        "launches",
        pl.DataFrame(
            {
                "start_ns": [1_210],
                "duration_ns": [10],
                "name": gathered.pool.codes(["cudaLaunchKernel"]),
                "lane": [thread],
                "correlation": [9],
            }
        ),
    )
    steps = {"start_ns": [1_000, 2_000], "duration_ns": [900, 900], "name": ["ProfilerStep#4", "ProfilerStep#5"]}
    gathered.add("annotations", pl.DataFrame({**steps, "lane": thread, "kind": "host"}))
    gathered.add("frames", pl.DataFrame({"start_ns": [1_050], "duration_ns": [500], "name": ["a.py(3): f"], "lane": 0}))
    return gathered


def _written(
    gathered: Gathering, directory: Path, window: Window | None = None, steps: StepRange | None = None
) -> Trace:
    writer = StoreWriter(directory)
    read = gathered.write(writer, window, steps)
    writer.finish(Metadata(window=read), ())
    trace = open_unsealed(directory)
    trace.check()
    return trace


def test_rows_are_sorted_nested_and_linked(tmp_path: Path) -> None:
    trace = _written(_gathered(tmp_path), tmp_path)
    assert trace.operators.select("start_ns", "name", "parent").rows() == [
        (100, "aten::linear", None),
        (200, "aten::mm", 0),
    ]
    assert trace.launches.select("start_ns", "kind", "operator").rows() == [(210, "launch", 1)]
    assert trace.device_work.select("start_ns", "launch", "device").rows() == [(500, 0, "0")]
    assert trace.annotations.select("start_ns", "step").rows() == [(0, 4), (1_000, 5)]
    assert trace.frames.select("file", "line", "function").rows() == [("a.py", 3, "f")]
    assert trace.lanes.select("lane", "kind", "device").rows() == [(0, "host_thread", None), (1, "queue", "0")]
    assert list(tmp_path.glob("spill-*")) == []


def test_many_rows_are_set_aside_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "MEMORY_BYTES", 10)
    aside, at_once = tmp_path / "aside", tmp_path / "at_once"
    aside.mkdir()
    at_once.mkdir()
    in_pieces = _written(_gathered(aside), aside)
    monkeypatch.undo()
    whole = _written(_gathered(at_once), at_once)
    for table in ("operators", "launches", "device_work", "annotations", "frames", "lanes"):
        assert in_pieces.table(table).equals(whole.table(table)), table


def test_what_the_file_tells_stands_before_what_a_name_tells(tmp_path: Path) -> None:
    gathered = Gathering(tmp_path)
    lane = gathered.lane(1, kind="host_thread", process="1", thread="1", name="main")
    rows = {"start_ns": [0, 5], "duration_ns": [3, 3], "name": ["cudaLaunchKernel", "Execute"], "lane": lane}
    gathered.add("launches", pl.DataFrame({**rows, "kind": [None, "launch"]}))
    gathered.add(
        "launches", pl.DataFrame({"start_ns": [9], "duration_ns": [1], "name": ["cudaMalloc"], "lane": [lane]})
    )
    gathered.add("annotations", pl.DataFrame({**rows, "kind": "host", "step": [None, 3]}))
    trace = _written(gathered, tmp_path)
    assert trace.launches["kind"].to_list() == ["launch", "launch", "allocate"]
    assert trace.annotations["step"].to_list() == [None, 3]


def test_a_window_or_steps_are_read_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    other.mkdir()
    trace = _written(_gathered(one), one, steps=StepRange(5, 5))
    assert trace.metadata.window == Window(1_000, 1_900)
    assert trace.operators.is_empty()
    trace = _written(_gathered(other), other, window=Window(0, 150))
    assert trace.operators["name"].to_list() == ["aten::linear"]


def test_impossible_times_are_counted_and_left_out(tmp_path: Path) -> None:
    gathered = Gathering(tmp_path)
    lane = gathered.lane(1, kind="host_thread", process="1", thread="1", name="main")
    times = {"start_ns": [5, 2**62, 7, 9], "duration_ns": [1, 1, -4, 2**62]}
    gathered.add("operators", pl.DataFrame({**times, "name": list("abcd"), "lane": lane}))
    assert gathered.damage == {"negative_duration": 1, "time_out_of_range": 2}
    trace = _written(gathered, tmp_path)
    assert trace.operators.select("name", "start_ns", "duration_ns").rows() == [("a", 0, 1), ("c", 2, 0)]
    told = warnings(gathered.damage, EXPLANATIONS)
    assert [(each.kind, each.count) for each in told] == [("negative_duration", 1), ("time_out_of_range", 2)]


def test_columns_that_are_worked_out_are_refused(tmp_path: Path) -> None:
    gathered = Gathering(tmp_path)
    with pytest.raises(ValueError, match="operators takes no columns parent"):
        gathered.add("operators", pl.DataFrame({"start_ns": [1], "parent": [0]}))


def test_of_many_details_the_most_frequent_are_told() -> None:
    damage = Counter({f"unknown:{number}": number + 1 for number in range(25)})
    told = warnings(damage, {"unknown": "{} is unknown"})
    assert len(told) == 21
    assert (told[0].count, told[0].detail) == (25, "24 is unknown")
    assert (told[-1].count, told[-1].detail) == (1 + 2 + 3 + 4 + 5, "and others is unknown")


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("ProfilerStep#3", "annotations"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "annotations"),
        ("Optimizer.step#AdamW.step", "annotations"),
        ("gloo:all_reduce", "annotations"),
        ("stepscope.logging#print", "annotations"),
        ("$train.py:12 step", "frames"),
        ("train.py(12): step", "frames"),
        ("nn.Module: Linear_0", "frames"),
        ("cudaLaunchKernel", "launches"),
        ("cuLaunchKernel", "launches"),
        ("hipMemcpyAsync", "launches"),
        ("hsa_signal_wait_scacquire", "launches"),
        ("aten::mm", "operators"),
        ("custom part", None),
        ("cudagraph warm-up", None),
    ],
)
def test_the_table_that_a_name_tells(name: str, table: str | None) -> None:
    assert host_slice_table(name) == table


def test_frames_have_one_form_of_name() -> None:
    assert frame_name("$train.py:12 step") == "train.py(12): step"
    assert frame_name("train.py(12): step") == "train.py(12): step"
