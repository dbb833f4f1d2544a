"""Round trip: what `export --format perfetto` writes reads back to the same tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from stepscope.readers import open_trace
from stepscope.report.exports.perfetto import perfetto
from stepscope.trace import Metadata, Trace, Window
from tests.property.random_tables import traces
from tests.property.same_trace import assert_same
from tests.simulator import Machine, write_kineto
from tests.simulator.programs import backward_thread
from tests.simulator.strategies import programs
from tests.unit.recording import Recording

TRACES = Path(os.environ.get("STEPSCOPE_TRACES", "/nonexistent")) / "kineto"
LARGEST_BYTES = 300_000
"""Larger ones take long and hold nothing else."""
PROPERTY = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Without making failures smaller, which takes minutes for whole traces."""
FILES = sorted(path for path in TRACES.rglob("*.json*") if path.stat().st_size < LARGEST_BYTES)


def read_back(trace: Trace, folder: Path) -> Trace:
    path = folder / "exported.pftrace"
    path.write_bytes(b"".join(perfetto(trace)))
    found = open_trace(path)
    found.check()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("perfetto")


def test_an_empty_trace(tmp_path: Path) -> None:
    empty = Trace.from_tables({}, Metadata(format="kineto"))

    assert_same(read_back(empty, tmp_path), empty)


@given(traces(plain=True))
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
    (tmp_path / "exported.pftrace").write_bytes(b"".join(perfetto(trace)))
    window = Window(1_000_000, 2_000_000)
    wanted, found = (open_trace(tmp_path / name, window=window) for name in ("simulated.json", "exported.pftrace"))

    for table in ("operators", "launches", "device_work", "frames", "annotations"):
        assert found.table(table).equals(wanted.table(table)), table
    assert found.operators["parent"].drop_nulls().len() > 0


def test_perfettos_own_definitions_read_it(tmp_path: Path) -> None:
    """Slices are properly nested on each track, and text is written once."""
    trace_pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    recording = Recording(unit_ns=1000)
    recording.operator(0, 10, "aten::mm", sequence_number=7, input_shapes="[[2, 3]]")
    recording.operator(2, 3, "aten::mm", sequence_number=7)
    recording.frame(5, 10, "train.py(12): step")
    recording.frame(10, 10, "train.py(13): overlapping")

    packets = trace_pb2.Trace.FromString(b"".join(perfetto(recording.trace()))).packet

    events = [packet for packet in packets if packet.HasField("track_event")][1:]
    assert [(packet.timestamp, packet.track_event.type, packet.track_event.track_uuid) for packet in events] == [
        (0, 1, 3),
        (10_000, 2, 3),
        (2_000, 1, 3),
        (5_000, 2, 3),
        (5_000, 1, 4),
        (15_000, 2, 4),
        (10_000, 1, 5),
        (20_000, 2, 5),
    ]
    names = {packet.interned_data.event_names[0].name for packet in packets if packet.interned_data.event_names}
    assert names == {"stepscope.trace", "aten::mm", "train.py(12): step", "train.py(13): overlapping"}
    tracks = [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]
    assert [(track.uuid, track.parent_uuid, track.name) for track in tracks] == [
        (1, 0, "stepscope"),
        (6, 0, ""),
        (2, 6, "thread 1"),
        (3, 2, "operators"),
        (4, 2, "frames"),
        (5, 2, "frames 2"),
    ]
    assert tracks[1].process.pid == 1
