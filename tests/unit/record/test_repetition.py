"""Which function a program calls again and again, by the frames around a model's calls."""

from __future__ import annotations

import sys
import time
from textwrap import dedent
from types import FrameType

import pytest

from stepscope.record.lines import Tracing
from stepscope.record.repetition import Repetition


class Program:
    """Calls a model (its `model`) from functions; notes at which call a new repetition began."""

    def __init__(self) -> None:
        self.repetition = Repetition()
        self.test = sys._getframe(1)
        self.begun: list[bool] = []

    def model(self) -> None:
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.test:
            frames.append(frame)
            frame = frame.f_back
        frames.append(self.test)
        self.begun.append(self.repetition.begins(frames[::-1]))

    def request(self, calls: int = 3) -> None:
        for _ in range(calls):
            self.model()


def test_each_call_of_the_function_is_a_repetition_from_the_third_on() -> None:
    program = Program()
    for _ in range(5):
        program.request()

    first, later = [True, False, False], [False] * 3
    assert program.begun == [*later, *later, *first, *first, *first]


def test_a_function_that_is_called_again_may_turn_out_to_be_repeated() -> None:
    program = Program()
    program.request()
    assert not program.repetition.has_candidates

    program.request()
    assert program.repetition.has_candidates


def test_a_plain_loop_is_none() -> None:
    program = Program()
    for _ in range(20):
        program.model()

    assert program.begun == [False] * 20


def test_the_outer_one_of_two_repeated_functions_is_chosen() -> None:
    def outer() -> None:
        program.request(2)
        program.request(2)

    program = Program()
    for _ in range(6):
        outer()

    assert program.begun[-8:] == [True, False, False, False] * 2


def test_frames_are_told_apart_while_their_lines_are_recorded() -> None:
    program = Program()
    for _ in range(3):
        program.request()
    watch = Tracing()
    assert watch.start(sys._getframe()) is None
    program.request()
    program.request()
    watch.stop()
    program.request()

    assert program.begun[-12:] == [True, False, False] * 4
    assert len(watch.threads[0][1]) > 9


def test_inside_other_functions_the_chosen_one_settles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a script, `answer` calls `encode`, which calls a function for each of 20 samples."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    program = Program()
    names = {"program": program, "now": now}
    exec(  # a module of its own, as a script is
        dedent("""\
            def predict():
                now[0] += 0.001
                program.model()
            def encode():
                for _ in range(20):
                    predict()
            def answer():
                encode()
            def main():
                for _ in range(60):
                    answer()
            main()
            """),
        names,
    )

    begun = [at for at, is_begun in enumerate(program.begun) if is_begun]
    assert begun == list(range(begun[0], len(program.begun), 20))  # `answer`, not what it calls
