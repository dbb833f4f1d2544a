"""The Kineto reader on small traces written by hand, one for each trap of the format."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from stepscope.readers import open_trace
from stepscope.trace import TraceWarning
from tests.unit.small_traces import complete, counted, kernel, launch, opened, rows

# The document


def test_keys_after_the_events_are_read(tmp_path: Path) -> None:
    text = (
        '{"traceEvents": [{"ph":"X","name":"a","cat":"cpu_op","ts":1,"dur":2,"pid":1,"tid":1}], '
        '"with_stack": 1, "record_shapes": 0, "host_name": "here", "baseTimeNanoseconds": 1700000000000000000, '
        '"deviceProperties": [{"id": 3, "name": "A100", "totalGlobalMem": 80, "computeMajor": 8, "computeMinor": 0, '
        '"numSms": 108}], "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}, "traceName": "x.json"}'
    )
    metadata = opened(tmp_path, text).metadata
    assert (metadata.rank, metadata.world_size, metadata.backend, metadata.host) == (3, 8, "nccl", "here")
    assert metadata.recorded == ("stacks",)
    assert metadata.origin_unix_ns == 1_700_000_000_000_001_000
    device = metadata.devices[0]
    assert (device.device, device.name, device.memory_bytes) == ("3", "A100", 80)
    assert (device.compute_capability, device.multiprocessors) == ("8.0", 108)


def test_a_document_that_says_nothing_of_itself(tmp_path: Path) -> None:
    metadata = opened(tmp_path, [complete("a", "cpu_op", 1, 2)]).metadata
    assert (metadata.rank, metadata.recorded, metadata.devices, metadata.origin_unix_ns) == (None, None, (), None)


def test_a_bare_list_is_a_trace(tmp_path: Path) -> None:
    trace = opened(tmp_path, json.dumps([complete("a", "cpu_op", 1, 2), complete("b", "cpu_op", 3, 4)]))
    assert rows(trace, "operators", "name", "start_ns") == [("a", 0), ("b", 2000)]
    assert trace.warnings == ()


def test_a_legacy_export_has_no_categories(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "name": "mm", "ts": 10.5, "dur": 4, "tid": 1, "pid": "CPU functions", "args": {}},
        {"ph": "X", "name": "gemm", "ts": 12, "dur": 3, "tid": 1, "pid": "CUDA functions", "args": {}},
    ]
    trace = opened(tmp_path, json.dumps(events))
    assert rows(trace, "operators", "name", "start_ns", "duration_ns") == [("mm", 0, 4000)]
    assert rows(trace, "device_work", "name", "start_ns", "device") == [("gemm", 1500, "CUDA functions")]
    assert rows(trace, "lanes", "process", "kind") == [
        ("CPU functions", "host_thread"),
        ("CUDA functions", "queue"),
    ]
    assert trace.warnings == ()


@pytest.mark.parametrize("indent", [None, 0, 4])
@pytest.mark.parametrize("first", ["ph", "name", "args"])
def test_white_space_and_the_order_of_keys_mean_nothing(tmp_path: Path, indent: int | None, first: str) -> None:
    events = [launch(1, 5), kernel(9.25, 3, 5)]
    shuffled = [{first: event[first]} | dict(reversed(event.items())) for event in events]
    trace = opened(tmp_path, json.dumps({"traceEvents": shuffled}, indent=indent))
    assert rows(trace, "device_work", "start_ns", "duration_ns", "launch") == [(8250, 3000, 0)]
    assert trace.warnings == ()


@pytest.mark.parametrize("packing", ["gzip", "members", "padded", "zstd", "frames"])
def test_packed_files_are_known_by_their_content(tmp_path: Path, packing: str) -> None:
    text = json.dumps({"traceEvents": [complete("a", "cpu_op", 1, 2), complete("b", "cpu_op", 3, 4)]}).encode()
    halves = (text[:50], text[50:])
    content = {
        "gzip": gzip.compress(text),
        "members": b"".join(map(gzip.compress, halves)),
        "padded": gzip.compress(text) + b"\0" * 512,
        "zstd": zstandard.compress(text),
        "frames": b"".join(map(zstandard.compress, halves)),
    }[packing]
    path = tmp_path / "trace"
    path.write_bytes(content)
    trace = open_trace(path)
    assert trace.operators["name"].to_list() == ["a", "b"]
    assert trace.warnings == ()


def test_something_else_after_gzip_data_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(json.dumps([complete("a", "cpu_op", 1, 2)]).encode()) + b"something else")
    trace = open_trace(path)
    assert trace.operators["name"].to_list() == ["a"]
    assert counted(trace) == {"compressed_data": 1}


def test_standard_input_is_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(gzip.compress(json.dumps([complete("a", "cpu_op", 1, 2)]).encode()))

    monkeypatch.setattr(sys, "stdin", Input)
    trace = open_trace("-")
    assert trace.metadata.path == "standard input"
    assert trace.operators["name"].to_list() == ["a"]
    assert not Input.buffer.closed


def test_progress_counts_packed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps([complete("a", "cpu_op", 1, 2)]).encode()))
    seen: list[tuple[int, int | None]] = []
    open_trace(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(path.stat().st_size, path.stat().st_size)]


# Time


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("1", "2", 1000),
        ("0.001", "0.002", 1),
        ("4433118775816.956", "4433118775816.957", 1),
        ("1661203463029566", "1661203463029567", 1000),  # the epoch in whole microseconds
        ("1661203463029566.123", "1661203463029566.124", 1),  # with decimals: a double is off by up to 125 ns
        ("1661203463029566.001", "1661203463029566.999", 998),
        ("1661203463029566", "1661203463029566.001", 1),
        ("2199023255552.001", "2199023255552.002", 1),  # where doubles begin to be too coarse
        ("-5.5", "5.5", 11000),
        ("1.5e3", "15e2", 0),
    ],
)
def test_times_are_exact(tmp_path: Path, first: str, second: str, expected: int) -> None:
    event = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":2,"ts":%s,"dur":%s}'
    trace = opened(tmp_path, '{"traceEvents":[' + event % (first, "0.001") + "," + event % (second, "7.003") + "]}")
    assert sorted(trace.operators["start_ns"].to_list()) == [0, expected]
    assert sorted(trace.operators["duration_ns"].to_list()) == [1, 7003]


def test_the_wall_clock_of_times_since_1970(tmp_path: Path) -> None:
    text = '{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":2,"ts":1661203463029566.123,"dur":1}]}'
    assert opened(tmp_path, text).metadata.origin_unix_ns == 1_661_203_463_029_566_123


def test_the_wall_clock_of_times_since_a_base(tmp_path: Path) -> None:
    events = [complete("a", "cpu_op", 4433118775816.956, 1)]
    document = {"baseTimeNanoseconds": 1_790_857_026_000_000_000, "traceEvents": events}
    assert opened(tmp_path, document).metadata.origin_unix_ns == 1_795_290_144_775_816_956


def test_events_that_begin_after_later_ones_are_sorted_in(tmp_path: Path) -> None:
    events = [complete("c", "cpu_op", 9, 1), complete("inner", "cpu_op", 1, 2), complete("outer", "cpu_op", 1, 5)]
    trace = opened(tmp_path, events)
    assert rows(trace, "operators", "name", "start_ns", "parent") == [
        ("outer", 0, None),
        ("inner", 0, 0),
        ("c", 8000, None),
    ]


def test_times_that_cannot_be_are_skipped_and_counted(tmp_path: Path) -> None:
    events = [
        complete("good", "cpu_op", 1661203463029566, 5),
        complete("unset", "cpu_op", 0, 0),
        complete("negative", "cpu_op", 1661203463029567, -1),
        complete("without", "cpu_op", 1661203463029567, None),
        complete("far", "cpu_op", 10**30, 1),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "operators", "name", "duration_ns") == [("good", 5000), ("negative", 0)]
    assert (trace.metadata.events, trace.metadata.complete_events) == (5, 4)
    expected = {"event_without_time": 1, "negative_duration": 1, "incomplete_event": 1, "time_out_of_range": 1}
    assert counted(trace) == expected


# Where things happen


def test_one_queue_has_many_spellings(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": "stream 7", "args": {"name": "stream 7"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        kernel(1, 1) | {"args": {"device": 0, "stream": "7"}},
        kernel(3, 1) | {"tid": "stream 7", "args": {"device": 0, "stream": "stream 7"}},
        kernel(5, 1) | {"tid": "stream 7", "args": {}},
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "device_work", "device", "queue", "lane") == [("0", "7", 0)] * 3
    assert rows(trace, "lanes", "kind", "name", "device", "queue") == [("queue", "stream 7", "0", "7")]


def test_processes_and_threads_may_be_text(tmp_path: Path) -> None:
    events = [
        complete("PyTorch Profiler (0)", "Trace", 1, 9, pid="Spans", tid="PyTorch Profiler"),
        complete("a", "cpu_op", 2, 1, pid=5442, tid=5443),
        {"ph": "M", "name": "process_name", "pid": 5442, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 99},
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "annotations", "name", "kind") == [("PyTorch Profiler (0)", "profiler")]
    assert sorted(rows(trace, "lanes", "process", "thread", "kind", "process_name"), key=str) == [
        ("5442", "5443", "host_thread", "python"),
        ("Spans", "PyTorch Profiler", "other", None),
    ]


# Categories


def test_old_categories_are_capitalised_and_keep_annotations_among_the_operators(tmp_path: Path) -> None:
    events = [
        complete("ProfilerStep#3", "Operator", 1, 90),
        complete("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Operator", 2, 10),
        complete("Optimizer.step#SGD.step", "Operator", 60, 10),
        complete(
            "aten::mm",
            "Operator",
            20,
            10,
            args={"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "1"]},
        ),
        complete("cudaLaunchKernel", "Runtime", 22, 2, args={"correlation": 4, "external id": 7}),
        complete("gemm", "Kernel", 30, 5, pid=0, tid=7, args={"device": 0, "stream": 7, "correlation": 4}),
        complete("Memcpy HtoD", "Memcpy", 40, 5, pid=0, tid=7, args={"device": 0, "stream": 7, "bytes": "64"}),
        complete("Memset (Device)", "Memset", 50, 5, pid=0, tid=7, args={"device": 0, "stream": 7, "bytes": 8}),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "annotations", "name", "kind", "step") == [
        ("ProfilerStep#3", "host", 3),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "host", None),
        ("Optimizer.step#SGD.step", "host", None),
    ]
    assert rows(trace, "operators", "name", "input_shapes", "input_types", "input_values") == [
        ("aten::mm", "[[2, 3], []]", '["float", "Scalar"]', '["", "1"]')
    ]
    assert rows(trace, "launches", "kind", "external_id", "operator") == [("launch", 7, 0)]
    assert rows(trace, "device_work", "kind", "bytes", "launch") == [
        ("compute", None, 0),
        ("copy_in", 64, None),
        ("set", 8, None),
    ]
    assert trace.warnings == ()


def test_unknown_categories_are_kept_and_counted(tmp_path: Path) -> None:
    events = [complete("new", "quantum_op", 1, 2), complete("newer", "quantum_op", 4, 2), complete("a", "cpu_op", 1, 1)]
    trace = opened(tmp_path, events)
    assert rows(trace, "annotations", "name", "kind") == [("new", "host"), ("newer", "host")]
    detail = "events of an unknown category were kept as annotations: quantum_op"
    assert trace.warnings == (TraceWarning("unknown_category", 2, detail),)


def test_annotations_on_the_device_are_told_from_those_on_the_host(tmp_path: Path) -> None:
    events = [
        complete("ProfilerStep#7", "user_annotation", 1, 50),
        complete("ProfilerStep#7", "gpu_user_annotation", 9, 50, pid=0, tid=7),
        complete("Activity Buffer Request", "overhead", 3, 2, tid=0),
        kernel(10, 5),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "annotations", "kind", "step") == [("host", 7), ("overhead", None), ("device", 7)]


def test_other_accelerators_have_their_own_categories(tmp_path: Path) -> None:
    events = [
        complete("enqueue", "mtia_runtime", 1, 2, args={"correlation": 1}),
        complete("fc", "mtia_ccp_events", 5, 2, pid=4, tid=1, args={"correlation": 1}),
        complete("dma_out", "mtia_ccp_events", 9, 2, pid=4, tid=1, args={"correlation": 1}),
        complete("submit", "xpu_runtime", 20, 2),
        complete("launch", "privateuse1_runtime", 30, 2),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "device_work", "name", "kind", "device", "launch") == [
        ("fc", "compute", "4", 0),
        ("dma_out", "copy_on_device", "4", 0),
    ]
    assert trace.launches.height == 3
    assert trace.warnings == ()


def test_the_arguments_of_device_work(tmp_path: Path) -> None:
    usage = {"registers per thread": 90, "shared memory": 49152, "est. achieved occupancy %": 25, "blocks per SM": 0.5}
    shape = {"grid": [64, 1, 1], "block": "128,1,1"}
    group = {"Collective name": "allreduce", "Process Group Name": 0, "Group size": 8, "In msg nelems": 99}
    group |= {"Process Group Ranks": "[0, 1]", "Process Group Description": "mesh_tp", "Dst Rank": 1}
    events = [kernel(1, 2), kernel(5, 2)]
    events[0]["args"] |= usage | shape
    events[1] |= {"name": "ncclDevKernel_AllReduce"}
    events[1]["args"] |= group | {"dtype": "Float", "registers per thread": 2**40}
    trace = opened(tmp_path, events)
    columns = ("kind", "registers", "shared_memory_bytes", "occupancy", "blocks_per_multiprocessor", "grid", "block")
    assert rows(trace, "device_work", *columns) == [
        ("compute", 90, 49152, 0.25, 0.5, "[64, 1, 1]", '"128,1,1"'),
        ("communication", None, None, None, None, None, None),
    ]
    columns = ("collective", "group", "group_size", "message_elements", "message_type")
    assert rows(trace, "device_work", *columns)[1] == ("allreduce", "0", 8, 99, "Float")
    columns = ("group_ranks", "group_description", "source_rank", "target_rank")
    assert rows(trace, "device_work", *columns) == [(None, None, None, None), ("[0, 1]", "mesh_tp", None, 1)]


def test_memory_instants(tmp_path: Path) -> None:
    def instant(start: float, **args: Any) -> dict[str, Any]:
        place = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 2}
        return place | {"ts": start, "args": args}

    totals = {"Total Allocated": 100, "Total Reserved": 200}
    events = [
        complete("a", "cpu_op", 5, 5),
        instant(6.001, **{"Device Type": 1, "Device Id": 0, "Addr": 4096, "Bytes": 64}, **totals),
        instant(7, **{"Device Type": 0, "Device Id": -1, "Addr": 8, "Bytes": -64}),
        instant(4, **{"Device Type": 0, "Device Id": -1, "Addr": 8, "Bytes": 1}),
    ]
    trace = opened(tmp_path, events)
    columns = ("start_ns", "device", "address", "bytes", "total_allocated", "total_reserved")
    assert rows(trace, "memory", *columns) == [
        (0, "cpu", 8, 1, None, None),
        (1001, "0", 4096, 64, 100, 200),
        (2000, "cpu", 8, -64, None, None),
    ]
    assert counted(trace) == {"instant_before_start": 1}


def test_records_of_waits(tmp_path: Path) -> None:
    def wait(start: float, kind: str, **args: Any) -> dict[str, Any]:
        place = {"device": 0, "correlation": 3, "cuda_sync_kind": kind}
        return complete(kind, "cuda_sync", start, 2, pid=0, tid=args["stream"], args=place | args)

    events = [
        complete("a", "cpu_op", 0, 5),
        wait(1, "Stream Wait Event", stream=20, wait_on_stream=7, wait_on_cuda_event_record_corr_id=2),
        wait(2, "Context Sync", stream=-1),
        wait(3, "Event Sync", stream=4294967295, wait_on_cuda_event_record_corr_id=-1),
        wait(4, "Stream Sync", stream=7),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "synchronisations", "kind", "queue", "waited_queue", "waited_correlation") == [
        ("queue_wait", "20", "7", 2),
        ("device", None, None, None),
        ("event", None, None, None),
        ("queue", "7", None, None),
    ]


def test_python_frames_are_taken_apart(tmp_path: Path) -> None:
    events = [
        complete("train.py(137): <module>", "python_function", 1, 50, args={"Python id": 1, "Python parent id": None}),
        complete("nn.Module: Linear_0", "python_function", 2, 5, args={"Python id": 2, "Python parent id": 1}),
        complete("<built-in method zeros of type object>", "python_function", 9, 5, args={"Python id": 3}),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "frames", "file", "line", "function", "module", "parent", "python_id") == [
        ("train.py", 137, "<module>", None, None, 1),
        (None, None, None, "Linear_0", 0, 2),
        (None, None, "<built-in method zeros of type object>", None, 0, 3),
    ]
