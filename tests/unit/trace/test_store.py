"""Traces kept as Parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import CacheError, UnreadableTraceError
from stepscope.trace import Metadata, Trace, TraceWarning, Window
from stepscope.trace.metadata import Device
from stepscope.trace.model import is_store, open_store, seal
from stepscope.trace.tables import SCHEMAS
from tests.unit.recording import Recording

METADATA = Metadata(
    path="run/trace.json",
    format="kineto",
    events=7,
    complete_events=5,
    rank=1,
    world_size=4,
    backend="nccl",
    origin_unix_ns=1_751_410_836_000_000_001,
    host="node",
    devices=(Device("0", "NVIDIA H100", 80 << 30, "9.0", 132),),
    recorded=("stacks", "shapes"),
    window=Window(5, 2**62),
)
WARNINGS = (TraceWarning("truncated", 2, "the file ends early"),)


def small_trace() -> Trace:
    recording = Recording(METADATA, WARNINGS)
    recording.step(0, 100, 3)
    recording.frame(0, 90, "train.py(12): step")
    recording.operator(10, 20, "aten::mm", input_shapes="[[2, 2], [2, 2]]")
    recording.launched(12, 20, 30, "gemm", 101, occupancy=0.5)
    recording.allocation(11, 512)
    return recording.trace()


def assert_same(one: Trace, other: Trace) -> None:
    assert (one.metadata, one.warnings) == (other.metadata, other.warnings)
    for table in SCHEMAS:
        assert one.table(table).equals(other.table(table)), table


def changed_manifest(store: Path, **changes: Any) -> None:
    path = store / "store.json"
    manifest = {**json.loads(path.read_bytes()), **changes}
    path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))
    seal(store)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small_trace().save(tmp_path / "store")
    return tmp_path / "store"


def test_an_empty_trace_comes_back(tmp_path: Path) -> None:
    Trace.from_tables({}).save(tmp_path / "empty")

    opened = open_store(tmp_path / "empty")

    assert_same(opened, Trace.from_tables({}))
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["contents.json", "store.json"]


def test_a_trace_comes_back_as_it_was(store: Path) -> None:
    opened = open_store(store)

    assert is_store(store)
    opened.check()
    assert_same(opened, small_trace())


def test_tables_in_several_parts_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.trace.model.PART_ROWS", 2)
    recording = Recording()
    for number in range(5):
        recording.operator(10 * number, 5, f"aten::op{number}")

    recording.trace().save(tmp_path / "store")

    assert len(list((tmp_path / "store").glob("operators-*.parquet"))) == 3
    assert open_store(tmp_path / "store").operators["name"].to_list() == [f"aten::op{number}" for number in range(5)]


def test_no_store(tmp_path: Path) -> None:
    assert not is_store(tmp_path)
    with pytest.raises(UnreadableTraceError, match="contains no readable trace"):
        open_store(tmp_path)


def test_a_newer_version_is_refused(store: Path) -> None:
    changed_manifest(store, version=3)

    with pytest.raises(UnreadableTraceError, match=r"newer stepscope \(store version 3, this one reads 2\)"):
        open_store(store)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": "1", "metadata": {}}', b'{"version": 1}', b"\xff\xfe"],
    ids=["empty", "cut off", "a list", "a wrong type", "without metadata", "no text"],
)
def test_a_damaged_manifest_is_refused(store: Path, content: bytes) -> None:
    (store / "store.json").write_bytes(content)

    with pytest.raises(UnreadableTraceError, match="contains no readable trace"):
        open_store(store)


def test_an_older_manifest_is_read_with_defaults(store: Path) -> None:
    changed_manifest(store, version=0, metadata={"format": "kineto", "events": 7}, warnings=None)

    opened = open_store(store)

    assert (opened.metadata, opened.warnings) == (Metadata(format="kineto", events=7), ())
    assert opened.operators.equals(small_trace().operators)


def test_a_manifest_with_unknown_fields_is_read(store: Path) -> None:
    changed_manifest(store, added_later={"anything": 1})

    assert_same(open_store(store), small_trace())


def test_a_missing_file_is_named_when_its_table_is_asked_for(store: Path) -> None:
    (store / "frames-00000.parquet").unlink()

    opened = open_store(store)

    assert opened.operators.height == 1
    with pytest.raises(UnreadableTraceError, match=r"its file frames-00000\.parquet is missing"):
        _ = opened.frames


def test_one_flipped_bit_is_refused_when_its_table_is_asked_for(store: Path) -> None:
    table = store / "frames-00000.parquet"
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 4
    table.write_bytes(content)

    opened = open_store(store)

    assert opened.operators.equals(small_trace().operators)
    with pytest.raises(UnreadableTraceError, match=r"its file frames-00000\.parquet has changed"):
        _ = opened.frames


def test_a_store_without_its_checksums_is_refused(store: Path) -> None:
    (store / "contents.json").unlink()

    with pytest.raises(UnreadableTraceError, match="no checksums"):
        open_store(store)


def test_an_existing_directory_is_left_alone(store: Path) -> None:
    before = sorted(path.name for path in store.iterdir())

    with pytest.raises(CacheError, match="already exists"):
        Trace.from_tables({}).save(store)

    assert sorted(path.name for path in store.iterdir()) == before


def test_nothing_is_left_of_a_trace_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepscope.trace.model.StoreWriter.finish", full_disk)

    with pytest.raises(CacheError, match=r"cannot write .*store: No space left on device"):
        small_trace().save(tmp_path / "store")

    assert list(tmp_path.iterdir()) == []
