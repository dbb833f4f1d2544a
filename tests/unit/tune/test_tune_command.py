"""Mistakes of a user of `stepscope tune`, and a program that fails as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.commands import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs in it, and an empty one for what stepscope keeps."""
    (tmp_path / "train.py").write_text("print('no step here')")
    (tmp_path / "failing.py").write_text("print('about to fail'); raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "say what to tune: stepscope tune train.py"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--knob", "fused", "train.py"], "'fused' is not a knob"),
        (["--knob", "--x=", "train.py"], "'--x=' has an empty value"),
        (["--only", "worker", "failing.py"], "there is no knob 'worker'"),
        (["--study", "../up", "train.py"], "'../up' is not a run's name"),
        (["--folder", "train.py", "train.py"], "no folder can be made in "),
        (["--storage", "nonsense://x", "train.py"], "the study in nonsense://x cannot be opened"),
        (["--json", "-", "--markdown", "-", "train.py"], "only one report can go to standard output"),
        (["--budget", "soon", "train.py"], "'soon' is not a time"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err.splitlines()[-1]
    assert said.out == ""


def test_a_file_that_is_no_study(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "data" / "tunes" / "mine").mkdir(parents=True)
    (place / "data" / "tunes" / "mine" / "study.db").write_text("not a database, and longer than its first page" * 9)
    assert main(["tune", "--study", "mine", "train.py"]) == 2
    assert "study.db cannot be opened: file is not a database" in capsys.readouterr().err


def test_a_study_of_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "--no-profile", "--only", "zero-grad", "--study", "mine"]
    assert main([*words, "failing.py"]) == 2
    assert "the program failed with exit code 7 before a step was seen: about to fail" in capsys.readouterr().err
    assert main([*words, "train.py"]) == 2
    assert "the study mine belongs to another command, failing.py" in capsys.readouterr().err
