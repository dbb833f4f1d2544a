"""rocprofv3's JSON: what becomes of its records, whatever the file is cut into, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.errors import NotATraceError, UnreadableTraceError, UsageError
from stepscope.readers import open_trace, source
from stepscope.readers import rocprof as reader
from stepscope.readers.rocprof import recognises, records
from stepscope.readers.rocprof.records import Document
from stepscope.trace import Trace
from stepscope.trace.window import StepRange, Window

GPU, OTHER_GPU, CPU = 7_046_029_254_386_353_131, 11, 12
BOOT = 5_000_000_000_000


def correlation(number: int) -> dict[str, int]:
    return {"internal": number, "external": 0, "ancestor": 0}


def record(kind: int, operation: int, start: int, end: int, number: int, **more: Any) -> dict[str, Any]:
    return {
        "size": 72,
        "kind": kind,
        "operation": operation,
        "correlation_id": correlation(number),
        "start_timestamp": BOOT + start,
        "end_timestamp": BOOT + end,
        "thread_id": 101,
        **more,
    }


def kernel(start: int, end: int, number: int, kernel_id: int = 1, agent: int = GPU, **more: Any) -> dict[str, Any]:
    info = {
        "size": 80,
        "agent_id": {"handle": agent},
        "queue_id": {"handle": 2},
        "kernel_id": kernel_id,
        "dispatch_id": number,
        "private_segment_size": 0,
        "group_segment_size": 4096,
        "workgroup_size": {"x": 256, "y": 1, "z": 1},
        "grid_size": {"x": 65_600, "y": 2, "z": 1},
    }
    more = {"stream_id": {"handle": 3}, **more}
    return record(2, 0, start, end, number, dispatch_info=info, **more)


def copy(operation: int, start: int, end: int, number: int, source: int, target: int) -> dict[str, Any]:
    agents = {"dst_agent_id": {"handle": target}, "src_agent_id": {"handle": source}}
    return record(3, operation, start, end, number, **agents, bytes=1 << 20, stream_id={"handle": 3})


def symbol(number: int, name: str) -> dict[str, Any]:
    return {
        "size": 80,
        "kernel_id": number,
        "kernel_name": f"{name}.kd",
        "arch_vgpr_count": 64,
        "formatted_kernel_name": name,
        "demangled_kernel_name": f"{name}.kd",
        "truncated_kernel_name": name,
    }


def agent(handle: int, kind: int, node: int, **more: Any) -> dict[str, Any]:
    return {"size": 312, "id": {"handle": handle}, "type": kind, "node_id": node, **more}


def process() -> dict[str, Any]:
    """Two steps of a program: a copy to the device, an operator with a kernel, a collective, a copy back."""
    instinct = {
        "name": "gfx942",
        "product_name": "AMD Instinct MI300X",
        "cu_count": 304,
        "gfx_target_version": 90402,
        "mem_banks": [{"heap_type": 1, "size_in_bytes": 192 << 30}, {"heap_type": 0, "size_in_bytes": 5}],
    }
    ranges = ["ProfilerStep#1", "ProfilerStep#2", "aten::mm, seq = 3, sizes = [[2, 3], [3, 4]]", 'my "part" \\']
    return {
        "metadata": {"pid": 100, "init_time": BOOT, "fini_time": BOOT + 10_000, "command": ["python3", "--secret"]},
        "agents": [
            agent(CPU, 1, 0, name="AMD EPYC"),
            agent(OTHER_GPU, 2, 2, **instinct),
            agent(GPU, 2, 1, **instinct),
        ],
        "counters": [{"name": "SQ_WAVES", "description": 'a [ in ] a { string } \\"'}],
        "strings": {
            "callback_records": [{"kind": "NONE", "operations": []}],
            "buffer_records": [
                {
                    "kind": "HIP_RUNTIME_API",
                    "operations": [
                        "hipLaunchKernel",
                        "hipMemcpyAsync",
                        "hipStreamSynchronize",
                    ],
                },
                {"kind": "MARKER_CORE_RANGE_API", "operations": ["roctxMarkA", "roctxThreadRangeA"]},
                {"kind": "KERNEL_DISPATCH", "operations": ["KERNEL_DISPATCH_COMPLETE"]},
                {"kind": "MEMORY_COPY", "operations": ["HOST_TO_DEVICE", "DEVICE_TO_HOST", "HOST_TO_HOST"]},
                {
                    "kind": "HSA_AMD_EXT_API",
                    "operations": [
                        "hsa_amd_memory_async_copy_on_engine",
                        "hsa_signal_wait_relaxed",
                    ],
                },
                {"kind": "RCCL_API", "operations": ["ncclAllReduce"]},
            ],
            "marker_api": [{"key": 50 + number, "value": text} for number, text in enumerate(ranges)],
        },
        "code_objects": [],
        "kernel_symbols": [
            symbol(0, ""),
            symbol(1, "Cijk_gemm"),
            symbol(2, "ncclDevKernel_Generic"),
            symbol(3, "__amd_rocclr_fillBufferAligned"),
        ],
        "host_functions": [],
        "summary": [],
        "callback_records": {"counter_collection": []},
        "buffer_records": {
            "kernel_dispatch": [
                kernel(1_500, 2_500, 2),
                kernel(2_600, 2_900, 4, 2, OTHER_GPU),
                kernel(3_000, 3_010, 5, 3),
            ],
            "hip_api": [
                record(0, 1, 200, 300, 1),
                record(0, 0, 600, 650, 2),
                record(0, 2, 3_100, 3_200, 6),
            ],
            "hsa_api": [record(4, 0, 210, 290, 7), record(4, 1, 3_110, 3_190, 8)],
            "marker_api": [
                record(1, 1, 100, 3_500, 50),
                record(1, 1, 3_600, 4_000, 51),
                record(1, 1, 500, 900, 52),
                record(1, 1, 3_700, 3_800, 53),
                record(1, 0, 3_700, 3_700, 99),
            ],
            "rccl_api": [record(5, 0, 950, 990, 4)],
            "memory_copy": [
                copy(0, 1_000, 1_400, 1, CPU, GPU),
                copy(1, 3_210, 3_300, 6, GPU, CPU),
                copy(2, 5, 6, 9, CPU, CPU),
            ],
            "memory_allocation": [{"address": "0x0000000000000010"}],
            "scratch_memory": [],
            "pc_sample_host_trap": [],
        },
    }


def text_of(*processes: dict[str, Any], **style: Any) -> bytes:
    """As the tool's archive writes it: a line for each value, nothing indented."""
    return json.dumps({"rocprofiler-sdk-tool": list(processes)}, **(style or {"indent": 0})).encode()


