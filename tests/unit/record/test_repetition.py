"""Which function a program calls again and again, by the frames around a model's calls."""

from __future__ import annotations

import sys
from types import FrameType

from stepscope.record.lines import Tracing
from stepscope.record.repetition import Repetition


class Program:
    """Calls a model (its `model`) from functions; notes at which call a new repetition began."""

    def __init__(self) -> None:
        self.repetition = Repetition()
        self.begun: list[bool] = []

    def model(self) -> None:
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
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
