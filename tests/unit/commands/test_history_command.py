"""`stepscope history` over run folders as `stepscope run` leaves them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.compare.run_times import KEPT, series_of
from stepscope.files import with_checksum
from tests.unit.rendered import golden
from tests.unit.run_folders import COMMIT, made_run, recording

OTHER_COMMIT = "9f8e7d6c5b4a" + "0" * 28


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


def steps(ms: float, count: int = 12) -> list[int]:
    return [int((ms + 0.01 * (at % 3 - 1)) * 1e6) for at in range(count)]


def slower_from_the_fourth_run() -> None:
    for number in range(7):
        late = number >= 3
        made_run(
            f"train-{number + 1}",
            recording(steps((12 if late else 10) + number / 100), steps(15)),
            day=number,
            command=f"python train.py --workers {0 if late else 4}",
            commit=OTHER_COMMIT if late else COMMIT,
            facts={"versions": {"torch": "2.13.0" if late else "2.12.0"}, "devices": ["NVIDIA H100", "NVIDIA H100"]},
        )


def test_nothing_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    assert capsys.readouterr().out == "There are no runs yet; stepscope run train.py records one.\n"


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("train", "train"),
        ("train-7", "train"),
        ("train-20260102-120000", "train"),
        ("train-20260102-120000-2", "train"),
        ("train-3f2a1bc", "train"),
        ("train-defaced", "train-defaced"),
        ("resnet50", "resnet50"),
        ("run_2.1", "run"),
        ("2026-01-02", "2026"),
        ("-3", "-3"),
    ],
)
def test_the_series_of_a_name(name: str, series: str) -> None:
    assert series_of(name) == series


def test_the_report_of_a_series(capsys: pytest.CaptureFixture[str]) -> None:
    slower_from_the_fourth_run()

    assert main(["history", "train", "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert text == golden("history.txt", text)


def test_several_series_are_an_overview(capsys: pytest.CaptureFixture[str]) -> None:
    slower_from_the_fourth_run()
    made_run("eval", recording(steps(3)), day=9)

    assert main(["history"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["series", "runs", "changes", "last", "change", "latest", "step", "latest", "run", "steps", "place"],
        ["eval", "1", "0", "3.0", "ms", "2026-09-30", "14:13:20", "UTC", "unprofiled", "/home/alice/project"],
        [
            "train",
            "7",
            "1",
            "20.3",
            "%",
            "12.1",
            "ms",
            "2026-09-27",
            "14:13:20",
            "UTC",
            "unprofiled",
            "/home/alice/project",
        ],
    ]
    assert lines[3] == "stepscope history SERIES shows one of them."


def test_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    slower_from_the_fourth_run()

    assert main(["history", "--series", "command", "--command", "--workers", "--json", "-"]) == 2
    assert "--command" in capsys.readouterr().err
    assert main(["history", "--series", "command", "--command=--workers", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], len(each["runs"])) for each in found["series"]] == [
        ("python train.py --workers 0", 4),
        ("python train.py --workers 4", 3),
    ]


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    slower_from_the_fourth_run()

    assert main(["history", "train-?", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], list(found)) == (1, ["schema", "stepscope", "series", "left_out"])
    (series,) = found["series"]
    assert (series["name"], series["place"], series["source"]) == ("train", "/home/alice/project", "unprofiled")
    assert [run["steps"] for run in series["runs"]] == [12] * 7
    assert series["runs"][0]["settings"] == {
        "command": "python train.py --workers 4",
        "git commit": "a1b2c3d4e5f6",
        "device": "2 x NVIDIA H100",
        "processes": "1",
        "version of stepscope": "0.1.0",
        "version of torch": "2.12.0",
    }
    (change,) = series["changes"]
    assert (change["position"], change["run"], change["comparison"]["verdict"]) == (3, "train-4", "slower")
    assert change["differences"] == [
        {"name": "command", "before": "... --workers 4", "after": "... --workers 0"},
        {"name": "git commit", "before": "a1b2c3d4e5f6", "after": "9f8e7d6c5b4a"},
        {"name": "version of torch", "before": "2.12.0", "after": "2.13.0"},
    ]


def test_csv_has_a_row_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower_from_the_fourth_run()

    assert main(["history", "--last", "4", "--csv", str(tmp_path / "runs.csv")]) == 0
    assert capsys.readouterr().out == ""
    rows = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    assert [(row["run"], row["device"], row["left_out"]) for row in rows] == [
        (f"train-{number}", "2 x NVIDIA H100", "") for number in (4, 5, 6, 7)
    ]


def test_the_page_shows_names_as_text(tmp_path: Path) -> None:
    made_run("train", recording(steps(10)), command="python </script><script>alert(1)</script>", folder="/<b>")

    assert main(["history", "--html", str(tmp_path / "history.html"), "--series", "command"]) == 0
    page = (tmp_path / "history.html").read_text()
    assert "<script>alert(1)" not in page
    assert "<b>." not in page
    assert "&lt;script&gt;alert(1)" in page


def test_redacted_of_every_machine_and_folder(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run("train", recording(steps(10)), folder="/home/alice/secret/project")
    manifest = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps({**manifest, "host": "node-of-bob"}))

    assert main(["history", "--redact", "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert "alice" not in out
    assert "secret" not in out
    assert "node-of-bob" not in out
    assert json.loads(out)["series"][0]["place"] == "project"


def test_what_cannot_be_read_is_listed_and_the_rest_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        made_run(f"train-{number}", recording(steps(10)), day=number)
    shutil.rmtree(made_run("train-gone", recording(steps(10))).path)
    (made_run("train-damaged", recording(steps(10))).path / "run.json").write_text("{")
    made_run("train-77", day=7, exit_code=1)
    made_run("train-78", {"rank": 0, "problem": "the program ended before its first step did", "steps": 0}, day=8)
    made_run("train-79", recording(steps(10, 2)), day=9)
    odd = made_run("train-80", recording(steps(10)), day=10)
    manifest = json.loads((odd.path / "run.json").read_text())
    odd_recordings = [7, {"step_times": 3}, {"rank": "x", "step_times": [{"first_step": 1, "ns": ["a"]}]}]
    changed = {**manifest, "recordings": odd_recordings, "versions": 3, "options": [], "git": "x", "folder": None}
    (odd.path / "run.json").write_text(json.dumps(changed))

    assert main(["history", "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    reasons = {row["run"]: row["left_out"] for row in rows}
    assert [name for name, why in reasons.items() if not why] == ["train-0", "train-1", "train-2"]
    assert reasons["train-gone"].startswith("its folder is gone")
    assert "run.json is damaged" in reasons["train-damaged"]
    assert reasons["train-77"] == "its program ended with exit code 1 before any step was timed"
    assert reasons["train-78"] == "the program ended before its first step did"
    assert reasons["train-79"] == "fewer than 3 of its steps were timed, and it has no trace"
    assert reasons["train-80"] == "fewer than 3 of its steps were timed, and it has no trace"


def test_times_in_traces_are_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run("block", {"rank": 0, "steps": 5, "problem": None})
    marks = [
        f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{at}", "pid": 1, "tid": 1, '
        f'"ts": {1000 * at}, "dur": {900 + at}}}'
        for at in range(5)
    ]
    trace = folder.new_trace_path(0)
    trace.write_text(f'{{"schemaVersion": 1, "traceEvents": [{", ".join(marks)}]}}')

    def shown() -> tuple[str, float]:
        assert main(["history", "--json", "-"]) == 0
        (series,) = json.loads(capsys.readouterr().out)["series"]
        return series["source"], series["runs"][0]["step_ns"]

    assert shown() == ("profiled", 902_000.0)
    kept = json.loads((folder.path / KEPT).read_text())
    assert kept["ns"] == [900_000, 901_000, 902_000, 903_000, 904_000]
    content = {"traces": kept["traces"], "ns": [5_000_000] * 3}
    (folder.path / KEPT).write_text(json.dumps(with_checksum(content)))
    assert shown() == ("profiled", 5_000_000.0)
    (folder.path / KEPT).write_text(json.dumps({**kept, "ns": [5_000_000] * 3}))
    assert shown() == ("profiled", 902_000.0)
    (folder.path / KEPT).write_text("damaged")
    assert shown() == ("profiled", 902_000.0)


def test_runs_of_several_batch_sizes_are_no_series(capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run("sizes", recording(steps(10)), recording(steps(20)))
    (folder.path / "batch-sizes.json").write_text("{}")

    assert main(["history"]) == 0
    assert "it ran its program once for each of several batch sizes" in capsys.readouterr().out


def test_of_several_ranks_the_first_counts(capsys: pytest.CaptureFixture[str]) -> None:
    made_run("ranks", recording(steps(20), rank=1, world_size=2), recording(steps(10), rank=0, world_size=2))

    assert main(["history", "--json", "-"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["series"][0]["runs"]
    assert (round(run["step_ns"] / 1e6), run["settings"]["processes"]) == (10, "2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian"], "there is no run or series 'trian'; did you mean train?"),
        (["zzz*"], "there is no run or series 'zzz*'; stepscope runs lists them"),
        (["--command", "nothing"], "no run's command contains 'nothing'"),
        (["--series", "colour"], "invalid choice"),
        (["--last", "-1"], "is not a whole number"),
        (["--json", "-", "--csv", "-"], "only one report can go to standard output"),
        (["--html", ""], "the name of the output file is empty"),
        (["--html", "/nowhere/at/all.html"], "cannot be written"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    made_run("train-1", recording(steps(10)))

    assert main(["history", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