def opened(folder: Path, data: bytes, **selection: Any) -> Trace:
    path = folder / "results"
    path.write_bytes(data)
    trace = open_trace(path, **selection)
    trace.check()
    return trace


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def test_work_of_the_devices_with_what_launched_it(tmp_path: Path) -> None:
    trace = opened(tmp_path, text_of(process()))

    assert rows(trace.device_work, "start_ns", "duration_ns", "name", "kind", "device", "queue", "launch") == [
        (900, 400, "HOST_TO_DEVICE", "copy_in", "0", "3", 0),
        (1_400, 1_000, "Cijk_gemm", "compute", "0", "3", 2),
        (2_500, 300, "ncclDevKernel_Generic", "communication", "1", "3", None),
        (2_900, 10, "__amd_rocclr_fillBufferAligned", "set", "0", "3", None),
        (3_110, 90, "DEVICE_TO_HOST", "copy_out", "0", "3", 3),
    ]
    assert rows(trace.device_work[1:2], "grid", "block", "registers", "shared_memory_bytes", "correlation") == [
        ("[257, 2, 1]", "[256, 1, 1]", 64, 4096, 2)
    ]
    assert trace.device_work["bytes"].to_list() == [1 << 20, None, None, None, 1 << 20]
    assert [warning.kind for warning in trace.warnings] == ["copy_on_host"]


def test_calls_ranges_and_lanes_of_the_host(tmp_path: Path) -> None:
    trace = opened(tmp_path, text_of(process()))

    assert rows(trace.launches, "start_ns", "duration_ns", "name", "kind", "operator") == [
        (100, 100, "hipMemcpyAsync", "copy", None),
        (110, 80, "hsa_amd_memory_async_copy_on_engine", "copy", None),
        (500, 50, "hipLaunchKernel", "launch", 0),
        (3_000, 100, "hipStreamSynchronize", "synchronise", None),
        (3_010, 80, "hsa_signal_wait_relaxed", "synchronise", None),
    ]
    assert rows(trace.operators, "start_ns", "duration_ns", "name", "sequence_number", "input_shapes") == [
        (400, 400, "aten::mm", 3, "[[2, 3], [3, 4]]"),
        (850, 40, "ncclAllReduce", None, None),
    ]
    assert rows(trace.annotations, "start_ns", "duration_ns", "name", "kind", "step") == [
        (0, 3_400, "ProfilerStep#1", "host", 1),
        (3_500, 400, "ProfilerStep#2", "host", 2),
        (3_600, 100, 'my "part" \\', "host", None),
    ]
    assert rows(trace.lanes, "kind", "process", "thread", "name", "device", "queue") == [
        ("queue", "0", "3", "stream 3", "0", "3"),
        ("queue", "1", "3", "stream 3", "1", "3"),
        ("host_thread", "100", "101", "thread 101", None, None),
    ]


