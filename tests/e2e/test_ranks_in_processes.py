"""Many ranks are diagnosed in processes: the answer is the same, and one bad rank stops nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.commands.read import reports
from stepscope.commands.shared import processes
from stepscope.errors import UsageError
from tests.simulator.ranks import write_ranks

RANKS = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(reports, "_WORTHWHILE_BYTES", 0)
    monkeypatch.setattr(reports, "process_count", lambda files: 2)
    monkeypatch.setattr(processes, "process_count", lambda files, spared: 2)
    write_ranks(tmp_path / "ranks", RANKS, lambda step: 3)
    return tmp_path / "ranks"


def report(folder: Path, *words: str) -> Any:
    target = folder.parent / "report.json"
    assert main(["diagnose", str(folder), "--json", str(target), *words]) == 0
    return json.loads(target.read_text())


def test_processes_find_what_one_would_and_leave_nothing_to_do(folder: Path, asked: list[str]) -> None:
    found = report(folder, "--debug")
    assert asked == []
    assert [each["trace"]["rank"] for each in found["ranks"]] == list(range(RANKS))
    assert found["across_ranks"][0]["rule"] == "late-rank"
    assert "rank 3" in found["across_ranks"][0]["title"]
    assert report(folder, "--no-cache") == found
    assert asked


def test_a_damaged_rank_is_named_and_the_rest_answered(folder: Path) -> None:
    (folder / "rank1.json.gz").write_bytes(b"\x1f\x8b damaged")
    (folder / "rank2.json.gz").write_bytes(b"")
    found = report(folder)
    assert [each["trace"]["rank"] for each in found["ranks"]] == [0, 3, 4, 5]
    assert [Path(each["path"]).name for each in found["unreadable"]] == ["rank1.json.gz", "rank2.json.gz"]


def _ended_by(file: Path) -> str:
    """What is done for a file in a process, which some files end."""
    if "killed" in file.name:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raises" in file.name:
        raise ValueError(file.name)
    return file.name


def _cannot_begin() -> None:
    raise ImportError


def _begins() -> None:
    pass


def test_a_process_that_ends_takes_only_its_file_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "process_count", lambda files, spared: 2)
    names = ["0", "1 killed", "2 raises", "3 killed", "4", "5"]
    found = dict(processes.in_processes(_ended_by, [Path(name) for name in names], begin=_begins, given=()))
    assert found == {Path(name): name if " " not in name else None for name in names}


def test_processes_that_cannot_begin_are_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "process_count", lambda files, spared: 2)
    files = [Path("0"), Path("1")]
    assert dict(processes.in_processes(_ended_by, files, begin=_cannot_begin, given=())) == dict.fromkeys(files)


def test_a_program_on_standard_input_diagnoses_ranks(folder: Path) -> None:
    target = folder.parent / "report.json"
    program = (
        "from stepscope.commands import main\n"
        "from stepscope.commands.read import reports\n"
        "from stepscope.commands.shared import processes\n"
        "reports._WORTHWHILE_BYTES = 0\n"
        "reports.process_count = processes.process_count = lambda *_: 2\n"
        f"main(['diagnose', {str(folder)!r}, '--json', {str(target)!r}])\n"
    )
    done = subprocess.run([sys.executable], input=program, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(target.read_text())["ranks"]) == RANKS


def test_ranks_are_read_without_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as after <&-
    assert len(report(folder)["ranks"]) == RANKS


def test_only_new_ranks_are_worth_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(folder)
    started: list[Any] = []

    def begin(*_: Any, **__: Any) -> Any:
        started.append(1)
        return iter(())

    monkeypatch.setattr(reports, "in_processes", begin)
    report(folder, "--top", "3", "--debug")
    assert started == []


def test_processes_are_as_many_as_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}.json" for number in range(9)]
    for file in files:
        file.write_bytes(b"x" * 1000)
    monkeypatch.setattr("stepscope.readers.source.memory_limit", lambda: 2.5 * (300 << 20))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert processes.process_count(files) == 2
    monkeypatch.setattr("stepscope.readers.source.memory_limit", lambda: float(1 << 50))
    assert processes.process_count(files) == len(files)
    assert processes.process_count(files[:3], spared=62) == 2
    assert processes.process_count([], spared=99) == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Dask scheduler whose worker is in this process."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=None) as found:
        yield found.scheduler_address


def test_a_cluster_finds_what_this_machine_would(folder: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "rank1.json.gz").write_bytes(b"\x1f\x8b damaged")
    monkeypatch.chdir(folder.parent)
    there = report(Path("ranks").absolute(), "--scheduler", cluster)
    assert there == report(folder)
    assert [Path(each["path"]).name for each in there["unreadable"]] == ["rank1.json.gz"]


def test_a_cluster_that_does_not_answer_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(processes, "_ANSWERS_WITHIN_S", 0.1)
    for words in (
        ["--scheduler", "tcp://127.0.0.1:9"],
        ["--scheduler", "nothing://x"],
        ["--scheduler", "x", "--html", "-"],
    ):
        assert main(["diagnose", str(folder), *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_dask_its_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"stepscope\[cluster\]"):
        list(processes.on_cluster(_ended_by, [folder], (), "tcp://127.0.0.1:9"))
