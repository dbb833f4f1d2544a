"""What a run's folder adds to a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.compare.run_times import options_of, settings_of_run, unprofiled_steps
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((), {}),
        (("train.py",), {"command": "train.py"}),
        (
            ("python", "-m", "package.train", "--lr", "-1e-3", "--fast", "--bs=4", "data"),
            {"command": "python data", "option -m": "package.train", "option --lr": "-1e-3", "option --fast": "given",
             "option --bs": "4"},
        ),
        (("a.py", "--path", "x", "--path", "y"), {"command": "a.py", "option --path": "x y"}),
    ],
)  # fmt: skip
def test_options_of_a_command(command: tuple[str, ...], expected: dict[str, str]) -> None:
    assert options_of(command) == expected


def test_settings_of_a_run() -> None:
    manifest = RunManifest(
        ("train.py", "--workers", "4"),
        git={"commit": "a" * 40, "dirty": True, "changes": "train.py | 2 +-"},
        versions={"torch": "2.9"},
        environment={"OMP_NUM_THREADS": "1"},
    )

    found = settings_of_run(manifest)

    assert found["command"] == "train.py"
    assert found["option --workers"] == "4"
    assert found["git commit"] == "a" * 12 + " with changes"
    assert found["git changes"] == "train.py | 2 +-"
    assert found["variable OMP_NUM_THREADS"] == "1"


def test_steps_around_the_recording_without_the_warm_up(tmp_path: Path) -> None:
    steady = [100 + number % 5 for number in range(60)]
    times = [
        {"first_step": 1, "recorded": False, "ns": [9000] * 10},
        {"first_step": 11, "recorded": True, "ns": [500] * 5},
        {"first_step": 16, "recorded": False, "ns": steady},
    ]
    folder = RunFolder.create(tmp_path, "a", RunManifest(("a.py",), recordings=({"rank": 0, "step_times": times},)))

    assert unprofiled_steps(folder) == [steady]


def test_a_run_without_timed_steps(tmp_path: Path) -> None:
    assert unprofiled_steps(RunFolder.create(tmp_path, "a", RunManifest(("a.py",)))) == []
