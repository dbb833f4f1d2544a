"""Exports of Nsight Systems are read the same from the pages by the compiled scanner and by SQLite, damaged or not."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.readers import open_trace
from stepscope.readers.kineto import scanned
from stepscope.readers.nsight_systems import database
from stepscope.trace.tables import SCHEMAS
from tests.fuzz import seeds
from tests.fuzz.containers import changed_database, raw_bytes
from tests.simulator import programs
from tests.simulator.nsight_systems import write_nsight

pytestmark = pytest.mark.skipif(not scanned.is_built(), reason="the scanner was not built: there is no compiler")
TRIES = int(os.environ.get("STEPSCOPE_TRIES", "50"))
FIRST = int(os.environ.get("STEPSCOPE_FIRST", "0"))


def outcome(path: Path, monkeypatch: pytest.MonkeyPatch, *, least_bytes: int) -> tuple[Any, ...]:
    monkeypatch.setattr(database, "LEAST_BYTES", least_bytes)
    try:
        trace = open_trace(path)
    except StepscopeError as error:
        return type(error), str(error)
    return trace.metadata, trace.warnings, {table: trace.table(table) for table in SCHEMAS}


def check_both(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = (outcome(path, monkeypatch, least_bytes=least) for least in (0, 2**62))
    assert fast[:2] == plain[:2]
    if len(plain) == 3:
        assert [name for name in SCHEMAS if not fast[2][name].equals(plain[2][name])] == []


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch of rows that is asked of the scanner was accepted; filled later."""
    accepted: list[bool] = []

    def rows(*given: Any) -> scanned.SqliteRows | None:
        found = scan(*given)
        accepted.append(found is not None)
        return found

    scan = scanned.sqlite_rows
    monkeypatch.setattr(scanned, "sqlite_rows", rows)
    return accepted


def with_page_size(path: Path, size: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA page_size={size}")
        connection.execute("VACUUM")


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
@pytest.mark.parametrize("batch_rows", [1, 7, 50_000])
def test_a_whole_file_is_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, batch_rows: int
) -> None:
    path = write_nsight(programs.two_queue_dependency(4), tmp_path / "whole.sqlite")
    with_page_size(path, page_size)
    monkeypatch.setattr(database, "BATCH_ROWS", batch_rows)
    accepted = counted(monkeypatch)

    check_both(path, monkeypatch)

    assert sum(accepted) > 5
    assert accepted.count(False) < 10


def test_values_that_sqlite_changes_or_keeps_elsewhere_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "odd.sqlite"
    values = [1, -1, 2**62, -(2**63), 2.0, 2.5, "7", "a\0b", "ü" * 30, "x" * 5000, b"\xff\x00", None]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a, b REAL, c TEXT, d INTEGER PRIMARY KEY, e INT)")
        connection.execute("CREATE TABLE u (a) ")
        connection.execute("CREATE TABLE w (a PRIMARY KEY, e) WITHOUT ROWID")
        connection.executemany("INSERT INTO t (a, b, c, e) VALUES (?, ?, ?, ?)", [(v, 3, v, v) for v in values])
        connection.executemany("INSERT INTO u VALUES (?)", [(3,), (4,)])
        connection.execute("ALTER TABLE u ADD COLUMN e INT DEFAULT 5")
        connection.execute("INSERT INTO w VALUES (1, 2)")
        connection.commit()
    wanted = dict.fromkeys("abde", pl.Int64) | {"c": pl.String, "absent": pl.String}
    monkeypatch.setattr(database, "BATCH_ROWS", 1)
    found = []
    for least in (0, 2**62):
        monkeypatch.setattr(database, "LEAST_BYTES", least)
        damage: Counter[str] = Counter()
        with database.Database(path, "odd", damage) as opened:
            for table in "tuw":
                for columns in ({name: wanted[name]} for name in wanted):
                    found.append((least, [each.rows() for each in opened.batches(table, columns)], dict(damage)))
    half = len(found) // 2
    assert [each[1:] for each in found[:half]] == [each[1:] for each in found[half:]]


@pytest.mark.slow
def test_changed_files_are_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "changed.sqlite"
    whole = [next(iter(case.files.values())) for case in seeds.nsight_systems()]
    small = []
    for data in whole:
        path.write_bytes(data)
        with_page_size(path, 512)
        small.append(path.read_bytes())
    accepted = counted(monkeypatch)
    for number in range(TRIES):
        random = Random(f"pages {FIRST + number}")
        data = random.choice(small if random.random() < 0.7 else whole)
        path.write_bytes(changed_database(random, data) if random.random() < 0.4 else raw_bytes(random, data))
        monkeypatch.setattr(database, "BATCH_ROWS", random.choice((3, 50, 50_000)))
        try:
            check_both(path, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"input {FIRST + number}: {error}") from error
    assert sum(accepted) > TRIES


@pytest.mark.traces
@pytest.mark.slow
def test_real_files_are_read_the_same(traces_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(traces_folder.rglob("*.sqlite"))
    accepted = counted(monkeypatch)
    for path in files:
        check_both(path, monkeypatch)
    assert sum(accepted) > len(files)
