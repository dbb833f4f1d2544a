"""A run's folder: its names, its traces, and what its processes leave in it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest

from stepscope import guard
from stepscope.commands import main
from stepscope.errors import UsageError
from stepscope.record import launch, run_folder
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder, data_folder, is_run_folder

MANIFEST = RunManifest(command=("python", "src/train.py"), started_unix_s=1_700_000_000.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "first", MANIFEST)


def test_a_new_folder_is_empty(folder: RunFolder, tmp_path: Path) -> None:
    assert folder.path == tmp_path / "first"
    assert (folder.name, folder.ranks(), folder.traces(), folder.recordings()) == ("first", [], [], [])
    assert folder.manifest() == MANIFEST
    assert is_run_folder(folder.path)
    assert not folder.was_seen("torch")


def test_a_name_of_its_own_making_is_never_taken(tmp_path: Path) -> None:
    first, second = RunFolder.create(tmp_path, None, MANIFEST), RunFolder.create(tmp_path, None, MANIFEST)

    assert first.name.startswith("train-20231114-") or first.name.startswith("train-20231115-")
    assert second.name == f"{first.name}-2"


def test_a_name_that_is_taken(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"already a run 'first' in"):
        RunFolder.create(tmp_path, "first", MANIFEST)


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "a/b", "-x", ".hidden", "a b", "x" * 101, "a\n"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a run's name"):
        RunFolder.create(tmp_path, name, MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_opening_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run folder: it has no run\.json"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"command": 3}', '{"command": [7]}', "[" * 9000])
def test_a_damaged_manifest(folder: RunFolder, content: str) -> None:
    (folder.path / "run.json").write_text(content)

    with pytest.raises(UsageError, match=r"run\.json is damaged"):
        folder.manifest()


def test_traces_are_in_order_and_the_latest_of_each_rank_is_known(folder: RunFolder) -> None:
    for rank in (10, 2):
        for _ in range(11 if rank == 2 else 1):
            folder.new_trace_path(rank).touch()
    (folder.rank_folder(2) / "trace-3.json.gz.lines").touch()
    (folder.path / "rank3").mkdir()

    names = [str(path.relative_to(folder.path)) for path in folder.traces()]
    assert names == [*(f"rank2/trace-{number}.json.gz" for number in range(1, 12)), "rank10/trace-1.json.gz"]
    assert [path.parent.name for path in folder.latest_traces()] == ["rank2", "rank10"]
    assert folder.latest_traces()[0].name == "trace-11.json.gz"
    assert folder.ranks() == [2, 3, 10]


def test_no_two_are_given_the_same_trace(folder: RunFolder) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(folder.new_trace_path, [0] * 40))

    assert len(set(paths)) == 40


def test_words_of_the_processes(folder: RunFolder) -> None:
    folder.write_recording(1, {"steps": 3})
    (folder.path / "rank1" / "recording-0.json").write_text("{ half")
    folder.sign("torch")

    assert folder.recordings() == [{"steps": 3, "rank": 1}]
    assert folder.was_seen("torch")


def test_where_data_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path))
    assert data_folder() == tmp_path

    monkeypatch.delenv("STEPSCOPE_DATA_DIR")
    assert data_folder().name == "stepscope"


@pytest.fixture(params=["ENOSPC", "EIO", "EDQUOT", "EROFS"])
def full(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes every file of a run fail as it is written; returns what the system says."""
    number = getattr(errno, request.param)

    @contextlib.contextmanager
    def whole_file(path: Path, *, private: bool = False) -> Iterator[BytesIO]:
        yield BytesIO()
        raise OSError(number, os.strerror(number), str(path))

    def begin() -> str:
        monkeypatch.setattr(run_folder, "whole_file", whole_file)
        return os.strerror(number)

    return begin


def test_a_program_whose_run_cannot_be_written_runs_as_it_is(
    full: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        launch, "run_program", lambda command, environment: 7 if "STEPSCOPE_RUN" not in environment else 1
    )
    script = tmp_path / "train.py"
    script.touch()
    why = full()

    assert main(["run", "--folder", str(tmp_path / "runs"), "--no-diagnose", str(script)]) == 7
    told = capsys.readouterr().err
    assert why in told
    assert "nothing is recorded" in told


@pytest.mark.fails
def test_a_process_that_cannot_write_its_outcome_goes_on(
    full: Callable[[], str], folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    why = full()

    assert _ended(folder) is None
    told = capsys.readouterr().err
    assert (told.count("\n"), why in told, "details" in told) == (1, True, False)
    assert guard.has_failed()
    assert folder.recordings() == []


def _ended(folder: RunFolder) -> None:
    guard.replaced(lambda: None, lambda _: folder.write_recording(0, {"steps": 3}), "ended")()
