"""Memory snapshots of torch: read, compared with torch's own tools, and refused where they are something else."""

from __future__ import annotations

import collections
import gzip
import io
import json
import pickle
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.analysis.blocks import allocator_table, out_of_memory
from stepscope.analysis.memory import alive_at, alive_table, allocation_table, device_memories, memory_growth
from stepscope.diagnosis import diagnose
from stepscope.errors import NotATraceError, TooLargeError, UsageError
from stepscope.readers import open_trace
from stepscope.readers.plain_values import load
from stepscope.readers.source import Budget
from stepscope.trace import Trace, Window
from stepscope.trace.window import StepRange
from tests.simulator.allocator import KIB, SimulatedAllocator, training
from tests.unit.recording import Recording

MIB = 1 << 20


def opened(allocator: SimulatedAllocator, folder: Path) -> Trace:
    trace = open_trace(allocator.dump(folder / "snapshot.pickle"))
    trace.check()
    return trace


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back_as_they_were(protocol: int) -> None:
    value = {
        "numbers": [0, 1, 255, 256, 65_535, -1, -(2**31), 2**40, -(2**70), 2.5, True, False, None],
        "texts": ["", "é", "x" * 300, "\ud800"],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "nested": {"a": {"b": [[], {}, [[]]]}, 7: "seven", None: 0},
    }
    shared = [value["texts"]] * 3

    assert load(pickle.dumps([value, shared], protocol=protocol), "file") == [value, shared]


def test_bytes_come_back_as_they_were() -> None:
    assert load(pickle.dumps([b"", b"abc", b"x" * 300]), "file") == [b"", b"abc", b"x" * 300]


