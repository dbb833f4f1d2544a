"""`stepscope bench` on real programs, each run in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.conftest import Outcome, environment, run_here

SLEEPING = """
    import sys, time, stepscope
    for number in range(int(sys.argv[2])):
        with stepscope.step():
            time.sleep(float(sys.argv[1]) / 1000 * (10 if number < 3 else 1))
    print("ended by itself")
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with programs in it."""
    (tmp_path / "sleeping.py").write_text(textwrap.dedent(SLEEPING))
    (tmp_path / "failing.py").write_text("print('about to fail'); raise SystemExit(7)")
    (tmp_path / "idle.py").write_text("print('no step here')")
    return tmp_path


def bench(place: Path, *words: str) -> Outcome:
    return run_here("bench", *words, folder=place, STEPSCOPE_DATA_DIR=str(place / "data"))


def test_the_slower_one_is_named_with_an_interval_and_the_warm_up_is_left_out(place: Path) -> None:
    ended = bench(
        place, "sleeping.py 10 1000", "WHY=1 python sleeping.py 30 1000", "--steps", "12", "--rounds", "3",
        "--precision", "0.1%", "--json", "-", "--fail-if-slower", "5%", "--markdown", "table.md",
    )  # fmt: skip
    assert ended.code == 1, ended
    assert "B is slower by " in ended.err
    content = ended.json()
    [found] = content["comparisons"]
    assert found["verdict"] == "slower"
    assert 0 < found["change_low"] <= found["change"] <= found["change_high"]
    assert 1.0 < found["change"] < 3.0  # three times as long, less what a sleep itself takes more than it should
    assert (content["rounds"], content["stop"]) == (3, "rounds")
    runs = [run for command in content["commands"] for run in command["runs"]]
    assert len(runs) == 6
    for run in runs:
        assert (run["source"], run["clock"], run["complete"], len(run["step_ns"])) == ("explicit", "host", True, 12)
        assert 2 <= run["dropped"] <= 6  # two of the three slow ones are timed
    assert "| B | " in (place / "table.md").read_text()
    assert "round 3 of at most 3: " in ended.err
    log = next((place / "data" / "benches").glob("sleeping-*/A-1/output.log"))
    assert log.read_text() == ""  # it was ended


def test_the_same_program_twice(place: Path) -> None:
    ended = bench(place, "sleeping.py 10 13", "sleeping.py 10 13", "--rounds", "2", "--folder", "kept")

    assert ended.code == 0, ended
    assert "B against A: " in ended.out
    assert "A ended by itself after 12 of 50 timed steps." in ended.out
    assert "stepscope: 2 commands in turn; logs in " in ended.err
    [log] = place.glob("kept/sleeping-*/B-2/output.log")
    assert log.read_text() == "ended by itself\n"


def test_a_program_that_fails(place: Path) -> None:
    ended = bench(place, "sleeping.py 1 1000", "failing.py --now", "--steps", "5")

    assert (ended.code, ended.out) == (2, "")
    assert (
        "\n  about to fail\nstepscope: command B, failing.py --now, failed with exit code 7 before a step" in ended.err
    )
    assert ended.err.endswith("B-1/output.log\n")


def test_a_program_without_steps(place: Path) -> None:
    ended = bench(place, "idle.py", "idle.py")

    assert (ended.code, ended.out) == (2, "")
    assert "command A, idle.py, ended without a visible step: it did not import torch; put the body" in ended.err
    assert "`with stepscope.step():`" in ended.err


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not show environments")
def test_ctrl_c_shows_what_was_measured_and_leaves_nothing_running(place: Path) -> None:
    words = ["bench", "sleeping.py 2 1000", "sleeping.py 4 1000", "--steps", "20", "--precision", "0.001%"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", *words],
        cwd=place,
        env=environment(STEPSCOPE_DATA_DIR=str(place / "data")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "round 1" not in (line := process.stderr.readline()) or ": B " not in line:
        assert line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()

    assert process.returncode == 130, err
    assert "Interrupted after " in out
    assert "B against A: " in out
    assert "Traceback" not in err
    sign = os.fsencode(place / "data" / "benches")
    left = [entry for entry in Path("/proc").glob("[0-9]*/environ") if sign in _content(entry)]
    assert left == []


def _content(path: Path) -> bytes:
    try:
        return b" ".join(part for part in path.read_bytes().split(b"\0") if part.startswith(b"STEPSCOPE_RUN="))
    except OSError:
        return b""


TRAINING = """
    import sys, time, torch
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        model(torch.ones(4, 16)).sum().backward()
        time.sleep(float(sys.argv[1]) / 1000)
        optimizer.step()
"""


def test_a_training_program_and_what_its_profiles_say(place: Path) -> None:
    pytest.importorskip("torch")
    (place / "train.py").write_text(textwrap.dedent(TRAINING))
    ended = bench(
        place, "train.py 40", "train.py 5", "--steps", "10", "--rounds", "2", "--profile", "--json", "report.json"
    )
    assert ended.code == 0, ended
    assert "B against A: " in ended.out  # what it says of times depends on what else the machine does
    assert "A step ends with an optimizer's step, by the host's clock." in ended.out
    assert "What the difference of a step is made of" in ended.out
    profile = json.loads((place / "report.json").read_text())["profile"]
    assert len(profile["comparisons"]) == 1
