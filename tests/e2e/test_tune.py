"""`stepscope tune` on real programs, each run in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Outcome, environment, run_here

pytest.importorskip("optuna")

SLEEPING = """
    import sys, time, stepscope
    slow = 0.02 if "--quick" not in sys.argv else 0.005
    if "--broken" in sys.argv:
        sys.exit("this option does not work")
    for number in range(1000):
        with stepscope.step():
            time.sleep(slow)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with programs in it."""
    (tmp_path / "sleeping.py").write_text(textwrap.dedent(SLEEPING))
    (tmp_path / "failing.py").write_text("print('about to fail'); raise SystemExit(7)")
    return tmp_path


OPTIONS = ("--steps", "8", "--no-profile", "--only", "zero-grad", "--study", "mine", "--knob", "--quick")


def tune(place: Path, *words: str) -> Outcome:
    return run_here("tune", *words, folder=place, STEPSCOPE_DATA_DIR=str(place / "data"))


def test_killed_and_gone_on_with_it_finds_what_helps_and_says_why_the_rest_does_not(place: Path) -> None:
    options = (*OPTIONS, "--knob", "--broken", "--precision", "20%", "sleeping.py")
    first = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "tune", *options],
        cwd=place,
        env=environment(STEPSCOPE_DATA_DIR=str(place / "data")),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert first.stderr is not None
    for line in first.stderr:
        if "screen (2 to go)" in line:  # the first trial has ended, the second has begun
            break
    first.kill()
    first.wait()
    time.sleep(0.1)

    ended = tune(place, "--json", "found.json", *options)
    assert ended.code == 0, ended
    assert "stepscope: continuing study mine; " in ended.err
    assert ended.err.count("screen") == 2  # the first is not measured again
    assert ended.out.startswith("Step 2"), ended.out
    assert " times faster (95 % interval " in ended.out
    assert "  python sleeping.py --quick\n" in ended.out
    found: dict[str, Any] = json.loads((place / "found.json").read_text())
    assert (found["is_proven"], found["best"]["arguments"], found["stop"]) == (True, ["--quick"], "done")
    assert 2 < 1 / (1 + found["proof"]["measured"]["change"]) < 4.2
    reasons = {str(list(trial["configuration"])): trial["reason"] for trial in found["trials"]}
    assert reasons["['--broken']"].endswith("before a step was seen: this option does not work")
    assert reasons["['zero-grad']"].startswith("not applied: ")
    assert json.loads((place / "data" / "tunes" / "mine" / "result.json").read_text()) == found
