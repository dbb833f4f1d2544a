"""What the page says of a run that goes on, what it records anew, and ranks by their summaries."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.commands.record import attach
from stepscope.commands.view.command import COMMAND
from stepscope.commands.view.pages import Job, Page
from stepscope.commands.view.runs import Runs
from stepscope.diagnosis.rank_summary import RankSummary
from stepscope.errors import AgentError, UnreadableTraceError, UsageError
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.runs import RunIndex
from stepscope.record.watch_log import Watched, WatchLog
from stepscope.trace.metadata import Metadata
from stepscope.view.documents import NoDocument
from tests.e2e.conftest import run_here
from tests.simulator.ranks import write_ranks

REPORT = {"world_size": 1, "steps_seen": 12, "complete": False}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run() -> RunFolder:
    """A run that has begun."""
    manifest = RunManifest.begin(["python", "train.py"], 1.0, options={"steps": 5, "serve": True}, redact=False)
    return RunFolder.create(None, "watched", manifest)


def test_progress_says_what_is_awaited(run: RunFolder) -> None:
    # Given, when, then
    def said() -> str:
        return str(Runs().progress(run.path)["sentence"])

    assert "not started Python" in said()
    run.sign("python")
    assert "neither torch nor jax" in said()
    run.sign("torch")
    assert "first steps are awaited" in said()
    run.new_trace_path(0).write_bytes(b"")
    run.write_recording(0, REPORT)
    progress = Runs().progress(run.path)
    assert "timed without the profiler" in progress["sentence"]
    assert (progress["steps_seen"], progress["traces"], progress["is_complete"]) == (12, 1, False)
    run.write_recording(0, {**REPORT, "complete": True})
    assert Runs().progress(run.path)["is_complete"] is True


def test_a_run_that_long_wrote_nothing_may_have_been_killed(run: RunFolder) -> None:
    run.sign("torch")
    for place in (run.path, *run.path.rglob("*")):
        os.utime(place, (1.0, 1.0))
    assert "may have been killed" in Runs().progress(run.path)["sentence"]
    RunIndex().add(run)
    [row] = Runs().table()
    assert row["quiet_s"] > 10**9


def test_what_has_ended_cannot_be_recorded(run: RunFolder) -> None:
    assert "from its first step on" in Runs().progress(run.path)["why_not"]
    run.write_manifest(run.manifest().ended(2.0, 1, [{**REPORT, "problem": "no step was seen"}]))
    run.write_recording(0, {**REPORT, "problem": "no step was seen"})
    progress = Runs().progress(run.path)
    assert (progress["has_ended"], progress["can_capture"]) == (True, False)
    assert progress["sentence"] == "no step was seen"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Recordings last until the event, and fail by what is in the list."""
    done, problems = threading.Event(), list[str]()

    def recording(target: str) -> Callable[[], None]:
        def record() -> None:
            assert done.wait(60)
            if problems:
                raise AgentError(problems[0])

        return record

    monkeypatch.setattr(attach, "recording_of_run", recording)
    return done, problems


def capture_of(runs: Runs, run: RunFolder) -> Any:
    while not (capture := runs.progress(run.path)["capture"])["is_over"]:
        pass
    return capture


def test_one_recording_is_made_at_a_time(run: RunFolder, recorded: tuple[threading.Event, list[str]]) -> None:
    # Given
    runs = Runs()
    assert runs.capture(run.path) == {"name": "watched"}
    assert runs.progress(run.path)["capture"] == {"is_over": False, "problem": None}

    # When, then
    with pytest.raises(UsageError, match="wait until it is done"):
        runs.capture(run.path)
    recorded[0].set()
    assert capture_of(runs, run) == {"is_over": True, "problem": None}
    runs.capture(run.path)


def test_why_a_recording_failed_is_said(run: RunFolder, recorded: tuple[threading.Event, list[str]]) -> None:
    recorded[0].set()
    recorded[1].append("nothing was recorded")
    runs = Runs()
    runs.capture(run.path)
    assert capture_of(runs, run)["problem"] == "nothing was recorded"


