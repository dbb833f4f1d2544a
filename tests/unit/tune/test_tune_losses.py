"""Losses of an unchanged and a changed program, written by hand."""

from __future__ import annotations

import msgspec
import pytest

from stepscope.tune.trials import TOLERANCES, LossCheck, compare_losses

NAN = float("nan")


def test_no_losses_are_not_compared() -> None:
    found = compare_losses([(), ()], [()], tolerance=1e-4)
    assert (found.equal, found.largest) == (None, None)


def test_losses_on_one_side_only_differ() -> None:
    assert compare_losses([(1.0,)], [()], tolerance=1e-4).equal is False
    assert compare_losses([()], [(1.0,)], tolerance=1e-4).equal is False


def test_the_largest_relative_difference_counts() -> None:
    found = compare_losses([(10.0, 8.0)], [(10.0, 8.0004)], tolerance=1e-4)
    assert found == LossCheck(True, pytest.approx(5e-5), 1e-4, "tolerance", 2)
    found = compare_losses([(10.0, 8.0)], [(10.0, 8.0), (10.0, 8.008)], tolerance=1e-4)
    assert (found.equal, found.largest) == (False, pytest.approx(1e-3))
    assert found.sentence == "the losses differ"


def test_small_losses_at_the_end_of_a_training_are_not_divided_by_next_to_nothing() -> None:
    found = compare_losses([(10.0, 1e-9)], [(10.0, 2e-9)], tolerance=1e-4)
    assert found.equal is True
    assert found.largest == pytest.approx(1e-9 / 0.5)


def test_a_program_that_is_not_repeatable_is_judged_by_its_own_spread() -> None:
    before = [(10.0, 9.0), (10.0, 9.09)]
    assert compare_losses(before, [(10.0, 9.15)], tolerance=1e-4).basis == "runs"
    assert compare_losses(before, [(10.0, 9.15)], tolerance=1e-4).equal is True
    found = compare_losses(before, [(10.0, 9.5)], tolerance=1e-4)
    assert (found.equal, found.basis, found.allowed) == (False, "runs", pytest.approx(2 * 0.09 / 9.045))


def test_other_random_numbers_are_judged_by_another_seed() -> None:
    before, after = [(10.0, 9.0)], [(10.2, 9.3)]
    assert compare_losses(before, after, tolerance=1e-4).equal is False
    found = compare_losses(before, after, tolerance=1e-4, seeded=(10.5, 8.5))
    assert (found.equal, found.basis, found.allowed) == (True, "seed", pytest.approx(0.5 / 9))
    assert compare_losses(before, [(20.0, 9.0)], tolerance=1e-4, seeded=(10.5, 8.5)).equal is False


def test_a_loss_that_is_no_number_any_more() -> None:
    found = compare_losses([(1.0, 0.9)], [(1.0, NAN)], tolerance=0.5)
    assert (found.equal, found.sentence) == (False, "loss 2 is no longer a number")
    assert compare_losses([(1.0, NAN)], [(1.0, NAN)], tolerance=1e-4).equal is True


def test_runs_of_different_lengths_are_compared_as_far_as_both_go() -> None:
    assert compare_losses([(1.0, 2.0, 3.0)], [(1.0, 2.0)], tolerance=1e-4).compared == 2


def test_the_coarser_the_numbers_the_more_is_allowed() -> None:
    assert list(TOLERANCES.values()) == sorted(TOLERANCES.values())
    check = LossCheck(False, 0.5, 0.1, "seed", 3, "no")
    assert msgspec.convert(msgspec.to_builtins(check), LossCheck) == check
