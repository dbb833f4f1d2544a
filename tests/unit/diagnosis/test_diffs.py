"""Diffs of the user's own files in diagnoses: which lines, which files may be read, and a patch that applies."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope import diagnose, open_trace
from stepscope.commands import main
from stepscope.commands.shared.reading import LARGEST_BYTES, MOST_FILES, UserSources
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.diffs import Diffs, settings_of
from stepscope.diagnosis.finding import Evidence, Finding, Location, Remedy

REPOSITORY = Path(__file__).resolve().parents[3]
SAMPLE = REPOSITORY / "examples/gpt2_per_token_loss_cpu.json.gz"
LOOP = """\
import torch
import torch.nn.functional as F


def loss_of(logits, targets):
    loss = 0
    for t in range(64):
        loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
    return loss
"""


@pytest.fixture(scope="module")
def sample() -> Diagnosis:
    """The bundled sample's diagnosis."""
    return diagnose(open_trace(SAMPLE))


def finding(*where: Location, rule: str = "loop-in-step", apply: tuple[str, ...] = ()) -> Finding:
    remedy = Remedy("Compute it at once.", apply=apply)
    return Finding(rule, "a loop", "high", 1000, 0.5, "counted", "high", Evidence(), remedy, where)


def diff_of(sample: Diagnosis, folder: Path, *findings: Finding) -> str:
    diffs = Diffs(UserSources(folder).read)
    return "".join(each.remedy.diff for each in diffs.filled(replace(sample, findings=findings)).findings)


def test_the_sample_shows_the_change_of_its_loop(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").mkdir()
    copy = tmp_path / "examples" / "gpt2_training.py"
    shutil.copy(REPOSITORY / "examples" / "gpt2_training.py", copy)
    monkeypatch.chdir(tmp_path)

    assert main(["diagnose", str(SAMPLE), "--diff", "changes.patch"]) == 0
    assert "-    for position in range(SEQUENCE):\n" in capsys.readouterr().out

    subprocess.run(["git", "apply", "changes.patch"], cwd=tmp_path, check=True)

    text = copy.read_text()
    assert "for position in range(SEQUENCE)" not in text
    assert "    loss = loss + (token_losses.view_as(counted).sum(0) / counted.sum(0)).sum()\n" in text
    compile(text, "gpt2_training.py", "exec")


def test_elsewhere_the_sample_has_no_diff(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["diagnose", str(SAMPLE), "--diff", "-"]) == 0

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no finding has a safe change of your files" in captured.err


def test_redacted_reports_show_no_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)

    assert main(["diagnose", str(SAMPLE), "--redact"]) == 0
    assert "for position in range" not in capsys.readouterr().out
    assert main(["diagnose", str(SAMPLE), "--redact", "--diff", "-"]) == 2
    assert "--redact removes" in capsys.readouterr().err


def test_only_one_report_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(SAMPLE), "--json", "-", "--diff", "-"]) == 2
    assert "only one report can go to standard output" in capsys.readouterr().err


def test_a_place_must_be_in_the_file(sample: Diagnosis, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    exact = Location("train.py", 8, "loss_of", exact_line=True)

    assert diff_of(sample, tmp_path, finding(exact)).startswith("--- a/train.py\n+++ b/train.py\n@@ -4,6 +4,9 @@\n")
    assert diff_of(sample, tmp_path, finding(Location("train.py", 5, "loss_of")))
    assert diff_of(sample, tmp_path, finding(Location("train.py", 8, "Trainer.loss_of", exact_line=True)))
    for line, function, is_exact in ((9, "loss_of", True), (8, "train", True), (6000, "loss_of", False)):
        other = Location("train.py", line, function, exact_line=is_exact)
        assert diff_of(sample, tmp_path, finding(other)) == ""
    assert diff_of(sample, tmp_path, finding(exact, rule="low-precision")) == ""


def test_settings_stand_where_the_loader_is_made(sample: Diagnosis, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def train():\n    pass\n")
    (tmp_path / "data.py").write_text("from torch.utils.data import DataLoader\nloader = DataLoader(data, 8)\n")
    waits = finding(Location("train.py", 1, "train"), rule="input-bound", apply=("workers=3", "pin-memory", "bf16"))
    other = finding(Location("data.py", 1, "get"), rule="low-precision")

    assert settings_of(waits.remedy) == {"num_workers": "3", "pin_memory": "True"}
    assert "+loader = DataLoader(data, 8, num_workers=3, pin_memory=True)\n" in diff_of(sample, tmp_path, waits, other)
    assert diff_of(sample, tmp_path, replace(waits, remedy=Remedy("Wait less."))) == ""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_patch_of_several_findings_applies(sample: Diagnosis, tmp_path: Path, encoding: str, line_end: str) -> None:
    source = f"# -*- coding: {encoding} -*-\n# für später\n{LOOP}torch.autograd.set_detect_anomaly(True)  # größer"
    path = tmp_path / "own code" / "trän.py"
    path.parent.mkdir()
    path.write_bytes(source.replace("\n", line_end).encode(encoding))
    place = Location("own code/trän.py", 10, "loss_of", exact_line=True)
    diffs = Diffs(UserSources(tmp_path).read)
    for _ in range(2):  # as of two ranks
        diffs.filled(replace(sample, findings=(finding(place), finding(place, rule="debug-mode"))))

    subprocess.run(["git", "apply", "-"], input=diffs.patch(), cwd=tmp_path, check=True)

    text = path.read_bytes().decode(encoding)
    assert text.endswith(f"    return loss{line_end}torch.autograd.set_detect_anomaly(False)  # größer")
    assert "for t in" not in text
    assert text.count("\n") == text.count(line_end) == source.count("\n") + 3


def test_files_outside_of_the_folder_are_shown_and_not_patched(sample: Diagnosis, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    (tmp_path / "work").mkdir()
    diffs = Diffs(UserSources(tmp_path / "work").read)
    place = Location(str(path), 8, "loss_of", exact_line=True)

    filled = diffs.filled(replace(sample, findings=(finding(place),)))

    assert filled.findings[0].remedy.diff.startswith(f"--- a{path}\n")
    assert diffs.patch() == b""
    assert diffs.outside() == [str(path).lstrip("/")]


def test_only_python_files_of_the_user_are_read(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("secret.txt", "site-packages/library.py"):
        (tmp_path / name).write_text("loss = 1\n")
    (tmp_path / "huge.py").write_text("#" * (LARGEST_BYTES + 1))
    (tmp_path / "null.py").write_bytes(b"loss = 1\0")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "coding.py").write_bytes(b"# coding: nothing-like-it\n")
    (tmp_path / "hex.py").write_bytes(b"# coding: hex\n")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "good.py").write_text("loss = 1\n")
    sources = UserSources(tmp_path)
    refused = ["secret.txt", "library.py", "huge.py", "null.py", "binary.py", "coding.py", "hex.py", "folder.py"]
    refused += ["pipe.py", "none.py"]

    found = {
        name: sources.read(name) for name in [*refused, "site-packages/library.py", "bad\0.py", "x" * 5000 + ".py"]
    }

    assert found == dict.fromkeys(found)
    good = sources.read("good.py")
    assert good is not None
    assert (good.path, good.text, good.inside) == ("good.py", "loss = 1\n", True)


def test_a_trace_that_names_endless_files_is_given_up(tmp_path: Path) -> None:
    sources = UserSources(tmp_path)
    for number in range(MOST_FILES):
        assert sources.read(f"{number}.py") is None
    (tmp_path / "last.py").write_text("loss = 1\n")

    assert sources.read("last.py") is None