def test_runs_of_others_are_not_recorded(
    run: RunFolder, recorded: tuple[threading.Event, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: run.path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="another user"):
        Runs().capture(run.path)


def test_a_run_whose_folder_is_gone_cannot_be_recorded(run: RunFolder) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(UsageError, match="not a run folder"):
        Runs().capture(run.path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_what_is_no_file_is_no_trace_of_a_run(run: RunFolder) -> None:
    path = run.new_trace_path(0)
    os.mkfifo(path)
    assert run.latest_traces() == []
    path.unlink()
    path.symlink_to(path.name)
    assert run.traces() == []


def test_a_program_without_an_agent_cannot_be_recorded(run: RunFolder) -> None:
    with pytest.raises(AgentError, match="has no agent"):
        Runs().capture(run.path)


def test_a_page_of_a_run_without_a_trace_shows_runs(run: RunFolder) -> None:
    page = Page(COMMAND.parsed([str(run.path)]))
    page.open()
    session = page.document("session", {})
    assert (session["documents"], session["title"]) == (["runs"], "watched")


class ListedRuns(Runs):
    """Runs of two ranks each, of which none is a file."""

    ranks = 2

    def meant(self, name: str) -> Path:
        return Path(name)

    def traces(self, run: Path) -> list[Path]:
        return [run / f"rank{rank}" for rank in range(self.ranks)]


def test_runs_looked_at_in_turn_are_read_on_until_they_are_too_many() -> None:
    runs = ListedRuns()
    page = Page(COMMAND.parsed([]), runs)
    first, second = page.job({"run": "a"}), page.job({"run": "b"})
    assert page.job({"run": "a"}) is first
    assert page.job({"run": "b"}) is second
    runs.ranks = 3
    assert page.job({"run": "a"}) is not first
    assert (first.is_stopped, second.is_stopped) == (True, False)
    for number in range(8):
        page.job({"run": str(number)})
    assert second.is_stopped


def test_a_run_that_is_left_has_no_open_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "read", lambda job, file: SimpleNamespace(trace=SimpleNamespace(metadata=Metadata())))
    page = Page(COMMAND.parsed([]), ListedRuns())
    opened = page.job({"run": "a"}).opened({})
    assert page.job({"run": "a"}).opened({}) is opened
    page.job({"run": "b"})
    assert page.job({"run": "a"}).opened({}) is not opened


def test_a_trace_has_no_runs_where_there_are_none(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1, late=lambda step: 0)
    page = Page(COMMAND.parsed([str(tmp_path / "rank0.json.gz")]))
    assert "runs" not in page.document("session", {})["documents"]
    assert not (tmp_path / "data").exists()


def test_a_page_shows_watched_jobs_the_one_recorded_last_first(run: RunFolder) -> None:
    WatchLog().put(
        Watched(job="a", unix_s=1.0, step_ns=2e6, causes={"input": 1.0}),
        Watched(job="a", unix_s=2.0, problem="nobody answers"),
        Watched(job="b", unix_s=1.5),
    )
    page = Page(COMMAND.parsed([]))
    assert page.document("session", {})["documents"] == ["runs", "watch"]
    shown = page.document("watch", {})
    assert ([each["name"] for each in shown["jobs"]], shown["shown"]) == (["a", "b"], "a")
    assert [line.split("  ", 1)[1] for line in shown["lines"]] == ["step 2.0 ms", "nobody answers"]
    assert [each["unix_s"] for each in shown["recordings"]] == [1.0, 2.0]
    assert page.document("watch", {"job": "b"})["shown"] == "b"
    with pytest.raises(NoDocument, match="no job 'c' is watched"):
        page.document("watch", {"job": "c"})


def test_ranks_that_were_diagnosed_are_shown_without_their_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given six ranks, the second of which is late, one of them damaged
    folder = tmp_path / "ranks"
    write_ranks(folder, 6, late=lambda step: 1)
    (folder / "rank4.json.gz").write_bytes(b"\x1f\x8b")
    assert run_here("diagnose", folder).code == 0

    # When a page shows them that cannot read any
    def read(job: Job, file: Path) -> None:
        tried.append(file.name)
        raise UnreadableTraceError(f"{file} cannot be read")

    tried: list[str] = []
    monkeypatch.setattr(Job, "read", read)
    monkeypatch.setitem(vars(sys.modules[Job.__module__]), "_MOST_DIAGNOSED", 0)
    page = Page(COMMAND.parsed([str(folder)]))
    shown = page.document("ranks", {})
    while shown["read"] < shown["of"]:
        shown = page.document("ranks", {})

    # Then
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3, 5]
    assert set(shown["slowest"]) == {1}
    assert (shown["cause"], shown["of"]) == ("late", 6)
    assert (tried, len(shown["unreadable"])) == (["rank4.json.gz"], 1)
    assert all(ns == 400_000 for ns in shown["ns"][1])


def test_a_rank_whose_process_ends_is_named_and_the_others_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_processes(work: object, files: list[Path], **_: object) -> Iterator[tuple[Path, RankSummary | str | None]]:
        yield files[0], None
        yield from ((file, job.summary(file)) for file in files[1:])

    write_ranks(tmp_path, 5, late=lambda step: 1)
    arguments = COMMAND.parsed([str(tmp_path)])
    job = Job(arguments, str(tmp_path))
    monkeypatch.setitem(vars(sys.modules[Job.__module__]), "in_processes", in_processes)
    monkeypatch.setitem(vars(sys.modules[Job.__module__]), "_MOST_DIAGNOSED", 0)
    shown = job.ranks.document({})
    while shown["read"] < shown["of"]:
        shown = job.ranks.document({})
    assert [rank["rank"] for rank in shown["ranks"]] == [1, 2, 3, 4]
    [sentence] = shown["unreadable"]
    assert "rank0" in sentence


def test_a_rank_promises_what_the_job_saves_once_all_are_diagnosed(tmp_path: Path) -> None:
    # Given three ranks, of which two wait for the last
    write_ranks(tmp_path, 3, late=lambda step: 2)
    job = Job(COMMAND.parsed([str(tmp_path)]), str(tmp_path))
    alone = job.document("diagnosis", {})

    # When all are diagnosed
    shown = job.ranks.document({})
    while shown["diagnosing"]:
        time.sleep(0.02)
        shown = job.ranks.document({})
    promised = job.document("diagnosis", {"job": "yes"})

    # Then waiting saves nothing by itself, and the late rank's finding saves the job most
    assert [each["rule"] for each in shown["findings"]] == ["late-rank"]
    assert max(shown["saves_ns"]) == shown["saves_ns"][2] == 400_000
    assert (alone["steps"]["job_step_ns"], promised["steps"]["job_step_ns"]) == (None, 893_000)
    assert promised["findings"][0]["saving_ns_per_step"] < alone["findings"][0]["saving_ns_per_step"] / 2
