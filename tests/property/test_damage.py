"""Whatever happens to a trace file: a readable part is read, damage is counted, and only a StepscopeError comes out."""

from __future__ import annotations

import gc
import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.errors import NotATraceError, StepscopeError, UnreadableTraceError
from stepscope.readers import open_trace, source
from stepscope.readers.kineto import chunks
from stepscope.readers.kineto import events as events_module
from stepscope.trace import Trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.tables import SCHEMAS
from tests.simulator import kineto_bytes
from tests.simulator.programs import exposed_all_reduce

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDINGS = (
    FIXTURES / "gpt2_batched_loss_cpu.json.gz",
    FIXTURES.parent.parent / "src/stepscope/data/gpt2_per_token_loss_cpu.json.gz",
)

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
many = settings(few, max_examples=150)


def event(name: str, category: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    place = {"pid": 0, "tid": 7} if category in ("kernel", "gpu_memcpy") else {"pid": 100, "tid": 101}
    times = {"ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": args}


def flow(phase: str, number: int, start: float) -> dict[str, Any]:
    return {"ph": phase, "id": number, "pid": 100, "tid": 101, "ts": start, "cat": "fwdbwd", "name": "fwdbwd"}


def every_kind() -> list[dict[str, Any]]:
    """A few events of each kind that the reader makes tables of."""
    result: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 100, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "ts": 0, "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        event("ProfilerStep#3", "user_annotation", 10.001, 900, **{"External id": 1}),
    ]
    for turn in range(6):
        start, launch = 20.125 + 100 * turn, {"correlation": 7 + turn, "External id": turn}
        shapes = {"Input Dims": [[8, 64], []], "Input type": ["float", "Scalar"]}
        place = {"device": 0, "stream": 7, "grid": [4, 1, 1], "block": [128, 1, 1]}
        usage = {"registers per thread": 32, "shared memory": 0, "est. achieved occupancy %": 12.5}
        memory = {"Device Type": 0, "Device Id": -1, "Addr": 4096, "Bytes": 64, "Total Allocated": 64}
        result += [
            event("aten::mm", "cpu_op", start, 30, **{"Sequence number": turn, "Fwd thread id": 0}, **shapes),
            event("file.py(3): forward", "python_function", start, 40, **{"Python id": turn, "Python parent id": None}),
            event("cudaLaunchKernel", "cuda_runtime", start + 1, 3, **launch),
            event('gemm<"16", \\ é %>', "kernel", start + 10, 12.5, **launch, **place, **usage),
            event("Memcpy HtoD", "gpu_memcpy", start + 30, 2, bytes=4096, **launch, device=0, stream=7),
            event("Stream Sync", "cuda_sync", start + 45, 2, stream=7, device=0, cuda_sync_kind="Stream Sync"),
            event("MmBackward0", "cpu_op", start + 50, 20, **{"Sequence number": turn, "Fwd thread id": 1}),
            flow("s", turn + 1, start),
            flow("f", turn + 1, start + 50),
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 101}
            | {"ts": start + 2, "args": memory},
            {"ph": "C", "name": "GPU 0 power", "pid": 0, "tid": 0, "ts": start, "args": {"watts": 250.5}},
        ]
    return result


class Document:
    """A trace as text, with the place of each event in it."""

    def __init__(self, events: list[Any], *, layout: str = "lines", base: bool = True) -> None:
        header = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Simulated"}], "with_stack": 1}
        header |= {"baseTimeNanoseconds": 1_700_000_000_000_000_000} if base else {}
        indent = {"lines": 1, "compact": None}[layout]
        text = json.dumps(header, indent=indent)[:-1].rstrip().encode() + b', "traceEvents": ['
        self.spans: list[tuple[int, int]] = []
        for number, value in enumerate(events):
            text += b",\n  " if number else b"\n  "
            encoded = json.dumps(value, indent=indent, ensure_ascii=False).encode()
            self.spans.append((len(text), len(text) + len(encoded)))
            text += encoded
        self.array = (text.rindex(b'"traceEvents"'), len(text))
        self.events = events
        self.text = text + b'\n], "distributedInfo": {"rank": 1, "world_size": 2}}'

    def whole_events(self, length: int) -> int:
        """How many events stand completely in the first `length` bytes."""
        return sum(end <= length for _, end in self.spans)

    def complete_events(self, length: int) -> int:
        """How many of those have a start and a duration."""
        return sum(end <= length and "dur" in value for value, (_, end) in zip(self.events, self.spans, strict=True))


EVERY_KIND = Document(every_kind())


