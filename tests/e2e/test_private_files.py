"""What stepscope keeps is for its owner alone: real recordings, and then every file and folder of theirs."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.conftest import environment

pytestmark = pytest.mark.skipif(
    os.name != "posix" or importlib.util.find_spec("torch") is None, reason="needs torch and POSIX permissions"
)

TRAINING = """
    import torch, stepscope
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        stepscope.log({"loss": 1.0})
"""
MARKED = """
    import time, stepscope
    for _ in range(40):
        with stepscope.step():
            time.sleep(0.001)
"""
RUN_AND_ASK = """
    import threading, subprocess, sys, time, os, torch, stepscope
    stepscope.start_server()
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    asked = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "attach", str(os.getpid()), "--steps", "2", "--no-diagnose"]
    )
    while asked.poll() is None:
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
    sys.exit(asked.returncode)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with programs in it, of a user whose mask hides nothing."""
    (tmp_path / "training.py").write_text(textwrap.dedent(TRAINING))
    (tmp_path / "marked.py").write_text(textwrap.dedent(MARKED))
    (tmp_path / "asking.py").write_text(textwrap.dedent(RUN_AND_ASK))
    (tmp_path / "empty").mkdir()
    return tmp_path


def stepscope(place: Path, *words: str) -> str:
    """Run it with everything kept below `kept`; returns standard error."""
    kept = place / "kept"
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *words],
        cwd=place,
        env=environment(STEPSCOPE_DATA_DIR=str(kept / "data"), STEPSCOPE_CACHE_DIR=str(kept / "cache")),
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: os.umask(0) and None,
    )
    assert done.returncode == 0, done
    return done.stderr


def open_to_others(folder: Path) -> dict[str, str]:
    """The files and folders, with their modes, that somebody else may do anything with."""
    found = {}
    for each in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(each.lstat().st_mode)
        if mode & 0o077 or mode != (0o700 if each.is_dir() else 0o600):
            found[str(each.relative_to(folder))] = oct(mode)
    return found


def names_in(folder: Path) -> set[str]:
    return {each.name for each in folder.rglob("*")}


def test_a_run_with_telemetry_lines_report_and_cache(place: Path) -> None:
    """What an earlier version left open is closed, too, and the mask of the program stays."""
    left_open = [place / "kept" / "data" / "runs", place / "kept" / "cache" / "traces"]
    for folder in left_open:
        for parent in (place / "kept", folder.parent):
            parent.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o755)
    masked = textwrap.dedent(TRAINING) + "open('made', 'w').close()\n"
    (place / "training.py").write_text(masked)
    stepscope(place, "run", "--name", "it", "--html", "report.html", "--lines", "training.py")
    stepscope(place, "run", "--name", "other", "--no-diagnose", "--folder", "chosen", "training.py")
    stepscope(place, "runs")
    assert {stat.S_IMODE(each.stat().st_mode) for each in left_open} == {0o700}
    assert stat.S_IMODE((place / "made").stat().st_mode) == 0o666
    assert {"runs.sqlite", "run.json", "trace-1.json.gz", "telemetry", "store.json"} <= names_in(place / "kept")
    assert any(".lines" in name for name in names_in(place / "kept"))
    assert open_to_others(place / "kept") == {}
    assert open_to_others(place / "chosen") == {}
    assert stat.S_IMODE((place / "report.html").stat().st_mode) == 0o666  # what was asked for is as the mask has it


def test_a_capture_of_an_agent(place: Path) -> None:
    stepscope(place, "run", "--name", "it", "--no-diagnose", "asking.py")
    assert {"runs.sqlite", "trace-1.json.gz"} <= names_in(place / "kept")
    assert open_to_others(place / "kept") == {}


def test_a_bench(place: Path) -> None:
    stepscope(place, "bench", "marked.py", "marked.py", "--steps", "5", "--rounds", "2")
    assert "benches" in names_in(place / "kept")
    assert open_to_others(place / "kept") == {}


def test_a_search(place: Path) -> None:
    pytest.importorskip("optuna")
    stepscope(place, "tune", "--steps", "5", "--only", "zero-grad", "--study", "mine", "training.py")
    assert "mine" in names_in(place / "kept" / "data" / "tunes")
    assert open_to_others(place / "kept") == {}


def test_a_trace_that_the_program_exports_is_as_its_mask_has_it(place: Path) -> None:
    (place / "exporting.py").write_text(
        "import stepscope, torch\n"
        "with stepscope.profile(diagnose=False) as p:\n"
        "    for _ in range(8):\n"
        "        torch.ones(3).sum()\n"
        "        p.step()\n"
        "p.export_chrome_trace('mine.json')\n"
    )
    subprocess.run(
        [sys.executable, "exporting.py"],
        cwd=place,
        env=environment(STEPSCOPE_DATA_DIR=str(place / "kept")),
        check=True,
        timeout=240,
        preexec_fn=lambda: os.umask(0o022) and None,
    )
    assert stat.S_IMODE((place / "mine.json").stat().st_mode) == 0o644
    assert open_to_others(place / "kept") == {}
