"""`stepscope doctor` and `stepscope completion`, as typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import run_here

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ASKED = """
source script
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$(complete -p stepscope | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    folders = {f"STEPSCOPE_{name}_DIR": str(tmp_path / name.lower()) for name in ("DATA", "CACHE")}
    return {**os.environ, **folders, "COLUMNS": "120"}


@pytest.fixture
def run(environ: dict[str, str], tmp_path: Path) -> Run:
    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stepscope", *words]
        return subprocess.run(
            command, cwd=tmp_path, env={**environ, **more}, capture_output=True, text=True, timeout=240, check=False
        )

    return run


def test_a_working_installation(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run("doctor", "--format", "json")

    verdicts = {each["check"]: each["verdict"] for each in json.loads(done.stdout)["observations"]}
    assert done.returncode == 0
    assert {verdicts[each] for each in ("stepscope", "self-test", "folder-recorded", "folder-traces")} == {"fine"}
    assert {each.name for each in tmp_path.iterdir()} <= {"cache"}  # it recorded elsewhere


def test_a_torch_that_cannot_be_imported_is_found(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    done = run("doctor", PYTHONPATH=os.pathsep.join([str(tmp_path / "broken"), *sys.path]))

    assert done.returncode == 1
    assert "2 things are broken" in done.stdout
    assert "libcudart.so.12: cannot open shared object file" in done.stdout


def test_a_folder_that_is_a_file_is_found(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    done = run("doctor", "--no-self-test")

    assert done.returncode == 1
    assert "1. Recorded runs cannot be kept" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("stepscope diag", "diagnose"),
        ("stepscope diagnose --mark", "--markdown"),
        ("stepscope diagnose --rule input-b", "input-bound"),
        ("stepscope run --apply fuse-o", "fuse-optimizer"),
        ("stepscope lines gpt", "gpt-20261123"),
    ],
)
def test_bash_completes(words: str, found: str, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script").write_text(run_here("completion", "bash").out)
    command = tmp_path / "stepscope"
    command.write_text("#!/bin/sh\n[ \"$*\" = 'runs names' ] && echo gpt-20261123\n")
    command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), environ["PATH"]])

    asked = ["bash", "-c", ASKED.format(words=words)]
    done = subprocess.run(
        asked, cwd=tmp_path, env={**environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [found]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(run_here("completion", shell).out)
    assert "input-bound" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    subprocess.run([shell, "-n", str(script)], check=True)
