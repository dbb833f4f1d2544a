"""Every format is told by its content, also behind blanks and a byte-order mark where it is text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.machine.devices import read_devices
from stepscope.predict.cost.price_files import read_price_file
from stepscope.readers import READERS, open_trace
from stepscope.readers.side_files import (
    read_fallback_log,
    read_gaudi_metrics,
    read_ncu,
    read_xla_debug_log,
    read_xla_metrics,
)
from tests.simulator import kineto_bytes
from tests.simulator.gaudi import gaudi_bytes
from tests.simulator.machine import Machine
from tests.simulator.nsight_systems import write_nsight
from tests.simulator.perfetto import perfetto_bytes
from tests.simulator.programs import exposed_all_reduce
from tests.simulator.rocprof import rocprof_bytes
from tests.simulator.xplane import xplane_bytes
from tests.unit.readers.test_xla_json import profile
from tests.unit.small_traces import complete, kernel, launch

BLANKS = {
    "nothing": b"",
    "blanks": b"  \t ",
    "newlines": b"\n\r\n\n",
    "mark": b"\xef\xbb\xbf",
    "both": b"\xef\xbb\xbf\n\n",
    "mark behind a newline": b"\n\xef\xbb\xbf",
}


def _machine() -> Machine:
    return exposed_all_reduce()


def _plain(data: bytes) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


TEXT: dict[str, Callable[[], bytes]] = {
    "kineto": lambda: _plain(kineto_bytes(_machine())),
    "rocprof": lambda: _plain(rocprof_bytes(_machine())),
    "gaudi": lambda: _plain(gaudi_bytes(_machine())),
    "xla_json": lambda: json.dumps({"displayTimeUnit": "ns", "traceEvents": profile()}).encode(),
}
BINARY: dict[str, Callable[[Path], bytes]] = {
    "perfetto": lambda _: _plain(perfetto_bytes(_machine())),
    "xplane": lambda _: _plain(xplane_bytes(_machine())),
    "nsight_systems": lambda folder: write_nsight(_machine(), folder / "made.sqlite").read_bytes(),
}


SIDE_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "xla metrics": ("Metric: CompileTime\n  TotalSamples: 21\nCounter: MarkStep\n  Value: 11\n", read_xla_metrics),
    "xla debug log": ("pt-xla-profiler: CompileTime too frequent: 21 counts during 11 steps\n", read_xla_debug_log),
    "gaudi metrics": ('[{"metric_name": "recipe_cache", "statistics": {"TotalHit": 18}}]', read_gaudi_metrics),
    "fallback log": ("Frequency of op and op name that were executed on CPU:\n3 aten::median\n", read_fallback_log),
    "ncu": ('"ID","Kernel Name","SM [%]"\n"","","%"\n"0","add(float*)","50"\n', lambda path: read_ncu(path).rows()),
    "prices": (
        "provider,instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot\n"
        "gcp,a2-highgpu-1g,us-central1-a,3.67,12,85,1,A100,40,False\n",
        lambda path: read_price_file(path, provider=None, as_of=date(2026, 11, 1)),
    ),
    "devices": (
        '[[device]]\nname = "Card 7"\nbandwidth_gb_s = 600.5\npeak_tflop_s = { bf16 = 80.5 }\n',
        lambda path: read_devices(path),
    ),
    "snapshot": (
        '{"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 512, "frames": []}]]}',
        lambda path: open_trace(path).memory.rows(),
    ),
}


@pytest.mark.parametrize("before", BLANKS)
@pytest.mark.parametrize("kind", SIDE_FILES)
def test_side_files_are_read_the_same_behind_blanks(kind: str, before: str, tmp_path: Path) -> None:
    text, read = SIDE_FILES[kind]
    path = tmp_path / "file"
    path.write_text(text)
    plain = read(path)
    path.write_bytes(BLANKS[before] + text.encode())
    assert read(path) == plain


def test_rows_of_prices_keep_their_numbers(tmp_path: Path) -> None:
    text, _ = SIDE_FILES["prices"]
    path = tmp_path / "prices.csv"
    path.write_bytes(b"\xef\xbb\xbf\n\n" + text.encode() + b"gcp,a,us-central1-a,none,12,85,1,A100,40,False\n")
    assert [bad.first_line for bad in read_price_file(path, provider=None, as_of=date(2026, 11, 1)).bad] == [5]


def _first_reader(head: bytes) -> str:
    return next(reader.name for reader in READERS if reader.recognises(head))


@pytest.mark.parametrize("before", BLANKS)
@pytest.mark.parametrize("name", TEXT)
def test_text_is_read_the_same_behind_blanks(name: str, before: str, tmp_path: Path) -> None:
    data = TEXT[name]()
    (tmp_path / "plain").write_bytes(data)
    (tmp_path / "other").write_bytes(BLANKS[before] + data)
    plain, other = open_trace(tmp_path / "plain"), open_trace(tmp_path / "other")
    assert plain.metadata.format == other.metadata.format == name
    assert plain.metadata.events == other.metadata.events > 0
    assert plain.warnings == other.warnings


@pytest.mark.parametrize("name", BINARY)
def test_binary_formats_are_still_their_own(name: str, tmp_path: Path) -> None:
    assert _first_reader(BINARY[name](tmp_path)) == name


@pytest.mark.parametrize("before", BLANKS)
def test_a_snapshot_as_json_is_known_behind_blanks(before: str) -> None:
    head = BLANKS[before] + b'{"segments": [], "device_traces": []}'
    assert _first_reader(head) == "torch_snapshot"


@pytest.mark.parametrize("key", ["schemaVersion", "name", "/host:CPU"])
def test_an_object_behind_a_newline_is_no_message_of_protobuf(key: str) -> None:
    """`\\n{` is also the beginning of a packet or a plane of 123 bytes."""
    head = b'\n{\n "' + key.encode() + b'": "/host:CPU", "traceEvents": [' + b" " * 200 + b"]}"
    assert _first_reader(head) == "kineto"


def test_a_comment_before_json_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """JSON has no comments."""
    (tmp_path / "t.json").write_bytes(b"# made by a script\n" + TEXT["kineto"]())
    with pytest.raises(StepscopeError, match="not a trace"):
        open_trace(tmp_path / "t.json")


def _document(**args: Any) -> bytes:
    events = [launch(10, 1), kernel(20, 5, 1, args={"correlation": 1, "stream": 7, "device": 0, **args})]
    return json.dumps({"traceEvents": [complete("op", "cpu_op", 5, 100), *events]}).encode()


@pytest.mark.parametrize("number", [2**31, 2**40, 2**62])
def test_a_number_that_does_not_fit_its_column_is_left_out_and_counted(number: int, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(_document(**{"registers per thread": number}))
    trace = open_trace(tmp_path / "t.json")
    assert trace.device_work["registers"].to_list() == [None]
    assert {warning.kind: warning.count for warning in trace.warnings}["number_out_of_range"] == 1


@pytest.mark.parametrize("digits", ["2191487992", "9" * 18])
def test_registers_of_a_profile_of_xla_that_do_not_fit_are_left_out(digits: str, tmp_path: Path) -> None:
    planted = f"regs:{digits}".encode().ljust(len(b"regs:32 static_shared:0"))
    data = _plain(xplane_bytes(_machine())).replace(b"regs:32 static_shared:0", planted)
    (tmp_path / "t.xplane.pb").write_bytes(data)
    trace = open_trace(tmp_path / "t.xplane.pb")
    assert trace.device_work["registers"].null_count() == trace.device_work.height > 0
    assert "number_out_of_range" in {warning.kind for warning in trace.warnings}


def test_a_pair_of_which_one_end_is_read_exactly(tmp_path: Path) -> None:
    """Damage beside an event makes its time a Decimal, while the beginning's is a float."""
    begin = b'{"ph":"B","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1.5}'
    end = b'{"ph":"E","cat":"cpu_op","name":"a\x01","pid":1,"tid":1,"ts":4.75}'
    filler = b",".join(
        b'{"ph":"X","cat":"cpu_op","name":"f%d","pid":1,"tid":2,"ts":%d.5,"dur":1.5}' % (number, number * 3)
        for number in range(2000)
    )
    (tmp_path / "t.json").write_bytes(
        b'{"traceEvents":[' + begin + b"," + filler + b"," + end.replace(b"a\x01", b"a") + b', {"ph": \x01}]}'
    )
    trace = open_trace(tmp_path / "t.json")
    found = trace.operators.filter(trace.operators["name"] == "a")
    assert found["duration_ns"].to_list() == [3250]
