"""The index of runs, and the names that commands take."""

from __future__ import annotations

import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.commands import main
from stepscope.commands.shared.reading import open_from, trace_paths
from stepscope.errors import UsageError
from stepscope.readers import open_trace
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder, default_root
from stepscope.record.runs import OwnNames, RunIndex, own_names, run_named
from tests.unit.run_folders import made_run

SAMPLE = Path(__file__).parents[3] / "examples" / "gpt2_per_token_loss_cpu.json.gz"


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "160")


def made(name: str, started_unix_s: float = 10.0, root: Path | None = None) -> RunFolder:
    return RunFolder.create(root, name, RunManifest(command=("python", "train.py"), started_unix_s=started_unix_s))


def names() -> list[str]:
    return [record.name for record in RunIndex().all()]


def test_nothing_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_named("none") is None
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "There are no runs yet; stepscope run train.py records one.\n"


def test_the_latest_comes_first_and_changes_are_taken_up() -> None:
    old, new = made("old", 1.0), made("new", 2.0)
    for folder in (old, new):
        RunIndex().add(folder)
    old.write_manifest(old.manifest().ended(3.0, 4, []))
    RunIndex().add(old)

    assert names() == ["new", "old"]
    record = RunIndex().find("old")
    assert record is not None
    assert (record.exit_code, record.ended_unix_s, record.command) == (4, 3.0, "python train.py")


@pytest.mark.parametrize("damage", [None, b"", b"no database at all" * 100])
def test_a_lost_or_damaged_index_is_made_again(damage: bytes | None) -> None:
    RunIndex().add(made("a"))
    made("b")
    (default_root() / "no run").mkdir()
    broken = default_root() / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    path = RunIndex().path
    for file in path.parent.glob("runs.sqlite*"):
        file.unlink()
    if damage is not None:
        path.write_bytes(damage)

    assert sorted(names()) == ["a", "b"]


def test_another_programs_database_is_set_aside() -> None:
    made("a")
    path = RunIndex().path
    with sqlite3.connect(path) as other:
        other.execute("create table runs (x)")
    other.close()

    assert names() == ["a"]
    assert path.with_name("runs.sqlite.damaged").exists()


def test_many_at_once() -> None:
    folders = [made(f"r{number}") for number in range(30)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda folder: RunIndex().add(folder), folders))

    assert sorted(names()) == sorted(folder.name for folder in folders)


def test_a_folder_that_was_removed_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("lost")
    RunIndex().add(folder)
    shutil.rmtree(folder.path)

    assert main(["runs"]) == 0
    assert "gone" in capsys.readouterr().out
    assert main(["diagnose", "lost"]) == 2
    assert "the folder of the run lost" in capsys.readouterr().err
    assert main(["runs", "remove", "lost"]) == 0
    assert names() == []


def test_of_two_runs_of_a_name_the_one_that_is_there_is_meant(tmp_path: Path) -> None:
    here, there = made("twice", 1.0), made("twice", 2.0, tmp_path / "elsewhere")
    for folder in (here, there):
        RunIndex().add(folder)
    shutil.rmtree(there.path)

    found = run_named("twice")
    assert found is not None
    assert found.path == here.path


@pytest.mark.parametrize(
    ("name", "meant"),
    [("latest", "gpt-c"), ("@1", "gpt-c"), ("@3", "gpt-a"), ("gpt", "gpt-c"), ("gpt-a", "gpt-a"), ("vit", "vit")],
)
def test_what_a_name_means(name: str, meant: str) -> None:
    for started, each in enumerate(["gpt-a", "vit", "gpt-c", "gone"]):
        RunIndex().add(made(each, float(started)))
    shutil.rmtree(default_root() / "gone")

    found = run_named(name)
    assert found is not None
    assert found.name == meant


@pytest.mark.parametrize("name", ["@4", "@0", "g", "gpt-b", "gon", "", "@", "@2x"])
def test_names_that_mean_nothing(name: str) -> None:
    for started, each in enumerate(["gpt-a", "vit", "gpt-c"]):
        RunIndex().add(made(each, float(started)))

    assert run_named(name) is None


def test_diagnose_alone_takes_the_latest_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose"]) == 2
    assert "stepscope run" in capsys.readouterr().err
    for started, name in enumerate(["one", "two"]):
        folder = made(name, float(started))
        shutil.copy(SAMPLE, folder.new_trace_path(0))
        RunIndex().add(folder)
        assert main(["diagnose"]) == 0
        assert f"latest is the run {name}\n" in capsys.readouterr().err
    assert open_trace("one").metadata.path == str(default_root() / "one" / "rank0" / "trace-1.json.gz")


