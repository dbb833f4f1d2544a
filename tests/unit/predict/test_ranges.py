from __future__ import annotations

import numpy as np
import pytest

from stepscope.predict.ranges import GUESSED, HOST, STEP, step_band, widths, with_host

ONE = np.array([0]), np.arange(1)
TEN = np.array([10.0])


def ends(kind: str, known: dict[str, float], low: float = 5.0, high: float = 20.0) -> list[float]:
    found = step_band(TEN, np.array([low]), np.array([high]), np.array([kind]), *ONE, known)
    return [float(found[0][0]), float(found[1][0])]


def test_a_width_is_a_power_of_the_bands_factors() -> None:
    known = {STEP: 0.5, "matrix": 1.0, GUESSED: 0.5}

    assert ends("matrix", known) == pytest.approx([10 / 2**0.5, 10 * 2**0.5])


def test_what_was_learned_errs_as_much_either_way_and_guesses_do_not() -> None:
    known = {STEP: 1.0, "matrix": 1.0, GUESSED: 1.0}

    assert ends("matrix", known, low=5.0, high=80.0) == pytest.approx([3.01, 33.2], rel=0.01)
    assert ends(GUESSED, known, low=5.0, high=80.0) == pytest.approx([5.0, 80.0])


def test_kinds_without_a_width_keep_their_bands() -> None:
    assert ends("communication", {STEP: 0.1}, low=0.0) == [0.0, 20.0]


def test_the_table_has_what_steps_need() -> None:
    assert {STEP, HOST, GUESSED, "matrix", "elementwise", "softmax", "normalisation"} <= set(widths())
    assert all(0 < width < 3 for width in widths().values())


def test_a_width_holds_four_of_five_cases_of_one_more_group() -> None:
    ranges = pytest.importorskip("scripts.predictor.ranges", exc_type=ImportError)
    scores = {"A": np.linspace(0.01, 1, 100), "B": np.array([0.1])}

    assert ranges.width_of({str(score): np.array([float(score)]) for score in range(1, 10)}) == pytest.approx(8)
    assert ranges.width_of(scores) == pytest.approx(0.5, abs=0.03)  # of two groups the larger, in half of the draws
    assert ranges.left_out_in_turn(scores) == {"A": pytest.approx(0.1), "B": 1.0}


def test_the_host_and_the_device_err_apart() -> None:
    width = widths()[HOST]

    low, high = with_host(1000.0, 400.0, 900.0, 1200.0)

    assert low == pytest.approx(1000 - np.hypot(100, 600 * (1 - np.exp(-width))))
    assert high == pytest.approx(1000 + np.hypot(200, 600 * (np.exp(width) - 1)))
    assert with_host(1000.0, 1100.0, 1000.0, 1000.0) == (1000.0, 1000.0)


def test_a_score_is_the_error_in_half_widths() -> None:
    ranges = pytest.importorskip("scripts.predictor.ranges", exc_type=ImportError)
    scores = ranges.distances(np.array([20.0, 5.0]), np.full(2, 10.0), np.full(2, 2.5), np.full(2, 40.0))

    assert scores.tolist() == pytest.approx([0.5, 0.5])