@contextmanager
def small_pieces(wanted: bool = True) -> Iterator[None]:
    """Blocks, chunks and salvaged pieces so small that a short file has many."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(source, "BLOCK_BYTES", 700)
            patch.setattr(source, "_DAMAGE_STEP_BYTES", 100)
            patch.setattr(chunks, "CHUNK_BYTES", 1500)
            patch.setattr(events_module, "_SALVAGE_BYTES", 600)
        yield


def read(data: bytes, *, pieces: bool = False, name: str = "trace.json") -> Trace | StepscopeError:
    """The trace, checked, or the expected error; whichever it is, no temporary file stays."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, small_pieces(pieces):
        path = Path(folder) / name
        path.write_bytes(data)
        work = Path(folder) / "work"
        work.mkdir()
        patch.setattr(tempfile, "tempdir", str(work))
        try:
            trace = open_trace(path)
        except StepscopeError as error:
            assert str(error)
            assert list(work.iterdir()) == []
            return error
        assert not list(work.rglob("spill-*"))
        trace.check()
        frames = {table: trace.table(table) for table in SCHEMAS}
        result = Trace.from_tables(frames, trace.metadata, trace.warnings)
        del trace
        gc.collect()
        assert list(work.iterdir()) == []
        return result


def read_trace(data: bytes, *, pieces: bool = False) -> Trace:
    result = read(data, pieces=pieces)
    assert isinstance(result, Trace), result
    return result


def kinds(trace: Trace) -> set[str]:
    return {warning.kind for warning in trace.warnings}


def tables(trace: Trace) -> dict[str, pl.DataFrame]:
    return {name: trace.table(name) for name in SCHEMAS}


def same_tables(one: Trace, other: Trace) -> bool:
    return all(frame.equals(other.table(name)) for name, frame in tables(one).items())


def is_json(data: bytes) -> bool:
    try:
        json.loads(data.decode("utf-8"), parse_constant=lambda _: 1 / 0)
    except (ValueError, RecursionError, ZeroDivisionError):
        return False
    return True


def test_the_undamaged_document_is_read_without_a_warning() -> None:
    for pieces in (False, True):
        trace = read_trace(EVERY_KIND.text, pieces=pieces)
        assert trace.warnings == ()
        assert trace.metadata.events == len(EVERY_KIND.events)
        assert all(not frame.is_empty() for frame in tables(trace).values())
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
    if not is_json(damaged):
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


WRONG: list[Any] = [
    None, True, "", "x", "7", "\ud800", [], [1], {}, {"a": [None]}, 0, -1, -0.5, 0.1, 1e300, 2**31, 2**53 + 1, 2**63 - 1, 2**63,
    2**64, 10**30, -(10**30), [[[[[]]]]], {"ph": "X", "name": "inner", "ts": 5, "dur": 5},
]  # fmt: skip
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
@given(st.randoms(use_true_random=False), st.sampled_from(["lines", "compact"]), st.booleans())
def test_the_order_of_keys_and_white_space_mean_nothing(random: Any, layout: str, pieces: bool) -> None:
    events = []
    for value in every_kind():
        items = list(value.items())
        random.shuffle(items)
        events.append(dict(items))
    trace = read_trace(Document(events, layout=layout).text, pieces=pieces)
    assert same_tables(trace, read_trace(EVERY_KIND.text))
    assert trace.warnings == ()


@pytest.mark.parametrize("pieces", [False, True])
def test_a_byte_order_mark_means_nothing(pieces: bool) -> None:
    trace = read_trace(b"\xef\xbb\xbf" + EVERY_KIND.text, pieces=pieces)
    assert same_tables(trace, read_trace(EVERY_KIND.text))
    assert trace.metadata.events == len(EVERY_KIND.events)


def test_of_a_repeated_key_the_last_counts() -> None:
    start, _ = EVERY_KIND.spans[3]
    repeated = EVERY_KIND.text[: start + 1] + b'"name": "first", "dur": 1, ' + EVERY_KIND.text[start + 1 :]
    assert same_tables(read_trace(repeated), read_trace(EVERY_KIND.text))


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
    assert "NotATraceError" in message
    assert peak < 500


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory with the resource module")
def test_a_small_file_that_unpacks_to_the_same_event_for_ever_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    same = json.dumps(event("aten::mm", "cpu_op", 1, 2, **{"Input Dims": [[1, 2]] * 20})).encode() + b", "
    path.write_bytes(gzip.compress(b'{"traceEvents": [') + gzip.compress(same * (2**22 // len(same))) * 2048)
    peak, message = peak_and_message(path, "source._BOMB_BYTES = 2**26")
    assert "NotATraceError" in message
    assert "300 times its size" in message
    assert peak < 500


# Files that are none


@pytest.mark.parametrize(
    "content",
    [b"", b" ", b"\n", b"{", b"[", b"{}", b"[]", b"null", b'{"traceEvents": []}', b'{"traceEvents": [', b"[{}]", b"\x1f\x8b"]
    + [b"\x28\xb5\x2f\xfd", gzip.compress(b""), b"\xef\xbb\xbf", b"\0" * 100, b"[1, 2]", b'{"traceEvents": {}}', b"\x1f\x8b\x08"],
)  # fmt: skip
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


@pytest.mark.traces
@pytest.mark.parametrize(
    "name",
    [
        "h100_tiny_one_kernel.json",
        "mi250_toy_train.json.gz",
        "no_rank_no_device.json.gz",
        "ranks128_sampled/rank0.json.gz",
    ]
    + ["a100_event_sync_two_streams.json.gz", "mi210_gpu_events_only.json.gz", "mi300x_vllm_graph_decode.json.gz"],
)
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
