"""`export --format tensorboard`: an XSpace, decoded by the wire format; test_exports_read_back.py reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.commands import main
from stepscope.report.exports.protobuf import xspace
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.protobuf_fields import double, fixed64, message, varint, whole
from tests.unit.recording import Recording


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Number and value of each field of a message."""
    found = []
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = number()
        if key & 7 == 2:
            size = number()
            found.append((key >> 3, data[position : position + size]))
            position += size
        else:
            found.append((key >> 3, number()))
    return found


def names(plane: list[tuple[int, Any]], field: int) -> dict[int, str]:
    entries = [dict(fields(value)) for number, value in plane if number == field]
    return {entry[1]: dict(fields(entry[2]))[2].decode() for entry in entries}


def test_numbers_on_the_wire() -> None:
    assert [varint(number) for number in (0, 127, 128, 300, 2**63 - 1)] == [
        b"\x00",
        b"\x7f",
        b"\x80\x01",
        b"\xac\x02",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    ]
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert whole(1, 150) == b"\x08\x96\x01"
    assert message(2, b"testing") == b"\x12\x07testing"
    assert double(5, 1.0) == b"\x29\0\0\0\0\0\0\xf0\x3f"
    assert fixed64(47, 1) == b"\xf9\x02\x01\0\0\0\0\0\0\0"


def test_an_empty_trace_is_a_host_without_lines() -> None:
    planes = [dict(fields(value)) for number, value in fields(b"".join(xspace(Trace.from_tables({})))) if number == 1]

    assert [plane[2] for plane in planes] == [b"/host:CPU", b"Task Environment"]


def test_planes_lines_and_events() -> None:
    device = Device("0", "Some GPU", 2**36, "9.0", 132)
    recording = Recording(Metadata(origin_unix_ns=10**18, host="node7", devices=(device,)))
    recording.annotation(0, 50, "ProfilerStep#3", step=3)
    recording.launch(5, 2, 7)
    recording.work(10, 20, "gemm", correlation=7, grid="[4, 1, 1]", block="[128, 1, 1]", registers=32, occupancy=0.5)

    space = fields(b"".join(xspace(recording.trace())))

    gpu, host, environment = (fields(value) for number, value in space if number == 1)
    assert dict(gpu)[2] == b"/device:GPU:0"
    (line,) = (fields(value) for number, value in gpu if number == 3)
    assert dict(line) == {1: 7, 2: b"Stream #7(Kernel)", 11: b"Stream #7(Kernel)", 4: dict(line)[4]}
    event = fields(dict(line)[4])
    assert [names(gpu, 4)[dict(event)[1]], dict(event)[2], dict(event)[3]] == ["gemm", 10_000, 20_000]
    stats = [dict(fields(value)) for number, value in event if number == 4]
    words = names(gpu, 5)
    details = "regs:32 static_shared:0 dynamic_shared:0 grid:4,1,1 block:128,1,1 occ_pct:50"
    assert {words[stat[1]]: stat.get(4, words.get(stat.get(7, 0))) for stat in stats} == {
        "correlation_id": 7,
        "kernel_details": details,
    }
    (thread,) = (fields(value) for number, value in host if number == 3)
    step = fields(next(value for number, value in thread if number == 4))
    words = names(host, 5)
    assert {words[stat[1]]: stat[4] for number, value in step if number == 4 for stat in [dict(fields(value))]} == {
        "step_num": 3,
        "_r": 1,
    }
    words = names(environment, 5)
    ends = [dict(fields(value)) for number, value in environment if number == 6]
    assert {words[stat[1]]: stat[4] for stat in ends} == {
        "profile_start_time": 10**18,
        "profile_stop_time": 10**18 + 50,
    }
    assert space[-1] == (4, b"node7")


def test_a_log_folder_takes_several_runs(tmp_path: Path) -> None:
    text = '[{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]'
    logs = tmp_path / "logs"
    for name in ("first.json", "second run.pt.trace.json"):
        (tmp_path / name).write_text(text)
        assert main(["export", str(tmp_path / name), str(logs), "--format", "tensorboard", "--no-cache"]) == 0

    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.pb")) == [
        "plugins/profile/first/localhost.xplane.pb",
        "plugins/profile/second_run/localhost.xplane.pb",
    ]
