"""The file of telemetry: what goes in comes out, whatever happens to the process that writes it."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.errors import UsageError
from stepscope.record.telemetry import store
from stepscope.record.telemetry.store import Missing, Sample, Series, TelemetryStore, Writer
from stepscope.trace import telemetry as reading
from stepscope.trace.telemetry import MISSING_SCHEMA, SAMPLE_SCHEMA, read_telemetry, telemetry_files

LOSS = Series("log", "loss")
POWER = Series("device", "power_w", "0", "W")
WRITE_AND_DIE = """
    import os, signal, sys, time
    from pathlib import Path
    from stepscope.record.telemetry.store import Sample, Series
    from stepscope.record.telemetry.store import Writer
    writer = Writer(Path(sys.argv[1]), {"rank": "0"})
    for step in range(100_000):
        writer.add(Sample(Series("log", "loss"), step, step, float(step)))
        if step % 1000 == 999:
            writer.flush()
            print(step, flush=True)
"""


def written(path: Path, samples: list[Sample], missing: list[Missing] | None = None) -> Path:
    made = TelemetryStore(path, {"rank": "3", "process": "77"})
    made.append(samples, missing or [])
    made.close()
    return path


def test_nothing_read_is_two_empty_tables() -> None:
    read = read_telemetry([])

    assert (read.samples.schema, read.missing.schema) == (pl.Schema(SAMPLE_SCHEMA), pl.Schema(MISSING_SCHEMA))
    assert read.samples.is_empty()
    assert read.missing.is_empty()


def test_writer_and_reader_speak_of_the_same_format() -> None:
    assert store.FORMAT_VERSION == reading.FORMAT_VERSION


def test_everything_comes_back(tmp_path: Path) -> None:
    # Given
    samples = [
        Sample(LOSS, 1, 10, 2.5),
        Sample(LOSS, 2, 11, math.nan),
        Sample(LOSS, 3, 12, math.inf),
        Sample(LOSS, 4, 13, -math.inf),
        Sample(POWER, 5, None, None),
        Sample(LOSS, 6, -1, 0.0),
    ]
    missing = [Missing(POWER, "not supported", 5), Missing(POWER, "not supported", 6), Missing(LOSS, "a list", 7)]

    # When
    read = read_telemetry([written(tmp_path / "1.sqlite", samples, missing)])

    # Then
    values = read.samples["value"].to_list()
    assert [str(value) for value in values] == ["2.5", "nan", "inf", "-inf", "None", "0.0"]
    assert read.samples["step"].to_list() == [10, 11, 12, 13, None, -1]
    assert read.samples.row(4) == (3, 77, "device", "power_w", "0", "W", 5, None, None)
    assert sorted(read.missing.rows()) == [
        (3, "device", "power_w", "0", "not supported", 2),
        (3, "log", "loss", None, "a list", 1),
    ]


def test_a_closed_file_stands_alone(tmp_path: Path) -> None:
    written(tmp_path / "1.sqlite", [Sample(LOSS, 1, 0, 1.0)])

    assert os.listdir(tmp_path) == ["1.sqlite"]


def test_reading_while_it_grows(tmp_path: Path) -> None:
    # Given
    made = TelemetryStore(tmp_path / "1.sqlite", {"rank": "0"})

    # When, then
    for count in (1, 2, 3):
        made.append([Sample(Series("log", f"series {count}"), count, count, 1.0)])
        assert read_telemetry([tmp_path / "1.sqlite"]).samples.height == count
    made.close()


def test_a_failed_append_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    # Given
    made = TelemetryStore(tmp_path / "1.sqlite", {"rank": "0"})

    # When
    with pytest.raises(sqlite3.Error):
        made.append([Sample(LOSS, 1, 1, 1.0), Sample(POWER, [], 1, 1.0)])  # type: ignore[arg-type]
    made.append([Sample(POWER, 2, 2, 2.0)])
    made.close()

    # Then
    assert read_telemetry([tmp_path / "1.sqlite"]).samples.select("name", "value").rows() == [("power_w", 2.0)]


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path) -> None:
    # Given
    command = [sys.executable, "-c", textwrap.dedent(WRITE_AND_DIE), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[3])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(3)][-1]

    # When
    process.send_signal(signal.SIGKILL)
    process.wait()

    # Then
    samples = read_telemetry(telemetry_files(tmp_path)).samples
    assert samples.height > seen
    assert samples["value"].to_list() == [float(step) for step in range(samples.height)]


def test_a_log_in_a_folder_that_cannot_be_written_is_read_from_a_copy(tmp_path: Path) -> None:
    # Given: a file with its log, as a killed process leaves it
    made = TelemetryStore(tmp_path / "live.sqlite", {"rank": "0"})
    made.append([Sample(LOSS, 1, 1, 1.0)])
    frozen = tmp_path / "frozen"
    frozen.mkdir()
    for ending in ("", "-wal"):
        (frozen / f"1.sqlite{ending}").write_bytes((tmp_path / f"live.sqlite{ending}").read_bytes())
    made.close()
    frozen.chmod(0o500)

    # When, then
    try:
        assert read_telemetry([frozen / "1.sqlite"]).samples["value"].to_list() == [1.0]
    finally:
        frozen.chmod(0o700)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "no telemetry of stepscope"), (b"not a database at all" * 100, "not a database")],
    ids=["empty", "text"],
)
def test_what_is_no_telemetry_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "1.sqlite").write_bytes(content)

    with pytest.raises(UsageError, match=complaint):
        read_telemetry([tmp_path / "1.sqlite"])


def test_a_damaged_file_does_not_hide_the_others(tmp_path: Path) -> None:
    # Given
    written(tmp_path / "1.sqlite", [Sample(LOSS, 1, 0, 1.0)])
    (tmp_path / "2.sqlite").write_bytes(b"x" * 5000)

    # When
    read = read_telemetry(telemetry_files(tmp_path))

    # Then
    assert read.samples.height == 1
    assert [(each.kind, "2.sqlite could not be read" in each.detail) for each in read.warnings] == [("telemetry", True)]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(written(tmp_path / "1.sqlite", [])) as connection:
        connection.execute("UPDATE about SET value = '2' WHERE key = 'format'")

    with pytest.raises(UsageError, match="its format is '2', and this stepscope reads 1"):
        read_telemetry([tmp_path / "1.sqlite"])


def test_values_of_another_type_are_null(tmp_path: Path) -> None:
    # Given
    path = written(tmp_path / "1.sqlite", [Sample(LOSS, 1, 0, 1.0)])
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO samples VALUES (?, ?, ?, ?)", [(0, 2, "x", b"blob"), (0, 3, 1, "<b>"), ("y", 4, 1, 1.0)]
        )

    # When, then
    read = read_telemetry([path]).samples
    assert read.select("unix_ns", "step", "value").rows() == [(1, 0, 1.0), (2, None, None), (3, 1, None)]


def test_files_are_found_from_a_run_a_rank_a_file_and_a_trace(tmp_path: Path) -> None:
    # Given
    folder = tmp_path / "rank1" / "telemetry"
    folder.mkdir(parents=True)
    file = written(folder / "1.sqlite", [])
    (tmp_path / "rank1" / "trace-1.json.gz").touch()

    # When, then
    for place in (tmp_path, tmp_path / "rank1", folder, file, tmp_path / "rank1" / "trace-1.json.gz"):
        assert telemetry_files(place) == [file]
    assert telemetry_files(tmp_path / "nowhere") == []


def test_a_disk_that_takes_nothing_is_complained_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Given: a file where the folder should be
    (tmp_path / "telemetry").write_text("in the way")
    writer = Writer(tmp_path / "telemetry", {"rank": "0"})

    # When
    for step in range(3):
        writer.add(Sample(LOSS, step, step, 1.0))
        writer.flush()
    complaint = capsys.readouterr().err
    (tmp_path / "telemetry").unlink()
    writer.close()

    # Then: one sentence, and nothing was lost
    assert complaint.count("\n") == 1
    assert complaint.startswith("stepscope: telemetry cannot be written into ")
    assert read_telemetry(telemetry_files(tmp_path)).samples["step"].to_list() == [0, 1, 2]


def test_rows_beyond_what_memory_may_hold_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given
    monkeypatch.setattr("stepscope.record.telemetry.store.MAXIMUM_WAITING", 5)
    (tmp_path / "telemetry").write_text("in the way")
    writer = Writer(tmp_path / "telemetry", {"rank": "0"})
    for step in range(8):
        writer.add(Sample(LOSS, step, step, 1.0))
    writer.flush()

    # When
    (tmp_path / "telemetry").unlink()
    writer.close()

    # Then
    read = read_telemetry(telemetry_files(tmp_path))
    assert read.samples["step"].to_list() == [3, 4, 5, 6, 7]
    assert read.missing["reason"].to_list() == ["3 rows were lost while the disk accepted none"]


def test_a_write_that_hangs_is_not_waited_for_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LONGEST_WAIT_S", 0.01)
    writer, over, begun = Writer(tmp_path, {}), threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        over.wait(10)

    monkeypatch.setattr(TelemetryStore, "append", hang)
    writer.lacks(LOSS, "a reason")
    hanging = threading.Thread(target=writer.flush)
    hanging.start()
    begun.wait(10)
    writer.close()
    is_waiting = hanging.is_alive()
    over.set()
    hanging.join()

    assert is_waiting


def test_a_finalizer_may_log_while_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, appended = Writer(tmp_path, {"rank": "0"}), TelemetryStore.append

    def append(self: TelemetryStore, *rows: Any) -> None:
        writer.add(Sample(LOSS, 2, 2, 2.0))
        writer.flush()
        appended(self, *rows)

    monkeypatch.setattr(TelemetryStore, "append", append)
    writer.add(Sample(LOSS, 1, 1, 1.0))
    writer.flush()
    monkeypatch.setattr(TelemetryStore, "append", appended)
    writer.close()

    assert read_telemetry(telemetry_files(tmp_path)).samples["step"].to_list() == [1, 2]
