"""The times of steps that no profiler slowed down."""

from __future__ import annotations

import pytest

from stepscope.record.counters import ConsecutiveSteps, StepTimes


class Clock:
    """Tells a time that the test moves on."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def timed(*steps: tuple[int, int, bool | None]) -> list[dict[str, object]]:
    """What is kept of steps of (number, nanoseconds, recorded), each 5 ns after the one before.

    Half of each was worked, with 3 page faults a nanosecond.
    """
    clock = Clock()
    times = StepTimes(clock, lambda: clock.ns // 2, lambda: 3 * clock.ns)
    for number, length_ns, recorded in steps:
        times.begins(number, recorded)
        clock.ns += length_ns
        times.ended()
        clock.ns += 5
    return times.to_json()


def test_nothing_was_timed() -> None:
    assert timed() == []
    times = StepTimes()
    times.ended()
    assert times.to_json() == []


def test_what_happens_between_steps_is_no_part_of_them() -> None:
    assert timed((1, 10, False), (2, 20, False)) == [
        {"first_step": 1, "recorded": False, "ns": [10, 20], "processor_ns": [5, 10], "faults": [30, 60]}
    ]


def test_recorded_steps_stand_apart_and_those_that_say_nothing_are_left_out() -> None:
    assert timed((1, 10, False), (2, 99, None), (3, 30, True), (4, 31, True), (5, 11, False)) == [
        {"first_step": 1, "recorded": False, "ns": [10], "processor_ns": [5], "faults": [30]},
        {"first_step": 3, "recorded": True, "ns": [30, 31], "processor_ns": [15, 15], "faults": [90, 93]},
        {"first_step": 5, "recorded": False, "ns": [11], "processor_ns": [5], "faults": [33]},
    ]


def test_steps_that_were_not_seen_part_a_stretch() -> None:
    assert [each["first_step"] for each in timed((1, 10, False), (4, 10, False))] == [1, 4]


def test_machines_that_count_no_pages_are_timed_all_the_same() -> None:
    times = StepTimes(faults=lambda: None)
    times.begins(1, False)
    times.ended()
    assert [(len(each.durations_ns), each.faults) for each in times.stretches] == [(1, [])]


def test_cleared_times_are_gone() -> None:
    clock = Clock()
    times = StepTimes(clock)
    times.begins(1, False)
    times.clear()
    times.ended()
    assert times.to_json() == []


@pytest.mark.parametrize(
    "content",
    [None, [], {}, {"first_step": "1", "ns": [1]}, {"first_step": 1, "ns": [1, None]}, {"first_step": 1, "ns": [-1]}],
)
def test_what_is_no_stretch_is_none(content: object) -> None:
    assert ConsecutiveSteps.from_json(content) is None


def test_a_stretch_comes_back_from_the_run_folder() -> None:
    stretch = ConsecutiveSteps(7, True, [1, 2, 3], [1, 1, 2], [0, 0, 5])
    assert ConsecutiveSteps.from_json(stretch.to_json()) == stretch
    for unfit in ([1, 1], None, [1, 1, -2]):  # an older or damaged folder
        assert ConsecutiveSteps.from_json(
            {**stretch.to_json(), "processor_ns": unfit, "faults": unfit}
        ) == ConsecutiveSteps(7, True, [1, 2, 3])
