"""Opening a study: many at once, and places that are none."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.tune.study import open_study


@pytest.mark.slow
def test_each_waiting_trial_is_taken_once_however_many_ask(tmp_path: Path) -> None:
    place = tmp_path / "study.db"
    with ThreadPoolExecutor(4) as threads:
        studies = list(threads.map(lambda number: open_study(place, "shared"), range(4)))
        for number in range(40):
            studies[0].enqueue_trial({}, user_attrs={"number": number})

        def take(number: int) -> list[int]:
            taken = []
            for _ in range(10):
                trial = studies[number].ask()
                taken.append(trial.user_attrs["number"])
                studies[number].tell(trial, float(number))
            return taken

        taken = [each for found in threads.map(take, range(4)) for each in found]
    assert sorted(taken) == list(range(40))
    assert len(open_study(f"sqlite:///{place}", "shared", create=False).trials) == 40


def test_a_study_that_is_not_there(tmp_path: Path) -> None:
    place = tmp_path / "study.db"
    open_study(place, "one")
    with pytest.raises(UsageError, match=r"study\.db has no study 'other'; it has one$"):
        open_study(place, "other", create=False)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    place = tmp_path / "notes.txt"
    place.write_text("no database, but long enough for its first page " * 10)
    with pytest.raises(UsageError, match=r"notes\.txt cannot be opened: file is not a database$"):
        open_study(place, "one")
    assert place.read_text().startswith("no database")


def test_a_database_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "other.db"
    with sqlite3.connect(place) as database:
        database.execute("CREATE TABLE birds (name TEXT)")
    with pytest.raises(UsageError, match="but not Optuna's: it has the tables birds"):
        open_study(place, "one")
    with sqlite3.connect(place) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("birds",)]


def test_a_url_of_nothing_does_not_show_its_password(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the study in strange://host/name cannot be opened") as caught:
        open_study("strange://alice:hunter2@host/name", "one")
    assert "hunter2" not in str(caught.value)


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    open_study(tmp_path / "a" / "b" / "study.db", "one")
    assert (tmp_path / "a" / "b" / "study.db").is_file()