def test_only_a_whole_name_renames_and_removes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        RunIndex().add(made(name))

    assert main(["runs", "rename", "fir", "third"]) == 2
    assert main(["runs", "rename", "first", "second"]) == 2
    assert main(["runs", "rename", "first", "../third"]) == 2
    assert main(["runs", "rename", "first", "third"]) == 0
    assert main(["runs", "rm", "sec"]) == 2
    assert main(["runs", "rm", "second"]) == 0
    assert (names(), RunFolder.open(default_root() / "third").manifest().command) == (["third"], ("python", "train.py"))


def test_remove_takes_the_folder_too(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("away")
    RunIndex().add(folder)

    assert main(["runs", "remove", "away"]) == 0
    assert (capsys.readouterr().out, folder.path.exists(), names()) == ("Removed away.\n", False, [])


def test_a_folder_that_is_no_run_is_never_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "remove", str(tmp_path)]) == 2
    assert tmp_path.exists()
    assert "there is no run" in capsys.readouterr().err


def test_show_tells_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("shown")
    recordings = [{"rank": 0, "steps": 5, "first_step": 9, "facts": {"environment": {"OMP_NUM_THREADS": "2"}}}]
    folder.write_manifest(folder.manifest().ended(12.5, 1, recordings))
    RunIndex().add(folder)

    assert main(["runs", "show", "shown"]) == 0
    text = capsys.readouterr().out
    for line in ("command  python train.py", "took 2.5 s, exit code 1", "OMP_NUM_THREADS=2", "5 steps from step 9"):
        assert line in text


def test_add_takes_up_folders_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("copied", root=tmp_path / "other")

    assert main(["runs", "add", str(tmp_path / "other")]) == 0
    assert names() == ["copied"]
    assert main(["runs", "add", str(tmp_path)]) == 2
    assert "there is no run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show"], "name a run: stepscope runs show NAME"),
        (["list", "x"], "takes no name"),
        (["show", "abd"], "did you mean abc?"),
        (["shwo", "x"], "invalid choice"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    RunIndex().add(made("abc"))

    assert main(["runs", *words]) == 2
    assert sentence in capsys.readouterr().err


def with_traces(name: str, *ranks: int) -> RunFolder:
    folder = made(name)
    RunIndex().add(folder)
    for rank in ranks:
        folder.new_trace_path(rank).write_text('{"traceEvents": []}')
    return folder


def test_a_name_stands_for_the_latest_trace_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_traces("two", 0, 0, 1)
    latest = [folder.path / "rank0/trace-2.json.gz", folder.path / "rank1/trace-1.json.gz"]

    assert trace_paths("two") == trace_paths(folder.path) == latest
    assert "earlier traces: two/rank0/trace-1.json.gz" in capsys.readouterr().err
    assert trace_paths("two/rank1") == [latest[1]]
    assert trace_paths("two/rank0/trace-1.json.gz") == [folder.path / "rank0/trace-1.json.gz"]


def test_a_file_of_that_name_comes_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_traces("same", 0)
    monkeypatch.chdir(tmp_path)
    Path("same").write_text("{}")

    assert trace_paths("same") == [Path("same")]


def test_a_run_without_traces() -> None:
    with_traces("empty")
    with pytest.raises(UsageError, match="the run empty has no trace"):
        trace_paths("empty")


def test_commands_of_one_trace_take_the_first_rank(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("ranks")
    RunIndex().add(folder)
    for rank in (0, 1):
        event = '{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 2}'
        distributed = f'"distributedInfo": {{"rank": {rank}, "world_size": 2}}'
        folder.new_trace_path(rank).write_text(f'{{"schemaVersion": 1, {distributed}, "traceEvents": [{event}]}}')

    arguments = SimpleNamespace(window=None, steps=None, no_cache=True)
    assert open_from(arguments, "ranks").metadata.rank == 0  # type: ignore[arg-type]
    assert "ranks has 2 ranks; this is rank0, ranks/rank1 is the next" in capsys.readouterr().err
    assert open_from(arguments, "ranks/rank1").metadata.rank == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "program", "whole"),
    [
        ("/usr/bin/python3 train.py --lr 1", "train.py --lr 1", "python3 train.py --lr 1"),
        ("torchrun --nproc 2 train.py", "torchrun --nproc 2 train.py", "torchrun --nproc 2 train.py"),
        ("python -m trainer", "python -m trainer", "python -m trainer"),
        ("", "", ""),
    ],
)
def test_commands_name_what_was_recorded_as_the_user_would(command: str, program: str, whole: str) -> None:
    run = made_run("gpt", command=command)
    trace = str(run.rank_folder(0) / "trace-1.json.gz")

    assert own_names(trace) == OwnNames("gpt", program, whole)


