"""The log of watched jobs: what is kept, how much, and what becomes of a damaged file."""

from __future__ import annotations

import logging
import sqlite3
import stat
from pathlib import Path

import pytest

from stepscope.record import watch_log
from stepscope.record.watch_log import AlertEvent, Watched, WatchLog


@pytest.fixture
def log(tmp_path: Path) -> WatchLog:
    return WatchLog(tmp_path / "watch.sqlite")


def test_nothing_is_there_and_nothing_is_made(log: WatchLog) -> None:
    assert log.jobs() == {}
    assert not log.path.exists()


def test_recordings_come_back_as_they_were_in_order_of_time(log: WatchLog) -> None:
    event = AlertEvent("step_ms > 3", "firing", 4.0, 3.0, "step_ms is 4")
    first = Watched(job="a", unix_s=1.0, step_ns=4e6, causes={"input": 1.5}, events=(event,), traces=("t",))
    second = Watched(job="a", unix_s=2.0, problem="nobody answers")
    log.put(second, first)
    log.put(Watched(job="b", unix_s=3.0))

    assert log.of("a", last=9) == [first, second]
    assert log.of("a", last=1) == [second]
    assert log.jobs() == {"b": 3.0, "a": 2.0}
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_recording_of_the_same_time_is_replaced(log: WatchLog) -> None:
    log.put(Watched(job="a", unix_s=1.0, traces=("t",)))
    log.put(Watched(job="a", unix_s=1.0))
    assert [each.traces for each in log.of("a", last=9)] == [()]


def test_the_oldest_are_forgotten(log: WatchLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_log, "MOST_ROWS", 3)
    log.put(*(Watched(job="ab"[number % 2], unix_s=float(number)) for number in range(6)))
    assert [each.unix_s for job in "ab" for each in log.of(job, last=9)] == [4.0, 3.0, 5.0]


def test_a_damaged_row_is_left_out_and_told(log: WatchLog, caplog: pytest.LogCaptureFixture) -> None:
    log.put(Watched(job="a", unix_s=1.0), Watched(job="a", unix_s=2.0))
    with sqlite3.connect(log.path) as database:
        database.execute(
            "update recordings set content = replace(content, '\"steps\":0', '\"steps\":7') where unix_s = 1"
        )
    database.close()
    with caplog.at_level(logging.WARNING, "stepscope.kept"):
        assert [each.unix_s for each in log.of("a", last=9)] == [2.0]
    assert [record.getMessage().count("1 of 2 rows") for record in caplog.records] == [1]


def test_a_damaged_time_hides_no_other_job(log: WatchLog) -> None:
    log.put(Watched(job="a", unix_s=1.0), Watched(job="b", unix_s=2.0))
    with sqlite3.connect(log.path) as database:
        database.execute("update recordings set unix_s = 'x' where job = 'a'")
    database.close()
    assert log.jobs() == {"b": 2.0}


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""])
def test_a_damaged_file_is_set_aside(log: WatchLog, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    log.path.write_bytes(content)
    log.put(Watched(job="a", unix_s=1.0))
    assert log.jobs() == {"a": 1.0}
    aside = log.path.with_name("watch.sqlite.damaged")
    assert (aside.exists(), len(caplog.records)) == (bool(content), bool(content))


def test_another_programs_database_is_set_aside(log: WatchLog) -> None:
    with sqlite3.connect(log.path) as database:
        database.execute("create table recordings (name text)")
    database.close()
    assert log.of("a", last=1) == []
    assert log.path.with_name("watch.sqlite.damaged").exists()
