"""Whatever happens to a trace file: a readable part is read, damage is counted, and only a StepscopeError comes out."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.errors import NotATraceError, StepscopeError, UnreadableTraceError
from stepscope.readers import open_trace
from stepscope.trace import Trace
from stepscope.trace.cache import TraceCache
from tests.property.documents import (
    EVERY_KIND,
    Document,
    event,
    every_kind,
    kinds,
    read,
    read_trace,
    same_tables,
    tables,
)
from tests.simulator import kineto_bytes
from tests.simulator.programs import exposed_all_reduce
from tests.tries import tries
from tests.unit.xplanes import part

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDINGS = (
    FIXTURES / "gpt2_batched_loss_cpu.json.gz",
    FIXTURES.parent.parent / "examples/gpt2_per_token_loss_cpu.json.gz",
)

few = settings(max_examples=tries(8), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
many = settings(few, max_examples=tries(15))


@pytest.fixture(scope="module")
def undamaged() -> Trace:
    return read_trace(EVERY_KIND.text)


def is_structured(data: bytes) -> bool:
    """Whether text is JSON whatever characters its strings hold: those in unread arguments are not looked at."""
    try:
        json.loads(data.decode("utf-8", "replace"), strict=False, parse_constant=lambda _: 1 / 0)
    except (ValueError, RecursionError, ZeroDivisionError):
        return False
    return True


def test_the_undamaged_document_is_read_without_a_warning() -> None:
    for pieces in (False, True):
        trace = read_trace(EVERY_KIND.text, pieces=pieces)
        assert trace.warnings == ()
        assert trace.metadata.events == len(EVERY_KIND.events)
        # Lines and modules come from the file that a recording of stepscope's keeps beside its trace.
        assert [name for name, frame in tables(trace).items() if frame.is_empty()] == ["lines", "modules"]
        assert (trace.metadata.rank, trace.metadata.world_size) == (1, 2)


# Truncation


@many
@given(st.integers(0, len(EVERY_KIND.text) - 1), st.booleans())
def test_what_precedes_a_cut_is_read_completely(length: int, pieces: bool) -> None:
    result = read(EVERY_KIND.text[:length], pieces=pieces)
    if not EVERY_KIND.complete_events(length):
        assert isinstance(result, StepscopeError)
        return
    assert isinstance(result, Trace)
    assert result.metadata.events == EVERY_KIND.whole_events(length)
    assert result.metadata.complete_events == EVERY_KIND.complete_events(length)
    assert kinds(result) & ({"truncated"} if length <= EVERY_KIND.array[1] else {"truncated", "damaged_header"})


@few
@given(st.data(), st.booleans(), st.sampled_from(["gzip", "zstd"]))
def test_what_precedes_a_cut_in_packed_data_is_read_completely(data: st.DataObject, pieces: bool, packing: str) -> None:
    packed = gzip.compress(EVERY_KIND.text) if packing == "gzip" else zstandard.compress(EVERY_KIND.text)
    length = data.draw(st.integers(1, len(packed) - 1))
    if packing == "gzip":
        unpacked = zlib.decompressobj(31).decompress(packed[:length])
    else:
        unpacked = zstandard.ZstdDecompressor().decompressobj().decompress(packed[:length])
    result = read(packed[:length], pieces=pieces)
    if EVERY_KIND.complete_events(len(unpacked)):
        assert isinstance(result, Trace)
        assert result.metadata.events == EVERY_KIND.whole_events(len(unpacked))
        assert kinds(result) & {"truncated", "compressed_data"}
    else:
        assert isinstance(result, StepscopeError)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name)
def test_a_recording_cut_off_keeps_every_event_before(recording: Path) -> None:
    text = gzip.decompress(recording.read_bytes())
    whole = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    for share in (0.2, 0.51, 0.999):
        cut = text[: int(len(text) * share)]
        expected = cut.count(b'{"ph":') - (not cut.endswith(b"}"))
        trace = read_trace(cut)
        assert trace.metadata.events == expected
        assert "truncated" in kinds(trace)
        assert trace.operators.height <= len(whole)


# Damage


@many
@given(
    st.integers(*EVERY_KIND.array),
    st.sampled_from(["flip", "insert", "delete"]),
    st.sampled_from(list(b'\x00\x07\n\x1f "\\,:[]{}09-.eEntx\x80\xc3\xff')),
    st.booleans(),
)
@example(EVERY_KIND.spans[4][1], "flip", ord("]"), True)
@example(EVERY_KIND.spans[4][1], "delete", 0, False)
@example(EVERY_KIND.spans[4][1], "flip", ord('"'), False)
@example(EVERY_KIND.spans[4][1], "flip", ord("["), True)
@example(EVERY_KIND.array[1], "flip", ord("]"), False)
def test_one_damaged_byte_costs_at_most_the_event_it_is_in(place: int, how: str, byte: int, pieces: bool) -> None:
    text = EVERY_KIND.text
    removed = 0 if how == "insert" else 1
    added = b"" if how == "delete" else bytes([byte])
    damaged = text[:place] + added + text[place + removed :]
    result = read(damaged, pieces=pieces)
    in_the_key = place < EVERY_KIND.spans[0][0]
    if in_the_key and isinstance(result, StepscopeError):
        return
    assert isinstance(result, Trace), result
    assert len(EVERY_KIND.events) - 1 <= result.metadata.events <= len(EVERY_KIND.events) + in_the_key
    if not is_structured(damaged):
        assert result.warnings
    undamaged = [
        value["name"]
        for value, (start, end) in zip(EVERY_KIND.events, EVERY_KIND.spans, strict=True)
        if "dur" in value and not start <= place < end
    ]
    found = pl.concat([frame["name"] for frame in tables(result).values() if "duration_ns" in frame.columns]).to_list()
    for name in set(undamaged):
        assert found.count(name) >= undamaged.count(name)


@many
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True), st.sampled_from(["flip", "insert", "delete"]), st.binary(max_size=4)
        ),
        max_size=8,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_damage_anywhere_ends_in_a_trace_or_an_error(
    damages: list[tuple[float, str, bytes]], packed: bool, pieces: bool
) -> None:
    text = gzip.compress(EVERY_KIND.text) if packed else EVERY_KIND.text
    for where, how, added in damages:
        place = int(where * len(text))
        removed = {"flip": len(added), "insert": 0, "delete": 1 + 40 * len(added)}[how]
        text = text[:place] + (b"" if how == "delete" else added) + text[place + removed :]
    read(text, pieces=pieces)


@few
@given(st.integers(0, len(EVERY_KIND.events) - 1), st.booleans())
def test_a_control_character_in_a_name_costs_nothing(number: int, pieces: bool) -> None:
    start, _ = EVERY_KIND.spans[number]
    place = EVERY_KIND.text.index(b'"name": "', start) + len(b'"name": "')
    trace = read_trace(EVERY_KIND.text[:place] + b"\x01\x1f\n" + EVERY_KIND.text[place:], pieces=pieces)
    assert trace.metadata.events == len(EVERY_KIND.events)
    assert "repaired_event" in kinds(trace)


@few
@given(st.integers(0, len(EVERY_KIND.events) - 1), st.sampled_from([b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xe9"]))
def test_invalid_utf8_in_a_name_is_replaced(number: int, invalid: bytes) -> None:
    start, _ = EVERY_KIND.spans[number]
    place = EVERY_KIND.text.index(b'"name": "', start) + len(b'"name": "')
    trace = read_trace(EVERY_KIND.text[:place] + invalid + EVERY_KIND.text[place:])
    assert trace.metadata.events == len(EVERY_KIND.events)
    assert "invalid_utf8" in kinds(trace)


NUMBERS = (0, -1, -0.5, 0.1, 1e300, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30))
WRONG: list[Any] = [None, True, "", "x", "7", "\ud800", [], [1], {}, {"a": [None]}, [[[[[]]]]], *NUMBERS]
WRONG += [{"ph": "X", "name": "inner", "ts": 5, "dur": 5}]
RAW_WRONG = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"1E99999999",
    b"9" * 5000,
    b'"\\ud800"',
]


@many
@given(st.integers(0, len(EVERY_KIND.events) - 1), st.data(), st.booleans())
def test_a_field_of_a_wrong_type_leaves_the_other_events_alone(number: int, data: st.DataObject, pieces: bool) -> None:
    value = json.loads(json.dumps(EVERY_KIND.events[number]))
    fields = [(value, key) for key in value] + [(value["args"], key) for key in value.get("args", ())]
    holder, key = data.draw(st.sampled_from(fields))
    wrong = data.draw(st.sampled_from([*WRONG, *RAW_WRONG]))
    holder[key] = "@@" if isinstance(wrong, bytes) else wrong
    start, end = EVERY_KIND.spans[number]
    encoded = json.dumps(value).encode()
    if isinstance(wrong, bytes):
        encoded = encoded.replace(b'"@@"', wrong)
    trace = read_trace(EVERY_KIND.text[:start] + encoded + EVERY_KIND.text[end:], pieces=pieces)
    assert trace.metadata.events >= len(EVERY_KIND.events) - 1


@few
@given(st.sampled_from([None, [], "", 5, True, {"a": {"b": None}}]), st.booleans())
def test_arguments_that_are_no_object_leave_the_event(args: Any, pieces: bool) -> None:
    events = [value | {"args": args} for value in every_kind()]
    trace = read_trace(Document(events).text, pieces=pieces)
    assert trace.metadata.events == len(events)
    assert trace.operators.height == 12


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"ph":', b'{"ph":'])
def test_huge_nesting_costs_one_event_and_little_time(opening: bytes) -> None:
    start, end = EVERY_KIND.spans[5]
    nested = b'{"ph": "X", "name": "deep", "args": {"x": ' + opening * 300_000
    trace = read_trace(EVERY_KIND.text[:start] + nested + EVERY_KIND.text[end:])
    assert trace.metadata.events >= len(EVERY_KIND.events) - 1
    assert "damaged_event" in kinds(trace)


# Other ways to write the same


@few
@given(random=st.randoms(use_true_random=False), layout=st.sampled_from(["lines", "compact"]), pieces=st.booleans())
def test_the_order_of_keys_and_white_space_mean_nothing(
    undamaged: Trace, random: Any, layout: str, pieces: bool
) -> None:
    events = []
    for value in every_kind():
        items = list(value.items())
        random.shuffle(items)
        events.append(dict(items))
    trace = read_trace(Document(events, layout=layout).text, pieces=pieces)
    assert same_tables(trace, undamaged)
    assert trace.warnings == ()


@pytest.mark.parametrize("pieces", [False, True])
def test_a_byte_order_mark_means_nothing(undamaged: Trace, pieces: bool) -> None:
    trace = read_trace(b"\xef\xbb\xbf" + EVERY_KIND.text, pieces=pieces)
    assert same_tables(trace, undamaged)
    assert trace.metadata.events == len(EVERY_KIND.events)


def test_of_a_repeated_key_the_last_counts(undamaged: Trace) -> None:
    start, _ = EVERY_KIND.spans[3]
    repeated = EVERY_KIND.text[: start + 1] + b'"name": "first", "dur": 1, ' + EVERY_KIND.text[start + 1 :]
    assert same_tables(read_trace(repeated), undamaged)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_second_list_of_events_is_left_out_and_counted(pieces: bool) -> None:
    second = EVERY_KIND.text[EVERY_KIND.array[0] : EVERY_KIND.array[1]] + b"]}"
    trace = read_trace(EVERY_KIND.text[:-1] + b", " + second, pieces=pieces)
    assert trace.metadata.events == len(EVERY_KIND.events)
    assert kinds(trace) == {"repeated_events"}
    assert trace.metadata.rank == 1


# Bombs


def peak_and_message(path: Path, setting: str = "pass") -> tuple[int, str]:
    """Peak memory in MiB of a process that opens the file, and its error."""
    program = f"""
