"""Reading piece by piece gives what reading at once gives, and files that are no trace are told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers import assembly, open_trace, source, trace_files
from stepscope.readers.kineto import EXPLANATIONS
from stepscope.readers.kineto import events as chunks
from stepscope.readers.source import Gunzip
from stepscope.trace.tables import SCHEMAS
from tests.unit.small_traces import complete, counted, opened

RECORDING = Path(__file__).parents[2] / "fixtures" / "gpt2_batched_loss_cpu.json.gz"


def test_chunks_that_are_set_aside_on_disk_make_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = open_trace(RECORDING)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 150_000)
    monkeypatch.setattr(source, "BLOCK_BYTES", 70_000)
    monkeypatch.setattr(assembly, "MEMORY_BYTES", 100_000)
    monkeypatch.setattr(assembly, "PART_ROWS", 500)
    in_pieces = open_trace(RECORDING)
    in_pieces.check()
    assert in_pieces.metadata == at_once.metadata
    assert in_pieces.warnings == ()
    for name in SCHEMAS:
        assert in_pieces.table(name).equals(at_once.table(name)), name


def test_a_long_text_after_the_events_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(source, "BLOCK_BYTES", 1000)
    groups = [{"pg_name": str(number), "ranks": [{"ph": "no event"}, {"ph": "either"}]} for number in range(500)]
    document = {
        "traceEvents": [complete(f"op{number}", "cpu_op", number, 1) for number in range(100)],
        "distributedInfo": {"rank": 6, "pg_config": groups},
        "host_name": "here",
    }
    trace = opened(tmp_path, document)
    assert (trace.metadata.events, trace.metadata.rank, trace.metadata.host) == (100, 6, "here")
    assert trace.warnings == ()


def test_text_around_the_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAXIMUM_HEADER_BYTES", 1000)
    document = {"traceEvents": [complete("a", "cpu_op", 1, 1)], "notes": "x" * 5000, "host_name": "here"}
    trace = opened(tmp_path, document)
    assert trace.metadata.host is None
    assert counted(trace)["oversized_header"] == 1


def test_an_event_larger_than_any_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(source, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(chunks, "MAXIMUM_EVENT_BYTES", 10_000)
    monkeypatch.setattr(chunks, "_SEARCH_BYTES", 500)
    events = [complete(f"op{number}", "cpu_op", number, 1) for number in range(20)]
    events.insert(10, complete("x" * 50_000, "cpu_op", 50, 1))
    trace = opened(tmp_path, events)
    assert set(trace.operators["name"]) >= {f"op{number}" for number in range(20)}
    assert counted(trace)["oversized_event"] >= 1


def test_times_become_exact_from_the_chunk_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 400)
    monkeypatch.setattr(source, "BLOCK_BYTES", 200)
    form = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":2,"ts":%s,"dur":0.001}'
    times = ["1.001", "2.002", *(f"166120346302956{number}.123" for number in range(10))]
    trace = opened(tmp_path, '{"traceEvents":[' + ",".join(form % time for time in times) + "]}")
    first = trace.operators["start_ns"].to_list()
    assert [time % 1000 for time in first] == [0, 1] + [122] * 10


@pytest.mark.parametrize("size", [1, 7, 4096, 2**20])
def test_gzip_members_of_any_size_are_joined(tmp_path: Path, size: int) -> None:
    parts = [bytes([65 + number % 26]) * (number * 137) for number in range(60)]
    path = tmp_path / "members.gz"
    path.write_bytes(b"".join(map(gzip.compress, parts)))
    with open(path, "rb") as packed:
        unpacked = Gunzip(packed)
        assert b"".join(iter(lambda: unpacked.read(size), b"")) == b"".join(parts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"SQLite format 3\0", "SQLite database"),
        (b"PK\x03\x04", "zip archive"),
        (b"BZh91AY", "bzip2"),
        (b"\xff\xfe{\0", "UTF-16"),
        (b"<!DOCTYPE html>", "web page"),
        (b'{"schema": "1.0.2-chakra.0.0.4", "nodes": []}', "execution trace"),
        (b"[[-1, 1, 37888, 7], [-1, 1, 512, 7]]", "memory timeline"),
        (b'{"$schema": "https://www.speedscope.app/file-format-schema.json"}', "speedscope"),
        (b'{"cells": []}', "notebook"),
        (b"step,loss\n1,2\n", "neither a JSON object nor a list"),
        (b'{"loss": [1, 2]}', "no list of trace events"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    for data in (content, gzip.compress(content)):
        path = tmp_path / "file"
        path.write_bytes(data)
        with pytest.raises(NotATraceError, match=said):
            open_trace(path)


def test_the_trace_files_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="contains no trace file"):
        trace_files(tmp_path)
    text = json.dumps([complete("a", "cpu_op", 1, 1)])
    for name in ("b.json", "a.json", "notes.txt"):
        (tmp_path / name).write_text(text)
    assert trace_files(tmp_path) == [tmp_path / "a.json", tmp_path / "b.json"]
    assert trace_files(tmp_path / "a.json") == [tmp_path / "a.json"]


def test_every_warning_is_explained_in_the_guide() -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats" / "kineto.md").read_text()
    assert [kind for kind in EXPLANATIONS if f"`{kind}`" not in page] == []
