"""How many steps of a run are its warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stepscope.compare.statistics import WarmUp, warm_up

NOISE = (0, 3, -2, 1, -3, 2, -1, 4, -4, 0)


def steps(count: int, *, level: float = 100.0, first: Sequence[float] = ()) -> list[float]:
    """Steps around a level, the first ones as given."""
    return [*first, *(level + NOISE[number % len(NOISE)] for number in range(count - len(first)))]


@pytest.mark.parametrize("step_ns", [[], [900.0], [900.0, 100.0], [900.0, 100.0, 100.0]])
def test_of_fewer_than_four_steps_none_is_dropped(step_ns: list[float]) -> None:
    assert warm_up(step_ns) == WarmUp(0, 1, True)


def test_steady_steps_all_count() -> None:
    assert warm_up([100.0] * 50) == WarmUp(0, 5, True)
    assert warm_up(steps(50)) == WarmUp(0, 5, True)


def test_one_slow_step_at_the_beginning_goes_with_its_batch() -> None:
    assert warm_up(steps(50, first=[2000.0])) == WarmUp(5, 5, True)


def test_few_steps_are_looked_at_one_by_one() -> None:
    assert warm_up([900.0, 100.0, 101.0, 99.0]) == WarmUp(1, 1, True)
    assert warm_up(steps(20, first=[900.0, 400.0, 150.0])) == WarmUp(4, 2, True)


def test_a_slow_start_is_dropped_and_what_comes_again_later_is_not() -> None:
    assert warm_up(steps(100, first=[300.0] * 18)).dropped == 20
    later = steps(100)
    later[40] = later[90] = 160.0
    assert warm_up(later).dropped == 0


def test_faster_steps_at_the_beginning_are_no_steady_state_either() -> None:
    assert warm_up(steps(100, first=[20.0] * 10)).dropped == 10


def test_no_more_than_half_is_dropped_and_a_rest_that_changes_is_not_steady() -> None:
    falling = [float(1000 - 10 * number) for number in range(60)]
    assert warm_up(falling) == WarmUp(30, 5, False)


def test_a_small_change_of_the_rest_is_none() -> None:
    assert warm_up([*[100.0] * 25, *[101.0] * 25]).steady