def test_what_the_file_says_of_itself(tmp_path: Path) -> None:
    metadata = opened(tmp_path, text_of(process())).metadata

    assert (metadata.format, metadata.events, metadata.recorded, metadata.origin_unix_ns) == ("rocprof", 15, None, None)
    found = [
        (each.device, each.name, each.memory_bytes, each.compute_capability, each.multiprocessors)
        for each in metadata.devices
    ]
    assert found == [(number, "AMD Instinct MI300X", 192 << 30, "9.4", 304) for number in ("0", "1")]


@pytest.mark.parametrize("style", [{"indent": 0}, {"indent": 4}, {"separators": (",", ":")}, {"ensure_ascii": False}])
@pytest.mark.parametrize("size", [64, 997])
def test_the_file_may_be_cut_and_spaced_anyhow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: dict[str, Any], size: int
) -> None:
    expected = opened(tmp_path, text_of(process()))
    monkeypatch.setattr(source, "BLOCK_BYTES", size)
    monkeypatch.setattr(records, "PIECE_BYTES", size)

    found = opened(tmp_path, text_of(process(), **style))

    for table in ("device_work", "launches", "operators", "annotations", "lanes"):
        assert found.table(table).equals(expected.table(table)), table
    assert found.metadata.events == expected.metadata.events


class Blocks:
    """A text in blocks of some bytes, as a source gives it."""

    def __init__(self, text: bytes, size: int) -> None:
        self.text, self.size = text, size

    def blocks(self) -> Iterator[bytes]:
        for begin in range(0, len(self.text), self.size):
            yield self.text[begin : begin + self.size]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 10_000])
def test_parts_of_a_document_are_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 1)
    value = {
        "a": [1, {"b": ["[", "\\", '\\"', {}]}, [], "},{"],
        "skipped": [{"a": [5]}],
        "c": {"d": [[[]], "]"], "e": 7},
    }
    text = json.dumps(value).encode()
    wanted = {(): "enter", ("a",): "pieces", ("c",): "enter", ("c", "d"): "whole"}

    found = Document(Blocks(text, size), lambda path: wanted.get(path, "skip"))  # type: ignore[arg-type, return-value]
    parts: dict[tuple[str, ...], list[Any]] = {}
    for path, part in found.parts():
        parts.setdefault(path, []).extend(json.loads(b"[%b]" % part))

    assert parts == {("a",): value["a"], ("c", "d"): [[[[]], "]"]]}
    assert found.closed


def test_processes_have_their_own_threads_and_names(tmp_path: Path) -> None:
    other = deepcopy(process())
    other["metadata"]["pid"] = 200
    other["kernel_symbols"][1]["formatted_kernel_name"] = "of the other"

    trace = opened(tmp_path, text_of(process(), other))

    assert trace.lanes.filter(pl.col("kind") == "host_thread")["process"].to_list() == ["100", "200"]
    assert trace.device_work["name"].to_list()[2:4] == ["Cijk_gemm", "of the other"]
    assert trace.device_work.height == 10


def test_files_of_older_tools_without_streams_have_queues(tmp_path: Path) -> None:
    older = process()
    for key in ("kernel_dispatch", "memory_copy"):
        for each in older["buffer_records"][key]:
            del each["stream_id"]

    trace = opened(tmp_path, text_of(older))

    assert trace.device_work["queue"].to_list() == ["copies", "queue 2", "queue 2", "queue 2", "copies"]


def test_a_part_of_the_file_is_read(tmp_path: Path) -> None:
    data = text_of(process())

    assert opened(tmp_path, data, window=Window(3_450, 5_000)).annotations["name"].to_list() == [
        "ProfilerStep#2",
        'my "part" \\',
    ]
    assert opened(tmp_path, data, steps=StepRange(1, 1)).device_work.height == 5
    with pytest.raises(UsageError, match="steps 1 to 2"):
        opened(tmp_path, data, steps=StepRange(7, 8))


