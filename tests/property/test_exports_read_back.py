"""What `export` writes for other viewers is an ordinary trace, which says the same of the device's time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
from hypothesis import Phase, given, settings
from polars.testing import assert_frame_equal

from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import idle_time
from stepscope.analysis.steps import step_table
from stepscope.errors import UnreadableTraceError
from stepscope.readers import open_trace
from stepscope.report.exports.chrome import chrome
from stepscope.report.exports.protobuf import perfetto, xspace
from stepscope.trace import Metadata, Trace, Window
from tests.property.random_tables import traces
from tests.simulator import Machine, write_kineto
from tests.simulator.programs import PROGRAMS, backward_thread
from tests.simulator.serving_faults import SERVING_FAULTS
from tests.simulator.strategies import programs
from tests.tries import tries
from tests.unit.recording import Recording

Write = Callable[[Trace], Iterator[bytes]]
FORMATS = pytest.mark.parametrize("write", [chrome, perfetto])
TRACES = Path(os.environ.get("STEPSCOPE_TRACES", "/nonexistent"))
LARGEST_BYTES = 300_000
"""Larger ones take long and hold nothing else."""
PROPERTY = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Without making failures smaller, which takes minutes for whole traces."""
FILES = sorted(
    path
    for folder in ("kineto", "xplane", "nsys")
    for path in (TRACES / folder).rglob("*")
    if path.suffix in (".gz", ".json", ".pb", ".sqlite") and path.stat().st_size < LARGEST_BYTES
)


def read_back(write: Write, trace: Trace, folder: Path, window: Window | None = None) -> Trace:
    path = folder / f"exported.{write.__name__}"
    path.write_bytes(b"".join(write(trace)))
    found = open_trace(path, window=window)
    found.check()
    return found


def causes(trace: Trace) -> pl.DataFrame:
    """Idle nanoseconds of each device by their cause."""
    return idle_time(trace).group_by("device", "cause").agg(pl.col("duration_ns").sum()).sort("device", "cause")


def assert_same_figures(found: Trace, wanted: Trace) -> None:
    """The same busy, idle and exposed time of each device, and the same idle time by cause."""
    assert_frame_equal(device_time(found), device_time(wanted), check_row_order=False)
    assert_frame_equal(causes(found), causes(wanted))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@FORMATS
def test_an_empty_trace_is_refused_like_any_other_without_events(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="without a single"):
        read_back(write, Trace.from_tables({}, Metadata(format="kineto")), tmp_path)


@FORMATS
@given(trace=traces(plain=True))
@settings(PROPERTY, max_examples=tries(10))
def test_tables_of_anything_make_a_trace_that_holds(write: Write, folder: Path, trace: Trace) -> None:
    try:
        found = read_back(write, trace, folder)
    except UnreadableTraceError as error:
        assert "without a single" in str(error)  # noqa: PT017
        return
    for table in ("operators", "launches", "device_work", "frames", "synchronisations", "memory"):
        assert found.table(table).height <= trace.table(table).height, table


@FORMATS
@given(machine=programs())
@settings(PROPERTY, max_examples=tries(4))
def test_simulated_machines_have_the_same_figures(write: Write, folder: Path, machine: Machine) -> None:
    try:
        trace = open_trace(write_kineto(machine, folder / "simulated.json"))
    except UnreadableTraceError as error:  # a program that did nothing leaves no trace
        assert "without a single event" in str(error)  # noqa: PT017
        return
    assert_same_figures(read_back(write, trace, folder), trace)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_realistic_programs_have_the_same_figures(name: str, tmp_path: Path) -> None:
    trace = open_trace(write_kineto(PROGRAMS[name](), tmp_path / "simulated.json"))

    for write in (chrome, perfetto):
        assert_same_figures(read_back(write, trace, tmp_path), trace)
    if name not in SERVING_FAULTS:  # what reads it knows no engines
        found, columns = read_back(xspace, trace, tmp_path), ["device", "start_ns", "duration_ns", "cause", "trigger"]
        assert_frame_equal(idle_time(found)[columns], idle_time(trace)[columns])
        assert_frame_equal(step_table(found), step_table(trace))


@pytest.mark.traces
@pytest.mark.skipif(not FILES, reason="STEPSCOPE_TRACES names no folder of traces")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_traces_have_the_same_busy_time(path: Path, tmp_path: Path) -> None:
    trace = open_trace(path)

    for write in (chrome, perfetto):
        found = read_back(write, trace, tmp_path)

        columns = ["device", "window_ns", "busy_ns", "idle_ns"]
        assert_frame_equal(device_time(found)[columns], device_time(trace)[columns], check_row_order=False)


@FORMATS
def test_a_part_of_an_export_is_that_part_of_the_trace(write: Write, tmp_path: Path) -> None:
    path = write_kineto(backward_thread(), tmp_path / "simulated.json")
    window = Window(1_000_000, 2_000_000)

    found, wanted = read_back(write, open_trace(path), tmp_path, window), open_trace(path, window=window)

    for table in ("operators", "launches", "device_work", "annotations"):
        told = wanted.table(table).drop("lane")
        assert_frame_equal(found.table(table).drop("lane"), told, check_row_order=table != "annotations")
    assert found.operators["parent"].drop_nulls().len() > 0


def test_perfettos_own_definitions_read_it() -> None:
    """Slices are properly nested on each track, and text is written once."""
    trace_pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    recording = Recording(unit_ns=1000)
    recording.operator(0, 10, "aten::mm", sequence_number=7, input_shapes="[[2, 3]]")
    recording.operator(2, 3, "aten::mm", sequence_number=7)
    recording.frame(5, 10, "train.py(12): step")
    recording.frame(10, 10, "train.py(13): overlapping")

    packets = trace_pb2.Trace.FromString(b"".join(perfetto(recording.trace()))).packet

    events = [packet for packet in packets if packet.HasField("track_event")]
    assert [(packet.timestamp, packet.track_event.type, packet.track_event.track_uuid) for packet in events] == [
        (0, 1, 2),
        (10_000, 2, 2),
        (2_000, 1, 2),
        (5_000, 2, 2),
        (5_000, 1, 3),
        (15_000, 2, 3),
        (10_000, 1, 4),
        (20_000, 2, 4),
    ]
    names = {packet.interned_data.event_names[0].name for packet in packets if packet.interned_data.event_names}
    assert names == {"aten::mm", "train.py(12): step", "train.py(13): overlapping"}
    tracks = [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]
    assert [(track.uuid, track.parent_uuid, track.name) for track in tracks] == [
        (5, 0, ""),
        (1, 5, "thread 1"),
        (2, 1, "operators"),
        (3, 1, "frames"),
        (4, 1, "frames 2"),
    ]
    assert (tracks[0].process.pid, tracks[1].thread.tid) == (1, 1)