class Evil:
    """Unpickled freely, it would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not be printed",)


def nested(depth: int) -> list[Any]:
    outermost: list[Any] = []
    inner = outermost
    for _ in range(depth):
        inner.append([])
        inner = inner[0]
    return outermost


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Evil(), protocol=2), "objects of Python classes, which could run code: not read"),
        (pickle.dumps(Evil(), protocol=4), "objects of Python classes"),
        (pickle.dumps(collections.OrderedDict(a=1)), "objects of Python classes"),
        (pickle.dumps({1, 2}, protocol=4), "has an operation that memory snapshots do not use"),
        (pickle.dumps({(1, 2): 3}), "has keys that are neither texts nor numbers"),
        (pickle.dumps(10**100), "a number of more than 16 bytes"),
        (pickle.dumps([1, 2, 3])[:-3], "is damaged or cut off"),
        (b"\x80\x04]}a}s.", "is damaged or cut off"),
        (b"\x80\x04K\x01K\x02a.", "is damaged or cut off"),
        (b"\x80\x04h\x05.", "is damaged or cut off"),
        (b"\x80\x04X\xff\xff\xff\x7fabc", "is cut off"),
        (b"\x80\x04.", "is damaged or cut off"),
        (b"\x80\x04](K\x01u.", "sets items of something that is not a dictionary"),
        (b"\x80\x04}(K\x01u.", "is damaged: a key without a value"),
    ],
)
def test_everything_else_is_refused(data: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotATraceError) as raised:
        load(data, "file")

    assert str(raised.value).startswith("file is a Python pickle that ")
    assert message in str(raised.value)
    assert capsys.readouterr().out == ""


def test_a_memo_with_a_large_number_takes_no_memory() -> None:
    assert load(b"\x80\x04]r\xff\xff\xff\x7f.", "file") == []


def test_a_value_that_holds_itself_is_read() -> None:
    value: list[Any] = []
    value.append(value)

    found = load(pickle.dumps(value), "file")

    assert isinstance(found, list)
    assert found[0] is found


def test_containers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_LIMITS", "values=120,depth=1000")
    Budget.of("file")

    assert load(pickle.dumps([[]] * 100), "file") == [[]] * 100  # one list, a hundred times
    for bomb in (b"N" + b"\x85" * 121, b"(l" * 121, b"(t" * 121, b"(d" * 121, b"N\x94" + b"\x94" * 121, b"(" * 1001):
        Budget.of("file")
        with pytest.raises(TooLargeError, match=r"--limit (values|depth)="):
            load(b"\x80\x04" + bomb + b".", "file")


def test_containers_of_json_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_LIMITS", "values=10")
    (tmp_path / "file.json").write_text('{"segments": [' + "[]," * 9 + "{}]}")

    with pytest.raises(TooLargeError, match="--limit values=20"):
        open_trace(tmp_path / "file.json")


@pytest.mark.slow
def test_damage_is_refused_with_a_sentence_or_read(tmp_path: Path) -> None:
    whole = pickle.dumps(training().snapshot())
    chance = random.Random(1)
    told = []
    for number in range(300):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(2, len(data))] = chance.randrange(256)
        if number % 3 == 0:
            del data[chance.randrange(2, len(data)) :]
        path = tmp_path / "damaged.pickle"
        path.write_bytes(data)
        try:
            open_trace(path).check()
        except NotATraceError as error:
            told.append(str(error))
    assert len(told) > 50
    assert all(sentence.startswith(f"{tmp_path / 'damaged.pickle'} is ") for sentence in told)


def test_levels_follow_the_allocator(tmp_path: Path) -> None:
    trace = opened(training(), tmp_path)

    memory = trace.memory.select("start_ns", "bytes", "total_allocated", "total_reserved").rows()
    assert memory[:4] == [
        (2_000, 400 * KIB, 400 * KIB, 2 * MIB),
        (3_000, 300 * KIB + 100, 700 * KIB + 100, 2 * MIB),
        (4_000, 300 * KIB + 100, 1000 * KIB + 200, 2 * MIB),
        (5_000, 50 * KIB, 1050 * KIB + 200, 2 * MIB),
    ]
    assert memory[-1][2:] == (1500 * KIB, 4 * MIB)
    assert trace.launches.select("start_ns", "name", "kind", "bytes").rows() == [
        (1_000, "segment_alloc", "allocate", 2 * MIB),
        (13_000, "segment_alloc", "allocate", 2 * MIB),
    ]
    assert trace.metadata.format == "torch_snapshot"
    assert trace.metadata.origin_unix_ns == 1_700_000_000_000_000_000
    assert trace.metadata.recorded == ("memory", "stacks")
    assert trace.warnings == ()


def test_what_was_there_before_the_history_stands_at_its_beginning(tmp_path: Path) -> None:
    trace = opened(training(history_from_step=2), tmp_path)

    before = trace.memory.filter(pl.col("start_ns") == 0)
    assert before["bytes"].to_list() == [400 * KIB, 100 * KIB, 100 * KIB, 800 * KIB]
    assert before["total_allocated"].to_list() == [400 * KIB, 500 * KIB, 600 * KIB, 1400 * KIB]
    [memory] = device_memories(trace)
    assert dict(alive_table(memory).select("category", "bytes").iter_rows())["before"] == 1400 * KIB
    [whole] = device_memories(opened(training(), tmp_path))
    assert memory.peak_bytes == whole.peak_bytes


def test_a_block_that_another_stream_still_uses_is_held(tmp_path: Path) -> None:
    allocator = SimulatedAllocator()
    allocator.free(allocator.allocate(1000), wait=True)

    assert opened(allocator, tmp_path).memory["total_allocated"].to_list() == [1000]


def test_segments_that_were_given_back(tmp_path: Path) -> None:
    allocator = SimulatedAllocator()
    allocator.free(allocator.allocate(MIB))
    allocator.empty_cache()
    kept = allocator.allocate(KIB)
    trace = opened(allocator, tmp_path)

    assert kept
    assert trace.memory["total_reserved"].to_list() == [2 * MIB, 2 * MIB, 2 * MIB]
    assert allocator_table(trace).select("name", "calls", "bytes").rows() == [
        ("segment_alloc", 2, 4 * MIB),
        ("segment_free", 1, 2 * MIB),
    ]


def test_categories_and_lines_at_the_peak(tmp_path: Path) -> None:
    [memory] = device_memories(opened(training(), tmp_path))

    assert memory.peak_bytes == (400 + 800 + 2 * 100 + 2 * 300 + 50 + 400) * KIB + 200
    assert alive_table(memory).select("category", "bytes").rows() == [
        ("optimizer_state", 800 * KIB),
        ("activation", 600 * KIB + 200),
        ("temporary", 450 * KIB),
        ("parameter", 400 * KIB),
        ("unknown", 200 * KIB),
    ]
    assert alive_table(memory, "line").select("file", "line", "function", "bytes").rows() == [
        ("train.py", 11, "main", 800 * KIB),
        ("model.py", 20, "forward", 600 * KIB + 200),
        ("train.py", 10, "main", 450 * KIB),
        ("model.py", 12, "__init__", 400 * KIB),
        ("evaluate.py", 3, "collect", 200 * KIB),
    ]


def test_memory_that_could_not_be_had_is_diagnosed(tmp_path: Path) -> None:
    trace = opened(training(60, capacity=6 * MIB), tmp_path)

    assert out_of_memory(trace).select("device", "asked_bytes", "free_bytes", "file", "line").rows() == [
        ("0", 400 * KIB, 0, "train.py", 10)
    ]
    first = diagnose(trace).findings[0]
    assert first.rule == "memory-near-limit"
    assert first.title == "device 0 ran out of memory: 400.0 KiB were asked for while 5.5 MiB were held"
    assert [(place.file, place.line) for place in first.where] == [
        ("train.py", 10),
        ("evaluate.py", 3),
        ("train.py", 11),
    ]


@pytest.mark.parametrize(
    "make", [training, lambda: training(history_from_step=2), lambda: training(60, capacity=6 * MIB)]
)
def test_torchs_own_reader_finds_the_same(make: Any, tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    allocator = make()
    trace = opened(allocator, tmp_path)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    [memory] = device_memories(trace)
    at_end = memory.levels.row(-1, named=True)

    summary = dict(line.split(": ") for line in viz.segsum(snapshot).splitlines() if line.startswith("total_"))
    assert summary["total_allocated"] == str(viz.Bytes(at_end["allocated_bytes"]))
    assert summary["total_reserved"] == str(viz.Bytes(at_end["reserved_bytes"]))
    theirs: Counter[int] = Counter()
    for line in viz.memory(snapshot, format_flamegraph=str).splitlines():
        if ";active_allocated;" in line and "<gaps>" not in line:
            theirs[int(line.rpartition(" ")[2])] += 1
    ours = alive_at(memory, memory.levels.height - 1)["bytes"]
    assert Counter(ours.to_list()) == theirs
    entries = viz.trace(snapshot)
    assert entries.count("cudaMalloc(") == trace.launches.filter(pl.col("name") == "segment_alloc").height
    assert entries.count("OutOfMemoryError") == out_of_memory(trace).height


def test_a_snapshot_that_torch_made_of_a_profile(tmp_path: Path) -> None:
    """Torch turns a profile of any device into a snapshot; it has no times, and no memory of an allocator."""
    torch = pytest.importorskip("torch")
    viz = pytest.importorskip("torch.cuda._memory_viz")
    model = torch.nn.Linear(64, 64)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
    ) as profiler:
        model(torch.ones(16, 64)).sum().backward()
    snapshot = viz._profile_to_snapshot(profiler)
    path = tmp_path / "profile.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    trace = open_trace(path)
    trace.check()

    entries = [entry for events in snapshot["device_traces"] for entry in events]
    allocations = [entry["size"] for entry in entries if entry["action"] == "alloc"]
    found = trace.memory.filter((pl.col("bytes") > 0) & (pl.col("start_ns") > 0))
    assert found["bytes"].to_list() == allocations
    at_end = sum(
        block["size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    assert trace.memory["total_allocated"][-1] == at_end


def test_json_and_packed_files_and_lists_of_segments(tmp_path: Path) -> None:
    allocator = training()
    expected = opened(allocator, tmp_path).memory
    snapshot = allocator.snapshot()
    (tmp_path / "snapshot.json").write_text(json.dumps(snapshot))
    with gzip.open(tmp_path / "snapshot.pickle.gz", "wb") as file:
        pickle.dump(snapshot, file)

    assert open_trace(tmp_path / "snapshot.json").memory.equals(expected)
    assert open_trace(tmp_path / "snapshot.pickle.gz").memory.equals(expected)
    (tmp_path / "segments.pickle").write_bytes(pickle.dumps(snapshot["segments"]))
    totals = open_trace(tmp_path / "segments.pickle").memory["total_allocated"].to_list()
    assert totals == [400 * KIB, 500 * KIB, 600 * KIB, 700 * KIB, 1500 * KIB]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "is a memory snapshot without a single allocation"),
        ("text", "is a value of Python, but not a memory snapshot"),
        ({"model": {}}, "is a dictionary of Python, but not a memory snapshot: it has neither 'segments' nor"),
        ({"segments": 3}, "its 'segments' or 'device_traces' is not a list"),
        ({"segments": [], "device_traces": [[], 7, None]}, "is a memory snapshot without a single allocation"),
        ({"segments": [], "device_traces": [[]] * 1025}, "is not a memory snapshot: it lists 1,025 devices"),
        (
            {"device_traces": [[{"action": "free_completed", "addr": 1, "size": 2**49}] * 5_000]},
            "is not a memory snapshot: it lists more memory than can exist",
        ),
        ({"segments": [{"device": 0, "total_size": 2**49}] * 5_000}, "more memory than can exist"),
    ],
)
def test_plain_pickles_that_are_no_snapshot(value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps(value))

    with pytest.raises(NotATraceError) as raised:
        open_trace(path)

    assert message in str(raised.value)


def test_odd_events_are_counted(tmp_path: Path) -> None:
    good = {"action": "alloc", "addr": 2**64 - 1, "size": 8, "frames": [{"filename": 3}, 4], "time_us": True}
    odd = [
        {},
        7,
        {"action": ["alloc"], "addr": 1, "size": 1},
        {"action": "alloc", "addr": "x", "size": 1},
        {"action": "alloc", "addr": 1, "size": -1},
    ]
    strange = {"action": "teleport", "addr": 1, "size": 1}
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[good, *odd, strange]], "segments": [None, {"blocks": [None]}]}))
    trace = open_trace(path)
    trace.check()

    assert [(warning.kind, warning.count) for warning in trace.warnings] == [("damaged_event", 5), ("unknown_event", 1)]
    assert trace.memory.select("start_ns", "address", "bytes", "call_stack").rows() == [(1_000, 2**63 - 1, 8, None)]
    assert trace.metadata.origin_unix_ns is None


def test_one_list_of_events_named_many_times_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_LIMITS", "rows=50")
    events = [{"action": "alloc", "addr": 1, "size": 1}] * 20
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [events] * 3}))

    with pytest.raises(TooLargeError, match="--limit rows=100"):
        open_trace(path)


def test_a_window_of_a_snapshot_keeps_its_levels(tmp_path: Path) -> None:
    path = training().dump(tmp_path / "snapshot.pickle")
    whole = open_trace(path).memory

    part = open_trace(path, window=Window(5_000, 9_000)).memory

    assert part.equals(whole.filter(pl.col("start_ns").is_between(5_000, 9_000, closed="left")))
    with pytest.raises(UsageError, match="is a memory snapshot, which has no steps"):
        open_trace(path, steps=StepRange(1, 2))


def test_a_snapshot_can_come_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = training().dump(tmp_path / "snapshot.pickle").read_bytes()

    class Input:
        buffer = io.BytesIO(data)

    monkeypatch.setattr("sys.stdin", Input())

    assert open_trace("-").memory.height == 29


def annotated() -> dict[str, Any]:
    """Three steps, each with a nested range; a range that does not end; a compiled region; damaged entries."""
    allocator = training(steps=3)
    content = allocator.snapshot()
    times = [event["time_us"] for event in allocator.history]
    bounds = [times[0], times[len(times) // 3], times[2 * len(times) // 3], times[-1]]
    entries: list[Any] = [None, {"name": 7}, {"name": "late", "stage": "END", "device": 0, "time_us": times[-1]}]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        for name, stage, time_us in (
            (f"ProfilerStep#{number}", "START", begin),
            ("forward", "START", begin + 1),
            ("forward", "END", begin + 3),
            (f"ProfilerStep#{number}", "END", end),
        ):
            entries.append({"name": name, "stage": stage, "device": 0, "time_us": time_us})
    entries.append({"name": "open", "stage": "START", "device": 0, "time_us": times[-4]})
    for event in allocator.history[5:8]:
        event["compile_context"] = "0/1"
    allocator.history[-1]["compile_context"] = "\ud800"
    return {**content, "external_annotations": entries}


def test_what_the_program_annotated_gives_steps_and_regions(tmp_path: Path) -> None:
    path = tmp_path / "file.pickle"
    content = annotated()
    path.write_bytes(pickle.dumps(content))

    trace = open_trace(path)
    trace.check()
    host = trace.annotations.filter(pl.col("kind") == "host")
    [memory] = device_memories(trace)
    regions = allocation_table(memory, "region")

    assert host.filter(pl.col("step").is_not_null()).select("name", "step").rows() == [
        (f"ProfilerStep#{number}", number) for number in range(3)
    ]
    assert host.filter(pl.col("name") == "forward")["duration_ns"].to_list() == [2_000] * 3
    assert host.filter(pl.col("name") == "open").height == 1
    assert host.filter(pl.col("name") == "late").is_empty()
    assert host.filter(pl.col("name") == "torch.compile: 0/1").height == 1
    assert {"forward", "torch.compile: 0/1", "ProfilerStep#1"} <= set(regions["region"])
    assert regions["allocated_bytes"].sum() == allocation_table(memory, "category")["allocated_bytes"].sum()
    assert memory_growth(memory) is not None


def test_totals_that_contradict_each_other_are_not_used() -> None:
    recording = Recording()
    recording.block(10, 20, 2 << 30, device="0")
    recording.block(15, 30, 100 << 20, device="0")
    trace = recording.trace()
    tables = {"memory": trace.memory.with_columns(total_allocated=pl.lit(2 << 30), total_reserved=pl.lit(250 << 20))}

    [memory] = device_memories(Trace.from_tables(tables, trace.metadata))

    assert memory.contradiction == (2 << 30, 250 << 20)
    assert (memory.is_total, memory.reserved_bytes, memory.fragmentation_bytes) == (False, None, None)
    assert memory.peak_bytes == (2 << 30) + (100 << 20)
