"""Round trip: what `export --format chrome` writes reads back to the same tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import polars as pl
import pytest
from hypothesis import Phase, given, settings

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers import open_trace
from stepscope.report.exports.chrome import chrome
from stepscope.report.exports.perfetto import perfetto
from stepscope.trace import Metadata, Trace, Window
from tests.property.random_tables import traces
from tests.property.same_trace import assert_same
from tests.simulator import Machine, write_kineto
from tests.simulator.programs import backward_thread
from tests.simulator.strategies import programs
from tests.unit.recording import Recording

TRACES = Path(os.environ.get("STEPSCOPE_TRACES", "/nonexistent")) / "kineto"
LARGEST_BYTES = 1_500_000
"""Larger ones take long and hold nothing else."""
PROPERTY = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Without making failures smaller, which takes minutes for whole traces."""
FILES = sorted(path for path in TRACES.rglob("*.json*") if path.stat().st_size < LARGEST_BYTES)


def read_back(trace: Trace, folder: Path) -> Trace:
    path = folder / "exported.json"
    path.write_bytes(b"".join(chrome(trace)))
    found = open_trace(path)
    found.check()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chrome")


def test_an_empty_trace(tmp_path: Path) -> None:
    empty = Trace.from_tables({}, Metadata(format="kineto"))

    assert_same(read_back(empty, tmp_path), empty)


@given(traces())
@settings(PROPERTY, max_examples=25)
def test_tables_of_anything_read_back_to_the_same(folder: Path, trace: Trace) -> None:
    assert_same(read_back(trace, folder), trace)


@given(programs())
@settings(PROPERTY, max_examples=10)
def test_simulated_machines_read_back_to_the_same(folder: Path, machine: Machine) -> None:
    try:
        trace = open_trace(write_kineto(machine, folder / "simulated.json"))
    except Exception as error:  # a program that did nothing leaves no trace
        assert "without a single event" in str(error)  # noqa: PT017
        return
    assert_same(read_back(trace, folder), trace)


@pytest.mark.traces
@pytest.mark.skipif(not FILES, reason="STEPSCOPE_TRACES names no folder of traces")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_traces_read_back_to_the_same(path: Path, tmp_path: Path) -> None:
    trace = open_trace(path)

    assert_same(read_back(trace, tmp_path), trace)


def test_a_part_of_an_exported_trace_is_that_part_of_the_trace(tmp_path: Path) -> None:
    trace = open_trace(write_kineto(backward_thread(), tmp_path / "simulated.json"))
    (tmp_path / "exported.json").write_bytes(b"".join(chrome(trace)))
    window = Window(1_000_000, 2_000_000)
    wanted, found = (open_trace(tmp_path / name, window=window) for name in ("simulated.json", "exported.json"))

    for table in ("operators", "launches", "device_work", "frames", "annotations"):
        assert found.table(table).equals(wanted.table(table)), table
    assert found.operators["parent"].drop_nulls().len() > 0
    assert found.operators.select(pl.col("start_ns").max()).item() < 2_000_000


@pytest.mark.parametrize("write", [chrome, perfetto])
def test_damage_in_a_file_of_our_own_is_told_or_refused(
    write: Callable[[Trace], Iterator[bytes]], folder: Path
) -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::linear", source_file="train.py", source_line=3)
    recording.operator(1, 5, "aten::mm", sequence_number=7)
    recording.link(0, 1)
    recording.line(0, 5, "train.py(3): main")
    recording.module(0, 4, "Model")
    recording.annotation(0, 12, "ProfilerStep#3", step=3)
    recording.launched(2, 4, 5, "gemm", 7)
    whole = b"".join(write(recording.trace()))
    numbers = Random(5)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(numbers.choice([1, 1, 3, 12])):
            place, length = numbers.randrange(len(data)), numbers.randrange(40)
            from_there = data[numbers.randrange(len(data)) :][:length]
            change = numbers.choice([bytes([numbers.randrange(256)]), b"", bytes(from_there)])
            data[place : place + (length if change == b"" else 1)] = change
        (folder / "damaged").write_bytes(data)
        with contextlib.suppress(NotATraceError, UnreadableTraceError):
            open_trace(folder / "damaged").check()
