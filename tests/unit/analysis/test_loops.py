"""Short sequences of operators that repeat many times in a row."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.host import host_activity
from stepscope.analysis.loops import LONGEST_BODY, Loop, loops
from stepscope.trace import Trace, Window
from tests.unit.recording import Recording

EVERYTHING = Window(0, 2**40)


def loops_of(
    recording: Recording, minimum: int = 4, window: Window = EVERYTHING, step_starts: tuple[int, ...] = ()
) -> list[Loop]:
    trace = recording.trace()
    return loops(trace, host_activity(trace), window, minimum, np.array(step_starts, np.int64))


def found(recording: Recording, minimum: int = 4, window: Window = EVERYTHING) -> list[tuple[int, tuple[str, ...]]]:
    return [(loop.repetitions, loop.body) for loop in loops_of(recording, minimum, window)]


def run_of(*names: str, start: int = 0) -> Recording:
    recording = Recording()
    for number, name in enumerate(names):
        recording.operator(start + 10 * number, 8, name)
    return recording


def test_no_operators() -> None:
    trace = Trace.from_tables({})

    assert loops(trace, host_activity(trace), EVERYTHING, 4, np.zeros(0, np.int64)) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", []),
        ("aaa", []),
        ("aaaa", [(4, ("a",))]),
        ("xaaaaay", [(5, ("a",))]),
        ("abababa", []),
        ("abababab", [(4, ("a", "b"))]),
        ("xababababay", [(4, ("a", "b"))]),
        ("abcabcabcabc", [(4, ("a", "b", "c"))]),
        ("aabaabaabaab", [(4, ("a", "a", "b"))]),
        ("aaaaxbbbbb", [(4, ("a",)), (5, ("b",))]),
        ("abcdefgh", []),
    ],
)
def test_runs(names: str, expected: list[tuple[int, tuple[str, ...]]]) -> None:
    assert found(run_of(*names)) == expected


def test_how_often_is_enough() -> None:
    assert found(run_of(*"abababab"), minimum=4) == [(4, ("a", "b"))]
    assert found(run_of(*"abababab"), minimum=5) == []


def test_a_long_body_is_a_layer_and_no_loop() -> None:
    body = [f"op{number}" for number in range(LONGEST_BODY + 1)]

    assert found(run_of(*body * 5)) == []
    assert found(run_of(*body[:-1] * 5)) == [(5, tuple(body[:-1]))]


def test_only_outermost_operators_count() -> None:
    recording = Recording()
    for number in range(5):
        recording.operator(100 * number, 80, "aten::linear")
        recording.operator(100 * number + 10, 20, f"aten::inner{number}")

    loop = loops_of(recording)[0]

    assert (loop.repetitions, loop.body) == (5, ("aten::linear",))
    assert loop.operators.tolist() == [0, 2, 4, 6, 8]


def test_threads_do_not_mix() -> None:
    recording = Recording()
    other = recording.thread("2")
    for number in range(5):
        recording.operator(10 * number, 4, "a")
        recording.operator(10 * number + 5, 4, "b", other)

    assert found(recording) == [(5, ("a",)), (5, ("b",))]


def test_a_run_ends_where_a_step_does() -> None:
    steps = (0, 30, 75)

    assert [loop.repetitions for loop in loops_of(run_of(*"aaaaaaaaaaaaaa"), step_starts=steps)] == [5, 6]


def test_a_window_chooses_operators_by_their_start() -> None:
    assert found(run_of(*"aaaaaaaa"), window=Window(10, 60)) == [(5, ("a",))]


@pytest.mark.parametrize(
    "around", ["Optimizer.step#SGD.step", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"]
)
def test_what_the_optimizer_and_the_loader_repeat_is_no_loop(around: str) -> None:
    recording = run_of(*"aaaaaa", start=10)
    recording.annotation(0, 500, around)

    assert found(recording) == []


@pytest.mark.parametrize("name", ["autograd::engine::evaluate_function: AddBackward0", "AddBackward0", "MmBackward"])
def test_the_backward_pass_is_no_loop(name: str) -> None:
    assert found(run_of(*[name] * 6)) == []
