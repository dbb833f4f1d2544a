"""What is kept of the source files that a recording's lines name."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import pytest

from stepscope.record.recorder import _keep_sources
from stepscope.record.run_process import RUN_OPTIONS
from stepscope.trace import line_records
from stepscope.trace.line_records import (
    LARGEST_BYTES,
    LineRecords,
    Location,
    kept_source,
    packed_sources,
    unpacked,
    write_lines,
)

LATER = 2**61


def records(*files: Path, start_unix_ns: int = LATER) -> LineRecords:
    places = [Location(str(file), 1, "main") for file in files]
    return LineRecords(process=1, start_unix_ns=start_unix_ns, end_unix_ns=LATER, locations=places, threads=[])


def test_the_text_is_kept_beside_the_trace(tmp_path: Path) -> None:
    source, trace = tmp_path / "train.py", tmp_path / "trace.json"
    source.write_bytes("# coding: latin-1\nname = 'é'\n".encode("latin-1"))
    lines = records(source)

    _keep_sources(lines)
    write_lines(lines, trace)

    assert kept_source(trace, str(source)) == "# coding: latin-1\nname = 'é'\n"
    assert kept_source(trace, "other.py") is None
    assert kept_source(tmp_path / "none.json", str(source)) is None
    if os.name == "posix":
        assert (tmp_path / "trace.json.lines").stat().st_mode & 0o077 == 0


def test_nothing_is_kept_of_a_run_that_shall_name_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "train.py"
    source.write_text("secret = 1\n")
    monkeypatch.setenv(RUN_OPTIONS, '{"redact": true}')
    lines = records(source)

    _keep_sources(lines)

    assert lines.sources == {}


def test_only_small_regular_files_that_the_program_can_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, large, binary, newer = (tmp_path / name for name in ("good.py", "large.py", "binary.py", "newer.py"))
    good.write_text("x = 1\n")
    large.write_text("#" * (LARGEST_BYTES + 1))
    binary.write_bytes(b"\xff\xfe\x00")
    newer.write_text("x = 2\n")
    os.utime(newer, ns=(LATER, LATER))
    files = [good, large, binary, tmp_path, tmp_path / "none.py", *([os.devnull] if sys.platform != "win32" else [])]
    begin = good.stat().st_mtime_ns

    assert list(packed_sources([*map(str, files), "nul\0.py"], begin)) == [str(good)]
    assert not packed_sources([str(good)], begin - 1)
    monkeypatch.setattr(line_records, "MOST_BYTES", 10)
    assert list(packed_sources([str(good), str(newer)], LATER)) == [str(good)]


def test_damaged_and_endless_texts_are_none() -> None:
    assert unpacked(b"no") is None
    assert unpacked(zlib.compress(b"x" * 100)[:-3]) is None
    assert unpacked(zlib.compress(b" " * (16 * LARGEST_BYTES))) is None
    assert unpacked(zlib.compress(b"\xff")) is None
