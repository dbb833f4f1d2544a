"""What the integrations share: a recording that a framework's hooks drive, in whatever order they come."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope
from stepscope.integrations._recording import DEFAULT_SCHEDULE, FrameworkRecording, within_run
from stepscope.record.controller import StepController, StepSource, set_controller

pytest.importorskip("torch")


def recording(folder: Path, **numbers: int) -> FrameworkRecording:
    when = stepscope.schedule(**numbers) if numbers else None
    return FrameworkRecording("the loop", folder / "trace.json.gz", when, {"lines": False})


@pytest.fixture
def run_of_stepscope(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StepController]:
    """This process as `stepscope run` leaves it: with a controller that records."""
    monkeypatch.setenv("STEPSCOPE_RUN", str(tmp_path))
    steps = StepController()
    set_controller(steps)
    yield steps
    set_controller(None)


def test_hooks_without_a_beginning_do_nothing(tmp_path: Path) -> None:
    nothing = recording(tmp_path)
    nothing.step()
    nothing.end()
    nothing.end()
    assert nothing.traces == ()
    assert not nothing.is_recording


def test_the_default_schedule_records_five_steps_once() -> None:
    actions = [DEFAULT_SCHEDULE(step) for step in range(30)]
    assert actions == ["NONE"] * 5 + ["WARMUP"] * 2 + ["RECORD"] * 4 + ["RECORD_AND_SAVE"] + ["NONE"] * 18


@pytest.mark.slow
def test_a_recording_that_was_broken_off_is_saved_when_the_next_begins(tmp_path: Path) -> None:
    twice = recording(tmp_path, warmup=0, active=5)
    twice.begin()
    twice.step()
    twice.begin()
    twice.step()
    twice.end()
    assert [path.name for path in twice.traces] == ["trace.json.gz", "trace-2.json.gz"]


def test_an_obstacle_is_said_and_nothing_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = recording(tmp_path, warmup=0, active=1)
    busy.begin("another profiler runs")
    busy.step()
    busy.end()
    assert busy.traces == ()
    assert capsys.readouterr().err == "stepscope: the loop is not recorded: another profiler runs\n"


def test_a_recording_that_overlaps_is_refused_without_raising(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = recording(tmp_path), recording(tmp_path)
    first.begin()
    try:
        second.begin()
    finally:
        first.end()
    assert "the loop is not recorded: profile: another profile block is open" in capsys.readouterr().err


def test_within_stepscope_run_only_the_steps_are_marked(tmp_path: Path, run_of_stepscope: StepController) -> None:
    marking = recording(tmp_path, warmup=0, active=1)
    marking.begin()
    for _ in range(3):
        marking.step()
    marking.end()

    assert marking.traces == ()
    assert (run_of_stepscope.current_step(), run_of_stepscope.source) == (3, StepSource.EXPLICIT)


def test_an_agent_alone_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_RUN", raising=False)
    set_controller(StepController())
    try:
        assert not within_run()
    finally:
        set_controller(None)


def test_a_copy_begins_anew(tmp_path: Path) -> None:
    original = FrameworkRecording("the loop", tmp_path / "trace.json", None, {"diagnose": True})
    copy = pickle.loads(pickle.dumps(original))
    assert copy.traces == ()
    assert copy._arguments == original._arguments


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_recording_to_its_parent(tmp_path: Path) -> None:
    parent = recording(tmp_path, warmup=0, active=9)
    parent.begin()
    child = os.fork()
    if child == 0:
        parent.end()
        os._exit(len(list(tmp_path.iterdir())))
    _, status = os.waitpid(child, 0)
    parent.end()

    assert os.waitstatus_to_exitcode(status) == 0
    assert len(parent.traces) == 1


def test_the_package_imports_no_framework() -> None:
    import subprocess

    program = "import stepscope.integrations, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