import resource, sys
from stepscope.readers import open_trace, source
from stepscope.errors import StepscopeError
{setting}
try:
    open_trace(sys.argv[1])
    message = "read"
except StepscopeError as error:
    message = f"{{type(error).__name__}}: {{error}}"
try:  # what getrusage says begins with the memory of the process that started this one
    status = open("/proc/self/status").read()
    print(int(status.split("VmHWM:")[1].split()[0]) >> 10)
except OSError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10))
print(message)
"""
    found = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    peak, message = found.stdout.strip().split("\n", 1)
    return int(peak), message


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory with the resource module")
@pytest.mark.parametrize("opening", [b"", b'{"traceEvents": [', b'{"a": "'])
def test_a_small_file_that_unpacks_to_many_gib_of_nothing_is_refused(tmp_path: Path, opening: bytes) -> None:
    path = tmp_path / "bomb.json.gz"
    blank = gzip.compress(b" " * 2**24)
    path.write_bytes(gzip.compress(opening) + blank * 512)
    peak, message = peak_and_message(path)
    assert message.startswith(("TooLargeError", "NotATraceError"))
    assert peak < 500


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory with the resource module")
def test_a_small_file_that_unpacks_to_the_same_event_for_ever_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    same = json.dumps(event("aten::mm", "cpu_op", 1, 2, **{"Input Dims": [[1, 2]] * 20})).encode() + b", "
    path.write_bytes(gzip.compress(b'{"traceEvents": [') + gzip.compress(same * (2**22 // len(same))) * 2048)
    peak, message = peak_and_message(path, "source.RATIO_FROM_BYTES = 2**26")
    assert "TooLargeError" in message
    assert "150 times its packed size" in message
    assert peak < 500


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory with the resource module")
def test_tiny_events_of_an_xla_profile_take_less_than_300_bytes_each(tmp_path: Path) -> None:
    counts = (1, 1_000_000)
    peaks = []
    for count in counts:
        path = tmp_path / f"{count}.xplane.pb"
        six_bytes = part(4, part(1, 1) + part(2, 9))
        line = part(1, 1) + part(2, "XLA Ops") + six_bytes * count
        names = part(4, part(1, 1) + part(2, part(1, 1) + part(2, "fusion.1")))
        path.write_bytes(part(1, part(1, 1) + part(2, "/device:TPU:0") + part(3, line) + names))
        peak, message = peak_and_message(path)
        assert message == "read"
        peaks.append(peak)
    assert (peaks[1] - peaks[0]) * 2**20 < 300 * counts[1]


# Files that are none


NOTHING = (
    *(b"", b" ", b"\n", b"{", b"[", b"{}", b"[]", b"null", b"[{}]", b"[1, 2]", b"\0" * 100, b"\xef\xbb\xbf"),
    *(b'{"traceEvents": []}', b'{"traceEvents": [', b'{"traceEvents": {}}'),
    *(b"\x1f\x8b", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", gzip.compress(b"", mtime=0)),
)


@pytest.mark.parametrize("content", NOTHING)
def test_a_file_with_nothing_in_it_is_refused(content: bytes) -> None:
    assert isinstance(read(content), NotATraceError | UnreadableTraceError)


def test_a_folder_a_missing_file_and_an_impossible_name_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", f"{tmp_path}/a\0b", tmp_path / ("x" * 5000)):
        for cache in (None, TraceCache(tmp_path / "cache")):
            with pytest.raises((UnreadableTraceError, NotATraceError)):
                open_trace(path, cache=cache)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(EVERY_KIND.text)
    path.chmod(0)
    with pytest.raises(UnreadableTraceError, match="cannot read"):
        open_trace(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_pipe_is_read_once_even_with_a_cache_and_may_close_early(tmp_path: Path, share: float) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    sent = EVERY_KIND.text[: int(len(EVERY_KIND.text) * share)]
    writer = threading.Thread(target=path.write_bytes, args=(sent,))
    writer.start()
    try:
        if share:
            trace = open_trace(path, cache=TraceCache(tmp_path / "cache"))
            assert trace.metadata.events == EVERY_KIND.whole_events(len(sent))
            assert ("truncated" in kinds(trace)) is (share < 1)
        else:
            with pytest.raises(NotATraceError, match="is empty"):
                open_trace(path, cache=TraceCache(tmp_path / "cache"))
    finally:
        writer.join()


def test_an_error_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "M"}]}')
    with pytest.raises(UnreadableTraceError):
        open_trace(path, cache=TraceCache(tmp_path / "cache"))
    assert [child for child in (tmp_path / "cache").rglob("*") if child.is_file()] == []


# Traces of other makes


@few
@given(st.data())
def test_a_simulated_trace_survives_any_damage(data: st.DataObject) -> None:
    text = kineto_bytes(exposed_all_reduce(steps=2))
    place = data.draw(st.integers(0, len(text)))
    added = data.draw(st.binary(max_size=3))
    removed = data.draw(st.integers(0, 200))
    read(text[:place] + added + text[place + removed :], pieces=data.draw(st.booleans()))


SMALL_REAL_TRACES = (
    "h100_tiny_one_kernel.json",
    "mi250_toy_train.json.gz",
    "no_rank_no_device.json.gz",
    "ranks128_sampled/rank0.json.gz",
    "a100_event_sync_two_streams.json.gz",
    "mi300x_vllm_graph_decode.json.gz",
)


@pytest.mark.traces
@pytest.mark.parametrize("name", SMALL_REAL_TRACES)
@settings(few, max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_real_trace_survives_any_damage(traces_folder: Path, name: str, data: st.DataObject) -> None:
    packed = (traces_folder / "kineto" / name).read_bytes()
    text = gzip.decompress(packed) if name.endswith(".gz") and data.draw(st.booleans()) else packed
    place = data.draw(st.integers(0, len(text)))
    if data.draw(st.booleans()):
        read(text[:place])
    else:
        read(text[:place] + data.draw(st.binary(max_size=3)) + text[place + data.draw(st.integers(0, 100)) :])
