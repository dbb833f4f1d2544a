"""Perfetto traces: track events of any tool, on any clock, in any order; damaged ones; and those of our own."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as Packets
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from stepscope.errors import NotATraceError, TooLargeError, UnreadableTraceError, UsageError
from stepscope.readers import open_trace, perfetto, source
from stepscope.readers import perfetto as messages
from stepscope.readers.perfetto import recognises
from stepscope.readers.perfetto.events import ANNOTATIONS, CATEGORIES, category
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS
from stepscope.trace.window import StepRange, Window

BEGIN, END, INSTANT, COUNTER = (
    TrackEvent.TYPE_SLICE_BEGIN,
    TrackEvent.TYPE_SLICE_END,
    TrackEvent.TYPE_INSTANT,
    TrackEvent.TYPE_COUNTER,
)
THREAD, STREAM = 11, 12


class Writer:
    """A file packet by packet."""

    def __init__(self) -> None:
        self.trace = Packets()

    def packet(self, sequence: int = 1, **fields: Any) -> TracePacket:
        return self.trace.packet.add(trusted_packet_sequence_id=sequence, **fields)

    def track(self, uuid: int, name: str = "", parent: int = 0, **parts: dict[str, Any]) -> None:
        descriptor = self.packet().track_descriptor
        descriptor.uuid = uuid
        if name:
            descriptor.name = name
        if parent:
            descriptor.parent_uuid = parent
        for part, fields in parts.items():
            for key, value in fields.items():
                setattr(getattr(descriptor, part), key, value)

    def event(
        self, phase: int, time: int, track: int | None = THREAD, name: str = "", word: str = "", **more: Any
    ) -> TrackEvent:
        packet = self.packet(timestamp=time)
        event = packet.track_event
        event.type = phase
        if track is not None:
            event.track_uuid = track
        if name:
            event.name = name
        if word:
            event.categories.append(word)
        annotate(event, more)
        return event

    def slice(self, begin: int, end: int, name: str, word: str = "", track: int = THREAD, **more: Any) -> TrackEvent:
        event = self.event(BEGIN, begin, track, name, word, **more)
        self.event(END, end, track)
        return event

    def bytes(self) -> bytes:
        return bytes(self.trace.SerializeToString())


def annotate(event: TrackEvent, values: dict[str, Any]) -> None:
    for key, value in values.items():
        annotation = event.debug_annotations.add(name=key.replace("__", " "))
        if isinstance(value, list):
            for each in value:
                annotation.array_values.add(int_value=each)
        elif isinstance(value, str):
            annotation.string_value = value
        elif isinstance(value, float):
            annotation.double_value = value
        else:
            annotation.int_value = value


def threads(writer: Writer) -> Writer:
    writer.track(10, process={"pid": 7, "process_name": "python3"})
    writer.track(THREAD, parent=10, thread={"pid": 7, "tid": 8, "thread_name": "main"})
    writer.track(9, "GPU 1")
    writer.track(STREAM, "stream 20", parent=9)
    return writer


def opened(folder: Path, data: bytes, **selection: Any) -> Trace:
    path = folder / "file"
    path.write_bytes(data)
    trace = open_trace(path, **selection)
    trace.check()
    return trace


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def kinds(trace: Trace) -> dict[str, int]:
    return {warning.kind: warning.count for warning in trace.warnings}


def training() -> Writer:
    """A step with an operator, its launch and its kernel, on tracks of a process and of a device."""
    writer = threads(Writer())
    writer.event(BEGIN, 1_000, name="ProfilerStep#3", word="user_annotation")
    writer.event(BEGIN, 1_100, name="aten::mm", word="cpu_op", Input__Dims="[[2, 3], [3, 4]]", Sequence__number=5)
    writer.slice(1_200, 1_250, "cudaLaunchKernel", "cuda_runtime", correlation=77)
    writer.event(END, 1_300)
    writer.event(END, 2_000)
    writer.slice(
        1_400, 1_900, "gemm", "kernel", STREAM, correlation=77, grid=[8, 1, 1], **{"est.__achieved__occupancy__%": 50}
    )
    return writer


# Other tools' files


def test_slices_with_the_words_of_the_pytorch_profiler(tmp_path: Path) -> None:
    trace = opened(tmp_path, training().bytes())

    assert rows(trace.annotations, "start_ns", "duration_ns", "name", "step") == [(0, 1_000, "ProfilerStep#3", 3)]
    assert rows(trace.operators, "start_ns", "duration_ns", "name", "input_shapes", "sequence_number") == [
        (100, 200, "aten::mm", "[[2, 3], [3, 4]]", 5)
    ]
    assert rows(trace.launches, "start_ns", "name", "kind", "correlation", "operator") == [
        (200, "cudaLaunchKernel", "launch", 77, 0)
    ]
    assert rows(
        trace.device_work, "start_ns", "duration_ns", "kind", "device", "queue", "grid", "occupancy", "launch"
    ) == [(400, 500, "compute", "1", "20", "[8, 1, 1]", 0.5, 0)]
    assert rows(trace.lanes, "kind", "process", "process_name", "thread", "name", "device", "queue") == [
        ("host_thread", "7", "python3", "8", "main", None, None),
        ("queue", "1", None, "20", "stream 20", "1", "20"),
    ]
    assert (trace.metadata.format, trace.metadata.events, trace.warnings) == ("perfetto", 4, ())


def test_names_are_numbers_of_a_sequence_until_its_state_is_cleared(tmp_path: Path) -> None:
    writer = threads(Writer())
    for sequence, name in ((1, "one"), (2, "two")):
        first = writer.packet(sequence, sequence_flags=1)
        first.interned_data.event_names.add(iid=1, name=name)
        first.interned_data.event_categories.add(iid=1, name="cpu_op")
        first.interned_data.debug_annotation_names.add(iid=1, name="Input Dims")
        first.interned_data.debug_annotation_string_values.add(iid=1, str=f"[{sequence}]".encode())
        first.trace_packet_defaults.track_event_defaults.track_uuid = THREAD
    for time, sequence, flags in ((100, 1, 2), (200, 2, 2), (300, 1, 1)):
        packet = writer.packet(sequence, timestamp=time, sequence_flags=flags)
        packet.track_event.type = BEGIN
        packet.track_event.name_iid = 1
        packet.track_event.category_iids.append(1)
        packet.track_event.track_uuid = THREAD
        packet.track_event.debug_annotations.add(name_iid=1, string_value_iid=1)
        writer.event(END, time + 10)

    trace = opened(tmp_path, writer.bytes())

    assert rows(trace.operators, "start_ns", "name", "input_shapes") == [(0, "one", "[1]"), (100, "two", "[2]")]
    assert kinds(trace) == {"lost_name": 1, "unknown_category": 1}


def test_times_are_put_on_one_clock(tmp_path: Path) -> None:
    """Sequence 5 counts from its last packet in steps of 10 ns, sequence 6 on another clock of the machine."""
    writer = threads(Writer())
    snapshot = writer.packet(5, sequence_flags=1).clock_snapshot
    snapshot.clocks.add(clock_id=6, timestamp=1_000_000)
    snapshot.clocks.add(clock_id=3, timestamp=400_000)
    snapshot.clocks.add(clock_id=1, timestamp=1_700_000_000_000_000_000)
    snapshot.clocks.add(clock_id=64, timestamp=500, is_incremental=True, unit_multiplier_ns=10)
    writer.packet(5).trace_packet_defaults.timestamp_clock_id = 64
    for time, kind, name in ((2, BEGIN, "a"), (3, BEGIN, "b"), (1, END, ""), (4, END, "")):
        event = writer.packet(5, timestamp=time).track_event
        event.type, event.track_uuid, event.name = kind, THREAD, name
    for time, kind in ((400_200, BEGIN), (400_300, END)):
        event = writer.packet(6, timestamp=time, timestamp_clock_id=3).track_event
        event.type, event.track_uuid, event.name = kind, STREAM, "c"

    trace = opened(tmp_path, writer.bytes())

    assert rows(trace.annotations, "start_ns", "duration_ns", "name") == [(0, 80, "a"), (30, 10, "b"), (180, 100, "c")]
    assert trace.metadata.origin_unix_ns == 1_700_000_000_000_000_020


def test_events_of_old_files_have_their_own_times_and_phases(tmp_path: Path) -> None:
    writer = Writer()
    thread = writer.packet(3, sequence_flags=1).thread_descriptor
    thread.pid, thread.tid, thread.thread_name, thread.reference_timestamp_us = 40, 41, "CrRendererMain", 5_000
    for delta, phase, name in ((100, "B", "a"), (10, "X", "b"), (50, "E", ""), (1, "n", "")):
        event = writer.packet(3).track_event
        event.timestamp_delta_us = delta
        event.legacy_event.phase = ord(phase)
        event.name = name
        if phase == "X":
            event.legacy_event.duration_us = 20

    trace = opened(tmp_path, writer.bytes())

    assert rows(trace.annotations, "start_ns", "duration_ns", "name") == [(0, 60_000, "a"), (10_000, 20_000, "b")]
    assert rows(trace.lanes, "kind", "process", "thread", "name") == [("host_thread", "40", "41", "CrRendererMain")]
    assert kinds(trace) == {"unknown_category": 2, "unknown_event": 1}


def test_counters_add_up_where_they_say_so(tmp_path: Path) -> None:
    writer = training()
    writer.track(30, "memory", counter={"unit_multiplier": 1024})
    writer.track(31, "allocations", counter={"is_incremental": True})
    for time, value in ((1_000, 5), (1_500, 3)):
        writer.event(COUNTER, time, 30).counter_value = value
        writer.event(COUNTER, time, 31).double_counter_value = value + 0.5

    counters = opened(tmp_path, writer.bytes()).counters

    assert rows(counters.sort("name", "start_ns"), "start_ns", "name", "value") == [
        (0, "allocations", 5.5),
        (500, "allocations", 9.0),
        (0, "memory", 5120.0),
        (500, "memory", 3072.0),
    ]


def test_flows_link_where_correlation_numbers_do_not(tmp_path: Path) -> None:
    writer = threads(Writer())
    writer.slice(100, 200, "aten::mm", "cpu_op").flow_ids.append(1)
    writer.slice(300, 350, "cudaLaunchKernel", "cuda_runtime").flow_ids.append(2)
    writer.slice(400, 500, "MmBackward0", "cpu_op").terminating_flow_ids.append(1)
    writer.slice(600, 700, "gemm", "kernel", STREAM).terminating_flow_ids.append(2)

    trace = opened(tmp_path, writer.bytes())

    assert trace.links.rows() == [("forward_backward", 0, 1)]
    assert trace.device_work["launch"].to_list() == [0]


def test_files_of_rocprofv3_have_their_own_words(tmp_path: Path) -> None:
    writer = Writer()
    writer.track(50, "THREAD 1 (99)")
    writer.track(51, "COMPUTE AGENT [2] STREAM [3] (GPU)")
    writer.slice(100, 150, "hipLaunchKernel", "hip_api", 50, corr_id=4, tid=99)
    writer.slice(100, 400, "aten::mm", "marker_api", 52, corr_id=5)
    writer.slice(200, 300, "gemm", "kernel_dispatch", 51, corr_id=4, queue=3, group_segment_size=64)
    writer.slice(300, 350, "MEMORY_COPY_HOST_TO_DEVICE", "memory_copy", 51, corr_id=6, copy_bytes=1024)

    trace = opened(tmp_path, writer.bytes())

    assert rows(trace.device_work, "name", "kind", "queue", "bytes", "shared_memory_bytes", "launch") == [
        ("gemm", "compute", "3", None, 64, 0),
        ("MEMORY_COPY_HOST_TO_DEVICE", "copy_in", "3", 1024, None, None),
    ]
    assert trace.operators["name"].to_list() == ["aten::mm"]
    assert trace.warnings == ()


def test_what_is_not_understood_is_counted(tmp_path: Path) -> None:
    writer = training()
    writer.slice(1_000, 1_001, "LayoutTree", "blink")
    writer.event(INSTANT, 1_200, name="mark")
    writer.event(END, 1_300, 99)
    writer.event(BEGIN, 1_300, 98, "open")
    writer.packet(timestamp=5).gpu_counter_event.gpu_id = 5
    writer.packet(timestamp=5).ftrace_events.cpu = 1

    trace = opened(tmp_path, writer.bytes())

    assert rows(trace.annotations, "name", "kind") == [("ProfilerStep#3", "host"), ("LayoutTree", "host")]
    assert kinds(trace) == {
        "unclosed_slice": 1,
        "unknown_category": 1,
        "unmatched_end": 1,
        "unused_instant": 1,
        "unused_packet": 1,
    }


def test_stages_of_graphics_work_are_device_work(tmp_path: Path) -> None:
    writer = Writer()
    specifications = writer.packet(sequence_flags=1).interned_data.gpu_specifications
    specifications.add(iid=1, name="compute queue")
    specifications.add(iid=2, name="Dispatch")
    for time, gpu, stage in ((100, 0, 2), (200, 1, 2), (300, 0, 77)):
        event = writer.packet(timestamp=time).gpu_render_stage_event
        event.duration, event.gpu_id, event.hw_queue_iid, event.stage_iid = 50, gpu, 1, stage

    trace = opened(tmp_path, writer.bytes())

    assert rows(trace.device_work, "start_ns", "duration_ns", "name", "kind", "device", "queue") == [
        (0, 50, "Dispatch", "compute", "0", "compute queue"),
        (100, 50, "Dispatch", "compute", "1", "compute queue"),
        (200, 50, "stage 77", "compute", "0", "compute queue"),
    ]


def test_packets_may_stand_in_any_order(tmp_path: Path) -> None:
    expected = opened(tmp_path, training().bytes())
    turned = Packets(packet=reversed(training().trace.packet))

    found = opened(tmp_path, turned.SerializeToString())

    for table in ("operators", "launches", "device_work", "annotations"):
        assert found.table(table).drop("lane").equals(expected.table(table).drop("lane")), table


@pytest.mark.parametrize("packed", ["zlib", "zstd", "gzip", "both"])
def test_packets_may_be_packed(tmp_path: Path, packed: str) -> None:
    data = training().bytes()
    writer = Writer()
    if packed in ("zlib", "both"):
        writer.packet().compressed_packets = zlib.compress(data)
    elif packed == "zstd":
        writer.packet().zstd_compressed_packets = zstandard.compress(data)
    data = data if packed == "gzip" else writer.bytes()

    trace = opened(tmp_path, gzip.compress(data) if packed in ("gzip", "both") else data)

    assert trace.metadata.events == 4
    assert trace.warnings == ()


@pytest.mark.parametrize("size", [64, 1001])
def test_the_file_comes_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", size)

    trace = opened(tmp_path, training().bytes())

    assert (trace.metadata.events, trace.warnings) == (4, ())


def test_a_part_of_the_file_is_read(tmp_path: Path) -> None:
    data = training().bytes()

    assert opened(tmp_path, data, window=Window(350, 360)).device_work.height == 0
    assert opened(tmp_path, data, steps=StepRange(3, 3)).device_work.height == 1
    with pytest.raises(UsageError, match="steps 3 to 3"):
        opened(tmp_path, data, steps=StepRange(4, 4))


# Damage


def test_what_precedes_a_cut_is_read(tmp_path: Path) -> None:
    data = training().bytes()
    kernel = data.index(b"gemm")

    trace = opened(tmp_path, data[: kernel + 2])

    assert (trace.annotations.height, trace.device_work.height) == (1, 0)
    assert kinds(trace) == {"truncated": 1}
    assert "compressed_data" in kinds(opened(tmp_path, gzip.compress(data)[:-20]))
    with pytest.raises(UnreadableTraceError, match="the file is truncated"):
        opened(tmp_path, data[: data.index(b"ProfilerStep")])


@pytest.mark.slow
def test_any_damage_ends_in_a_trace_or_a_sentence(tmp_path: Path) -> None:
    data = training().bytes()
    for place in range(0, len(data), 23):
        for change in (b"\x00", b"\xff", bytes([data[place] ^ 1])):
            try:
                opened(tmp_path, data[:place] + change + data[place + 1 :])
            except (NotATraceError, UnreadableTraceError):
                continue


def test_large_and_undecodable_packets_cost_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "LARGEST_PACKET_BYTES", 2_000)
    monkeypatch.setattr(source, "BLOCK_BYTES", 1_000)
    writer = training()
    writer.slice(5_000, 5_001, "x" * 5_000, "cpu_op")
    writer.packet().compressed_packets = b"no packed data"
    writer.slice(6_000, 6_001, "y", "cpu_op")
    broken = b"\x0a\x04\x5a\x7f\x08\x01"  # a track event that claims to be longer than its packet

    trace = opened(tmp_path, writer.bytes() + broken + training().bytes())

    assert kinds(trace)["oversized_packet"] == 1
    assert kinds(trace)["damaged_packet"] == 2
    assert "y" in trace.operators["name"].to_list()


def test_packed_packets_that_unpack_to_nothing_but_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "RATIO_FROM_BYTES", 2**22)
    writer = Writer()
    bomb = zlib.compress(Packets(packet=[TracePacket(timestamp=1)] * 2**20).SerializeToString(), 9)
    for _ in range(3):
        writer.packet().compressed_packets = bomb

    with pytest.raises(TooLargeError, match="150 times its packed size"):
        opened(tmp_path, writer.bytes())


@pytest.mark.slow
def test_a_packed_packet_is_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = []
    decoded = perfetto.Packets._decoded

    def noted(self: perfetto.Packets, text: bytes, trace: Any) -> Any:
        longest.append(len(text))
        return decoded(self, text, trace)

    monkeypatch.setattr(perfetto.Packets, "_decoded", noted)
    inner, huge = Writer(), Writer()
    inner.slice(5_000, 5_500, "packed", "cpu_op")
    huge.event(INSTANT, 5_000, name="x" * 2**22)
    others = Packets(packet=[TracePacket(timestamp=1)] * 2**20).SerializeToString()
    writer = training()
    writer.packet().compressed_packets = zlib.compress(b"\x0a\x00" * 2**23 + others + huge.bytes() + inner.bytes(), 9)

    trace = opened(tmp_path, writer.bytes())

    assert max(longest) < 2**19
    assert kinds(trace)["oversized_packet"] == 1
    assert trace.operators["name"].to_list() == ["aten::mm", "packed"]


def test_a_file_without_slices_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    writer = Writer()
    writer.packet(timestamp=5).ftrace_events.cpu = 1

    with pytest.raises(UnreadableTraceError, match=r"it contains events of the kernel \(ftrace\)"):
        opened(tmp_path, writer.bytes())


def test_it_is_told_from_other_protobuf_files_by_its_first_packet() -> None:
    assert recognises(training().bytes())
    assert not recognises(b"\x0a\x10\x08\x01\x12\x0c/device:TPU:")  # a plane of XLA's profiles
    assert not recognises(b"\x0a")
    assert not recognises(b'{"traceEvents": []}')


@pytest.mark.traces
def test_it_takes_no_profile_of_xla_for_its_own(traces_folder: Path) -> None:
    for path in (traces_folder / "xplane").glob("*.pb"):
        assert not recognises(path.read_bytes()[: 2**21]), path


def test_without_the_package_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(messages, "import_module", missing)

    with pytest.raises(UsageError, match=r"pip install --upgrade .stepscope\[perfetto\]. protobuf"):
        opened(tmp_path, training().bytes())


# Arguments


def column_values(table: str) -> dict[str, Any]:
    """A value for each column that an argument holds; kinds follow from categories and names."""
    found: dict[str, Any] = {}
    for number, column in enumerate(ANNOTATIONS[table]):
        dtype = SCHEMAS[table][column]
        text = "queue_wait" if column == "kind" else f"{column} of {table}"
        found[column] = text if dtype is pl.String else 0.1 * number if dtype is pl.Float64 else -number
    return found if table == "synchronisations" else {name: value for name, value in found.items() if name != "kind"}


def test_an_argument_is_named_for_every_column() -> None:
    left_out = {"start_ns", "duration_ns", "name", "lane", "parent", "operator", "launch"}
    for table in CATEGORIES:
        assert set(ANNOTATIONS[table]) == set(SCHEMAS[table]) - left_out, table


def test_every_column_is_read_from_its_argument(tmp_path: Path) -> None:
    tables = [table for table in ANNOTATIONS if table not in ("lines", "modules", "memory")]
    writer = Writer()
    for table in tables:
        arguments = {ANNOTATIONS[table][column]: value for column, value in column_values(table).items()}
        word = category(table, "set" if table == "device_work" else None)
        for row in range(2):
            writer.slice(1_000 * (row + 1), 1_000 * (row + 1) + 50, f"{table} {row}", word, 20, **arguments)
    memory = column_values("memory")
    annotate(
        writer.event(INSTANT, 1_500, 21, "[memory]", "cpu_instant_event"),
        {ANNOTATIONS["memory"][column]: value for column, value in memory.items()},
    )

    trace = opened(tmp_path, writer.bytes())

    for table in tables:
        expected = column_values(table)
        assert trace.table(table).select(list(expected)).rows(named=True) == [expected] * 2, table
        assert trace.table(table)["name"].to_list() == [f"{table} 0", f"{table} 1"]
        assert trace.table(table)["duration_ns"].to_list() == [50, 50], table
    assert trace.memory.select(list(memory)).rows(named=True) == [memory]
    assert trace.device_work["kind"].to_list() == ["set", "set"]


def test_tracks_below_a_threads_are_its_lane(tmp_path: Path) -> None:
    writer = Writer()
    writer.track(20, thread={"pid": 5, "tid": 6, "thread_name": "main"})
    writer.track(21, parent=20, name="operators")
    writer.track(22, parent=20, name="calls")
    writer.slice(0, 100, "aten::mm", "cpu_op", 21)
    writer.slice(10, 20, "cudaLaunchKernel", "cuda_runtime", 22)

    trace = opened(tmp_path, writer.bytes())

    assert trace.lanes.select("kind", "process", "thread", "name").rows() == [("host_thread", "5", "6", "main")]
    assert trace.launches["operator"].to_list() == [0]