def test_what_precedes_a_cut_is_read(tmp_path: Path) -> None:
    data = text_of(process())
    cut = data.index(b'"rccl_api"')

    trace = opened(tmp_path, data[:cut])

    assert (trace.device_work.height, trace.launches.height, trace.annotations.height) == (3, 5, 3)
    assert "truncated" in {warning.kind for warning in trace.warnings}
    packed = opened(tmp_path, gzip.compress(data)[:-200])
    assert {"truncated", "compressed_data"} <= {warning.kind for warning in packed.warnings}


def test_a_damaged_record_costs_no_other(tmp_path: Path) -> None:
    damaged = process()
    damaged["buffer_records"]["hip_api"][0]["start_timestamp"] = "soon"
    damaged["buffer_records"]["hip_api"][1]["correlation_id"] = None
    damaged["buffer_records"]["kernel_dispatch"][0]["dispatch_info"]["kernel_id"] = 77
    damaged["buffer_records"]["memory_copy"][0]["operation"] = 77
    damaged["kernel_symbols"].append({"kernel_id": "seven"})

    trace = opened(tmp_path, text_of(damaged))

    assert trace.launches["name"].to_list().count("hipStreamSynchronize") == 1
    assert {"kernel 77", "operation 3.77"} < set(trace.device_work["name"])
    assert {warning.kind: warning.count for warning in trace.warnings} == {
        "copy_on_host": 1,
        "damaged_description": 1,
        "damaged_record": 2,
        "unnamed_kernel": 1,
        "unnamed_operation": 1,
    }


@pytest.mark.slow
def test_any_flipped_byte_ends_in_a_trace_or_a_sentence(tmp_path: Path) -> None:
    data = text_of(process())
    for place in range(0, len(data), 797):
        for byte in b'"\\}[,\xff':
            damaged = data[:place] + bytes([byte]) + data[place + 1 :]
            try:
                opened(tmp_path, damaged)
            except (NotATraceError, UnreadableTraceError):
                continue


def test_a_profile_without_a_record_is_refused_with_what_to_record(tmp_path: Path) -> None:
    empty = process()
    empty["buffer_records"] = {key: [] for key in empty["buffer_records"]}

    with pytest.raises(UnreadableTraceError, match="--runtime-trace --output-format json"):
        opened(tmp_path, text_of(empty))
    for data in (b'{"rocprofiler-sdk-tool": []}', b'{"rocprofiler-sdk-tool": [', b'{"rocprofiler-sdk-tool": 5}'):
        with pytest.raises(UnreadableTraceError):
            opened(tmp_path, data)


def test_what_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    monkeypatch.setattr(records, "LARGEST_VALUE_BYTES", 20_000)
    large = process()
    large["buffer_records"]["hip_api"].insert(1, {"args": "x" * 50_000, **record(0, 0, 600, 650, 2)})

    trace = opened(tmp_path, text_of(large))

    assert trace.launches.height == 5
    assert {warning.kind: warning.count for warning in trace.warnings}["oversized_value"] == 1


@pytest.mark.parametrize("where", ["agents", "strings"])
def test_descriptions_of_millions_of_nothings_are_left_out(where: str, tmp_path: Path) -> None:
    written = text_of(process(), separators=(",", ":"))
    key = {"agents": b'"agents":', "strings": b'"buffer_records":'}[where]
    before, behind = written.split(key, 1)

    trace = opened(tmp_path, before + key + b"[" + b"{}," * 2_000_000 + b"{}]" + b',"ignored":' + behind)

    assert {warning.kind: warning.count for warning in trace.warnings}["oversized_value"] == 1
    assert trace.launches.height == opened(tmp_path, written).launches.height


def test_a_file_of_more_processes_than_any_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_SMALL_PARTS", 40)

    with pytest.raises(NotATraceError, match="more than 40 short lists"):
        opened(tmp_path, text_of(*[process()] * 20))


def test_the_elements_of_a_long_piece_are_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'{"a": [1, 2]}, "b, \\"c", [], 3'
    for size in range(1, len(text) + 1):
        monkeypatch.setattr(records, "PIECE_BYTES", size)
        assert list(records.elements(text)) == [b'{"a": [1, 2]}', b' "b, \\"c"', b" []", b" 3"]


def test_it_is_told_by_its_content() -> None:
    assert recognises(text_of(process()))
    assert recognises(b'\xef\xbb\xbf\n{ "rocprofiler-sdk-tool" : [')
    assert not recognises(b'{"traceEvents": [{"name": "rocprofiler-sdk-tool"}]}')
