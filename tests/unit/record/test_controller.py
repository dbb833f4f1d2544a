"""Captures of a running program, with a recorder that only notes what is asked of it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.record.controller import CaptureRequest, CaptureResult, StepController, StepSource
from stepscope.record.schedule import RecordOptions


class Notes:
    """A recorder that notes its calls; the first word is the number of its first step."""

    def __init__(self, calls: list[str], first_step: int, save_fails: bool) -> None:
        self.calls = calls
        self.first_step = first_step
        self.save_fails = save_fails

    notice = None

    def prepare(self) -> None:
        self.calls.append("prepare")

    def start(self) -> None:
        self.calls.append(f"start {self.first_step}")

    def step(self) -> None:
        self.calls.append("step")

    def stop(self) -> None:
        self.calls.append("stop")

    def discard(self) -> None:
        self.calls.append("discard")

    def save(self, path: Path) -> Path:
        if self.save_fails:
            raise UsageError("the disk is full")
        self.calls.append("save")
        return path


class Program:
    """A controller with steps that the test takes."""

    def __init__(self, save_fails: bool = False) -> None:
        self.calls: list[str] = []
        self.controller = StepController(
            lambda: Path("trace"), make_recording=lambda options, first: Notes(self.calls, first, save_fails)
        )

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.calls.append("|")
            self.controller.step_boundary()

    @property
    def noted(self) -> str:
        return " ".join(self.calls)


def test_without_a_request_steps_are_only_counted() -> None:
    program = Program()
    program.steps(3)

    assert (program.noted, program.controller.current_step()) == ("| | |", 3)


def test_a_capture_begins_after_a_step_of_warm_up() -> None:
    program = Program()
    program.steps(2)
    handle = program.controller.request(CaptureRequest(steps=2))
    program.steps(5)

    assert program.noted == "| | | prepare | start 4 | step | stop save |"
    assert handle.wait(0) == CaptureResult(Path("trace"), first_step=4, steps=2)


def test_every_rank_can_record_the_same_steps() -> None:
    program = Program()
    handle = program.controller.request(CaptureRequest(steps=1, first_step=4, out=Path("x")))
    program.steps(3)
    assert (program.noted, handle.is_recording) == ("| | | prepare", False)
    program.steps(1)
    assert handle.is_recording
    program.steps(1)

    assert handle.wait(0) == CaptureResult(Path("x"), first_step=4, steps=1)


def test_a_first_step_that_has_passed_means_the_next() -> None:
    program = Program()
    program.steps(7)
    handle = program.controller.request(CaptureRequest(steps=1, first_step=3))
    program.steps(2)

    assert program.noted.endswith("| prepare start 8 | stop save")
    assert handle.wait(0).first_step == 8


def test_a_capture_of_seconds_ends_with_a_whole_step() -> None:
    program = Program()
    handle = program.controller.request(CaptureRequest(seconds=0.02))
    program.steps(3)
    time.sleep(0.03)
    assert handle.result is None
    program.steps(1)

    assert handle.wait(0).steps == 2


def test_captures_follow_each_other() -> None:
    program = Program()
    first, second = (program.controller.request(CaptureRequest(steps=1)) for _ in range(2))
    program.steps(4)

    assert program.noted == "| prepare | start 2 | stop save prepare | start 4"
    assert (first.wait(0).first_step, second.is_recording) == (2, True)


def test_finishing_keeps_the_step_that_runs() -> None:
    program = Program()
    handle = program.controller.request(CaptureRequest())
    program.steps(4)
    handle.finish()
    assert handle.result is None
    program.steps(1)

    assert handle.wait(0) == CaptureResult(Path("trace"), first_step=2, steps=3)


def test_cancelling_keeps_nothing() -> None:
    program = Program()
    running, waiting = (program.controller.request(CaptureRequest(steps=9)) for _ in range(2))
    program.steps(3)
    waiting.cancel()
    running.cancel()
    running.cancel()
    program.steps(2)

    assert (running.wait(0).cancelled, running.wait(0).path, waiting.wait(0).cancelled) == (True, None, True)
    assert program.noted == "| prepare | start 2 | step discard | |"


def test_the_end_of_the_program_keeps_what_there_is() -> None:
    program = Program()
    handles = [program.controller.request(CaptureRequest(steps=9)) for _ in range(2)]
    program.steps(4)
    program.controller.finish("the program ended")

    assert handles[0].wait(0) == CaptureResult(Path("trace"), 2, 2, problem="the program ended")
    assert handles[1].wait(0) == CaptureResult(problem="the program ended")


def test_a_trace_that_cannot_be_saved_is_a_sentence() -> None:
    program = Program(save_fails=True)
    handle = program.controller.request(CaptureRequest(steps=1))
    program.steps(3)

    assert handle.wait(0) == CaptureResult(problem="the disk is full")


@pytest.mark.parametrize(
    ("taken", "expected"), [(0, "no step ended within"), (1, "no step ended within"), (4, "no step")]
)
def test_no_step_comes_by(taken: int, expected: str) -> None:
    program = Program()
    handle = program.controller.request(CaptureRequest(steps=9, timeout_s=0.1))
    program.steps(taken)
    result = handle.wait(10)

    assert result.problem is not None
    assert result.problem.startswith(expected)
    assert (result.path is not None, result.steps) == (taken == 4, 2 if taken == 4 else 0)


def test_waiting_for_a_capture_that_goes_on() -> None:
    with pytest.raises(TimeoutError):
        Program().controller.request(CaptureRequest(steps=1)).wait(0.01)


def test_requests_come_from_other_threads_while_steps_are_taken() -> None:
    program = Program()
    results: list[CaptureResult] = []

    def ask() -> None:
        results.append(program.controller.request(CaptureRequest(steps=2)).wait(20))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        program.controller.step_boundary()
        time.sleep(0.001)

    first_steps = sorted(result.first_step or 0 for result in results)
    assert [result.steps for result in results] == [2] * 5
    assert all(later - earlier >= 2 for earlier, later in pairwise(first_steps))


def test_a_better_sign_of_steps_overrules_a_lesser_one() -> None:
    program = Program()
    seen: list[StepSource] = []
    program.controller.on_source = seen.append
    for name in ("LOADER", "OPTIMIZER", "LOADER", "FORWARD", "OPTIMIZER"):
        program.controller.step_boundary(StepSource[name])

    assert program.controller.current_step() == 3
    assert seen == [StepSource.LOADER, StepSource.OPTIMIZER]


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"steps": 1, "seconds": 1.0}]
)
def test_requests_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        CaptureRequest(options=RecordOptions(), **wrong)  # type: ignore[arg-type]
