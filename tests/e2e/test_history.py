"""`stepscope history` over programs that were really run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from stepscope.record.run_folder import RunFolder
from tests.e2e.conftest import run_here, run_stepscope

pytest.importorskip("torch")

PROGRAM = """
    import sys, time, torch
    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(80):
        time.sleep(float(sys.argv[1]))
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
    print("trained")
"""


def test_the_steps_around_a_recording_make_a_history(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    data = {"STEPSCOPE_DATA_DIR": str(tmp_path / "data"), "STEPSCOPE_CACHE_DIR": str(tmp_path / "cache")}
    for name, seconds in (("train-1", "0.002"), ("train-2", "0.02")):
        words = ("--name", name, "--warmup", "4", "--no-diagnose", "--no-telemetry", "train.py", seconds)
        done = run_stepscope("run", *words, folder=tmp_path, **data)
        assert (done.code, done.out) == (0, "trained\n"), done

    # Steps are timed before and after the recording, and fifty of those after it: then the program is left alone.
    # Those during which the profiler is made ready, more of them on a busy machine, are left out.
    timed = {}
    for name in ("train-1", "train-2"):
        (recording,) = RunFolder(tmp_path / "data" / "runs" / name).recordings()
        (first, was_recorded, before), *rest = (
            (each["first_step"], each["recorded"], len(each["ns"])) for each in recording["step_times"]
        )
        assert (first, was_recorded, rest) == (1, False, [(4, True, 5), (9, False, 50)])
        assert 1 <= before <= 3
        assert recording["steps_seen"] == 59
        timed[name] = before + 50

    done = run_here("history", "train", "--json", "-", folder=tmp_path, **data)
    (series,) = done.json()["series"]
    assert (series["name"], series["place"], series["source"]) == ("train", str(tmp_path), "unprofiled")
    assert [run["name"] for run in series["runs"]] == ["train-1", "train-2"]
    assert [run["settings"]["command"].split()[1:] for run in series["runs"]] == [
        ["train.py", "0.002"],
        ["train.py", "0.02"],
    ]
    assert {run["name"]: run["steps"] + run["dropped"] for run in series["runs"]} == timed
    assert series["runs"][0]["step_ns"] >= 2e6
    assert series["runs"][1]["step_ns"] >= 20e6
