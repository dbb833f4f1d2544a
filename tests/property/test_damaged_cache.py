"""Whatever happens to the files of a kept trace, its report stays the same, and the user reads one line."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.readers import open_trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.model import open_store
from stepscope.trace.tables import SCHEMAS
from tests.unit.recording import Recording
from tests.unit.small_traces import complete, flow, kernel, launch

DOCUMENT = [
    complete("ProfilerStep#3", "user_annotation", 0, 100),
    complete("aten::mm", "cpu_op", 10, 20),
    complete("aten::copy_", "cpu_op", 40, 30),
    launch(12, 1),
    flow("s", 1, "ac2g", 12),
    kernel(20, 30, 1),
    launch(45, 2, "cudaStreamSynchronize", 40),
]
TRIES = int(os.environ.get("STEPSCOPE_TRIES", "100"))


def damage(file: Path, other: Path, chance: random.Random) -> str:
    """Do one thing to a file of an entry; returns what."""
    content = bytearray(file.read_bytes())
    kind = chance.choice(("flip", "flip", "flip", "flip", "zero", "cut", "delete", "swap", "empty", "folder"))
    at = chance.randrange(len(content))
    match kind:
        case "flip":
            content[at] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        case "zero":
            file.write_bytes(bytes(len(content)))
        case "cut":
            file.write_bytes(content[:at])
        case "delete":
            file.unlink()
        case "swap":
            content = bytearray(other.read_bytes())
            other.write_bytes(file.read_bytes())
            file.write_bytes(content)
        case "empty":
            file.write_bytes(b"")
        case _:
            file.unlink()
            file.mkdir()
    return kind


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


def written(path: Path) -> Path:
    path.write_text(json.dumps({"traceEvents": DOCUMENT}))
    return path


def test_a_damaged_entry_never_gives_other_tables(tmp_path: Path, cache_folder: Path) -> None:
    file = written(tmp_path / "trace.json")
    right = open_trace(file)
    open_trace(file, cache=TraceCache())
    (entry,) = (child for child in cache_folder.iterdir() if child.is_dir())
    shutil.copytree(entry, tmp_path / "whole")
    chance = random.Random(0)
    gc.collect()
    for number in range(TRIES):
        found = None  # gives the entry back
        shutil.rmtree(entry)
        shutil.copytree(tmp_path / "whole", entry)
        files = sorted(entry.iterdir())
        kind = damage(chance.choice(files), chance.choice(files), chance)
        found = open_trace(file, cache=TraceCache())
        assert (found.metadata, found.warnings) == (right.metadata, right.warnings), (number, kind)
        for table in SCHEMAS:
            assert found.table(table).equals(right.table(table)), (number, kind, table)


def test_the_report_stays_and_one_line_says_so(
    tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "trace.json")
    assert main(["diagnose", str(file)]) == 0
    right = capsys.readouterr().out
    chance = random.Random(17)
    for number in range(6):
        shutil.copytree(cache_folder, tmp_path / str(number) / "traces")  # of this one no trace is open
        monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / str(number)))
        (entry,) = (tmp_path / str(number) / "traces").iterdir()
        files = sorted(entry.iterdir())
        file_of_entry = chance.choice(files)
        kind = damage(file_of_entry, files[files.index(file_of_entry) - 1], chance)

        assert main(["diagnose", str(file)]) == 0
        out, err = capsys.readouterr()

        assert out == right, (number, kind)
        assert (len(err.splitlines()), "damaged" in err) == (1, True), (number, kind, err)
        assert main(["diagnose", str(file)]) == 0
        assert capsys.readouterr() == (right, ""), "the entry was written anew"


def test_another_traces_entry_is_not_taken_for_this_ones(
    tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "trace.json")
    other = tmp_path / "other.json"
    other.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 1, "dur": 2}]}'
    )
    right = open_trace(file).operators
    open_trace(file, cache=TraceCache())
    (one,) = (child for child in cache_folder.iterdir())
    open_trace(other, cache=TraceCache())
    (two,) = (child for child in cache_folder.iterdir() if child != one)
    gc.collect()
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)

    assert open_trace(file, cache=TraceCache()).operators.equals(right)


def test_a_file_in_place_of_an_entry_is_replaced(tmp_path: Path, cache_folder: Path) -> None:
    file = written(tmp_path / "trace.json")
    open_trace(file, cache=TraceCache())
    gc.collect()
    (entry,) = cache_folder.iterdir()
    shutil.rmtree(entry)
    entry.write_bytes(b"in the way")

    open_trace(file, cache=TraceCache())

    assert entry.is_dir()


def test_damage_that_comes_after_opening_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = Recording()
    for number in range(100):
        recording.operator(10 * number, 5, f"aten::op{number}")
    recording.trace().save(tmp_path / "store")

    def opened_then_damaged(*_: object, **__: object) -> object:
        trace = open_store(tmp_path / "store")
        trace.scan("operators")
        table = tmp_path / "store" / "operators-00000.parquet"
        table.write_bytes(bytes(table.stat().st_size))
        return trace

    monkeypatch.setattr("stepscope.readers.open_trace", opened_then_damaged)

    assert main(["operators", str(tmp_path / "store")]) == 2

    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "operators-00000.parquet" in err
