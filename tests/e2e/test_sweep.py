"""`stepscope sweep` as real processes: one that is killed, one that is interrupted, two that share a study."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from stepscope.commands import main
from tests.e2e.conftest import Outcome, environment, run_here

PROGRAM = """
    import os, sys, time
    x = float(sys.argv[1])
    print("loss:", x, flush=True)
    while not os.path.exists("go"):
        time.sleep(0.02)
"""
TRACKED = """
    import sys
    sys.path.insert(0, "packages")
    from tensorboardX.writer import SummaryWriter
    writer = SummaryWriter()
    writer.add_scalar("val/loss", float(sys.argv[1]) + 1, 0)
    writer.add_scalar(tag="val/loss", scalar_value=float(sys.argv[1]), global_step=1)
    print(writer.kept)
"""
FILE = """
    command: python program.py {x}
    metric: loss
    method: grid
    parameters:
      x: [0.5, 0.25, 0.75, 1.0]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a program and its sweep file; the program ends when there is a file `go`."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "sweep.yaml").write_text(FILE.replace("python ", f"{sys.executable} "))
    return tmp_path


def sweep(place: Path, *words: str) -> Outcome:
    return run_here("sweep", *words, folder=place)


def begin(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """A sweep that has begun, so that programs of it run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "sweep", "sweep.yaml", *words],
        cwd=place,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not printed(place):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


def printed(place: Path) -> list[Path]:
    logs = place.glob("stepscope-sweeps/sweep/trial-*/output.log")
    return [log for log in logs if log.stat().st_size]


def running_programs(place: Path) -> list[int]:
    """Processes that have a trial's folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"STEPSCOPE_RUN={place}/".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def states(place: Path) -> list[str]:
    with closing(sqlite3.connect(place / "stepscope-sweeps" / "sweep" / "study.sqlite")) as database:
        return [state for (state,) in database.execute("SELECT state FROM trials ORDER BY number")]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="left-over programs are found through /proc")
def test_a_killed_sweep_is_repeated_where_it_was(place: Path) -> None:
    process = begin(place, "--jobs", "2")
    process.kill()
    process.communicate()
    left = running_programs(place)
    assert left
    (place / "go").touch()

    ended = sweep(place, "sweep.yaml", "--json", "-")

    content = ended.json()
    assert ended.code == 0
    assert (content["counts"]["complete"], len(content["trials"])) == (4, 4)
    assert content["counts"]["repeated"] in (1, 2)
    assert sorted(trial["values"]["x"] for trial in content["trials"]) == [0.25, 0.5, 0.75, 1.0]
    assert (content["best"]["value"], content["best"]["values"]) == (0.25, {"x": 0.25})
    assert "was left unfinished by a process that is gone; it is repeated" in ended.err
    assert running_programs(place) == []


def test_an_interrupted_sweep_ends_its_programs_and_goes_on(place: Path) -> None:
    process = begin(place)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    until = time.monotonic() + 60
    while running_programs(place) and time.monotonic() < until:  # killed, and not yet gone on a busy machine
        time.sleep(0.05)
    assert running_programs(place) == []
    assert b"interrupted; it will be repeated" in said
    assert states(place) == ["FAIL", "WAITING"]
    (place / "go").touch()

    other = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "sweep", "sweep.yaml"], cwd=place, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ended = sweep(place, "sweep.yaml", "--html", "page.html")
    assert (ended.code, other.wait()) == (0, 0)

    assert main(["sweep", "show", str(place / "stepscope-sweeps" / "sweep"), "--json", str(place / "shown.json")]) == 0
    shown = json.loads((place / "shown.json").read_text())
    assert (shown["counts"]["complete"], shown["counts"]["repeated"]) == (4, 1)
    assert sorted(trial["values"]["x"] for trial in shown["trials"]) == [0.25, 0.5, 0.75, 1.0]
    assert (place / "page.html").read_bytes().startswith(b"<!doctype html>")


def test_values_that_a_program_hands_to_its_tracker(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    package = place / "packages" / "tensorboardX"  # stands for the real one, with its signature
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "writer.py").write_text(
        "class SummaryWriter:\n"
        "    kept = []\n"
        "    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):\n"
        "        self.kept.append((tag, scalar_value, global_step))\n"
    )
    (place / "program.py").write_text(textwrap.dedent(TRACKED))

    assert main(["sweep", "sweep.yaml", "--metric", "val/loss", "--trials", "2", "--jobs", "2"]) == 0

    assert "2 complete" in capsys.readouterr().out
    folder = place / "stepscope-sweeps" / "sweep" / "trial-0000"
    given = json.loads((folder / "parameters.json").read_text())["x"]
    assert json.loads((folder / "result.json").read_text())["value"] == given
    assert f"('val/loss', {given}, 1)" in (folder / "output.log").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml"], "none.yaml cannot be read: No such file or directory"),
        (["program.py"], "program.py"),
        (["sweep.yaml", "--metric", "step_ms", "--trials", "0"], "'0' is not a whole number from 1 on"),
        (["sweep.yaml", "more"], "'more' is one argument too many"),
        (["show"], "say which sweep to show"),
        (["show", "nothing"], "nothing is not a sweep's folder"),
        (["show", "x", "--trials", "3"], "stepscope sweep show only reports: it takes no --trials"),
    ],
)
def test_mistakes(
    words: list[str],
    sentence: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)

    assert main(["sweep", *words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err