def test_names_of_ranks_of_folders_elsewhere_and_of_files(tmp_path: Path) -> None:
    run = made_run("two")
    elsewhere = made_run("gpt", root=tmp_path)
    for rank in range(2):
        run.rank_folder(rank).mkdir(parents=True, exist_ok=True)
    (elsewhere.path / "run.json").write_text("{}")

    assert own_names(str(run.rank_folder(1) / "trace-1.json.gz")).trace == "two/rank1"
    assert own_names(str(elsewhere.rank_folder(0) / "trace-1.json.gz")).trace == str(elsewhere.path)
    assert own_names("my trace.json") == OwnNames("'my trace.json'")
    assert own_names("-") == own_names("") == OwnNames()


def test_commands_read_the_latest_run_where_no_trace_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps"]) == 2
    assert "stepscope run" in capsys.readouterr().err
    folder = made("gpt")
    folder.rank_folder(0).mkdir(parents=True, exist_ok=True)
    shutil.copy(SAMPLE, folder.rank_folder(0) / "trace-1.json.gz")

    for words in (["steps"], ["query", "select name from operators limit 1"], ["operators"]):
        assert main(words) == 0, words
    assert "gpt" in capsys.readouterr().err


def test_the_commands_of_a_diagnosis_name_the_run_and_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("gpt")
    folder.rank_folder(0).mkdir(parents=True, exist_ok=True)
    shutil.copy(SAMPLE, folder.rank_folder(0) / "trace-1.json.gz")

    assert main(["diagnose"]) == 0
    told = capsys.readouterr().out
    assert "PROGRAM" not in told
    assert "--apply" in told
    assert main(["diagnose", "--redact"]) == 0
    assert "PROGRAM" in capsys.readouterr().out


def ended(name: str | None, day: int, size: int = 1000) -> RunFolder:
    """A run that ended, with a file of this size; `name` as the user gave it."""
    folder = RunFolder.create(None, name, RunManifest(command=(f"train{day}.py",), started_unix_s=float(day)))
    folder.write_manifest(folder.manifest().ended(day + 0.5, 0, []))
    (folder.path / "large").write_bytes(b" " * size)
    RunIndex().add(folder)
    return folder


def test_without_a_limit_every_run_stays(capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(3):
        ended(None, day)

    assert (RunIndex().limit(), RunIndex().beyond_limit()) == (None, [])
    assert main(["runs", "limit"]) == 0
    assert capsys.readouterr().out == "All runs are kept.\n"


def test_a_limit_removes_the_oldest_but_those_that_matter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named, oldest, old = ended("mine", 1, 100_000), ended(None, 2, 40_000), ended(None, 3, 40_000)
    renamed = RunIndex().rename(RunIndex().add(ended(None, 4, 100_000)), "precious")
    recording = made("records", 5.0)
    elsewhere = RunFolder.create(tmp_path / "other", None, RunManifest(command=("x.py",), started_unix_s=0.0))
    elsewhere.write_manifest(elsewhere.manifest().ended(1.0, 0, []))
    (elsewhere.path / "large").write_bytes(b" " * 100_000)
    younger, latest = ended(None, 6, 40_000), ended(None, 7, 100_000)
    for folder in (recording, elsewhere):
        RunIndex().add(folder)

    assert [main(["runs", "limit", *words]) for words in (["much"], ["1MB", "2MB"])] == [2, 2]
    assert main(["runs", "limit", "390 KB"]) == 0
    text = capsys.readouterr().out
    assert [oldest.name in text, old.name in text] == [True, False]
    assert not oldest.path.exists()

    assert main(["runs", "limit", "0"]) == 0
    stay = [named.path, renamed.path, recording.path, elsewhere.path, latest.path]
    assert [each.exists() for each in (*stay, old.path, younger.path)] == [True] * 5 + [False] * 2
    assert RunIndex().beyond_limit() == []
    assert main(["runs", "limit", "none"]) == 0
    assert RunIndex().limit() is None


def test_a_damaged_limit_removes_nothing() -> None:
    ended(None, 1), ended(None, 2)
    RunIndex().set_limit(0)
    place = default_root() / "limit.json"
    place.write_text(place.read_text().replace("0", "1", 1))

    assert RunIndex().beyond_limit() == []
