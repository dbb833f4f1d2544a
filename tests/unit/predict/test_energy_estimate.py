"""Estimated power and energy: bounds, never a guess."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import device_table, named_device
from stepscope.predict.cost.energy_parts import CONTEXT_W, power_range, step_energy

A100 = replace(named_device("A100-SXM4-80GB"), power_w=400, idle_power_w=None)
KNOWN = replace(A100, idle_power_w=60.0, idle_high_power_w=60.0)


def test_of_a_device_whose_idle_power_is_known() -> None:
    estimate = step_energy(KNOWN, 100e6, 70e6)

    # 30 ms at 60 W; 70 ms between 60 W and 400 W.
    assert estimate is not None
    assert estimate.low_j == pytest.approx(0.1 * 60)
    assert estimate.high_j == pytest.approx(0.07 * 400 + 0.03 * 60)
    assert estimate.formula == (
        "P = idle + (full - idle) x activity, with full = 400 W, idle = 60 W, activity 0 to 1 while it works and 0 else"
    )


def test_what_its_work_reaches_raises_the_lower_bound_alone() -> None:
    estimate = step_energy(KNOWN, 100e6, 70e6, least_activity=0.5)

    assert estimate is not None
    assert estimate.low_j == pytest.approx(0.07 * (60 + 340 / 2) + 0.03 * 60)
    assert estimate.formula.endswith(
        "activity 0.5 to 1 while it works, at least the share of the peak that its products reach (docs/energy.md), "
        "and 0 else"
    )
    assert estimate.high_j == pytest.approx(0.07 * 400 + 0.03 * 60)


def test_of_a_device_whose_idle_power_nobody_measured() -> None:
    power = power_range(A100)

    assert power is not None
    assert 0 < power.idle_low_w < 59 < power.idle_high_w < 400
    assert "typical of devices in the table" in power.source


def test_of_an_unknown_device_whose_limit_the_user_gives() -> None:
    power = power_range(None, device_watts=400)

    assert power is not None
    assert (power.idle_low_w, power.idle_high_w) == (0, 400)
    assert "its idle power is unknown" in power.source


def test_a_program_may_hold_a_device_that_was_measured_without_one() -> None:
    alone = power_range(replace(A100, idle_power_w=60))
    held = power_range(replace(A100, idle_high_power_w=80))
    amd = power_range(replace(A100, name="MI300X", vendor="AMD", idle_power_w=60))

    assert alone is not None
    assert held is not None
    assert amd is not None
    assert (alone.idle_low_w, alone.idle_high_w) == (60, 60 + CONTEXT_W)
    assert 0 < held.idle_low_w < held.idle_high_w == 80
    assert (amd.idle_low_w, amd.idle_high_w) == (60, 60)


def test_work_that_memory_limits_lowers_the_upper_bound_alone() -> None:
    row = replace(KNOWN, memory_power_w=200)
    power, part = power_range(row, memory_share=1), power_range(row, memory_share=0.5)

    assert power is not None
    assert part is not None
    assert (power.busy_low_w, power.busy_high_w, part.busy_high_w) == (60, 200, 300)
    assert "for 50% of its work, which memory limits, at most 200 W" in part.formula
    assert "as measured elsewhere" in part.source


def test_every_measured_power_has_a_source() -> None:
    for row in device_table():
        powers = [row.idle_power_w, row.idle_high_power_w, row.memory_power_w]
        known = [each for each in powers if each is not None]
        assert bool(known) == bool(row.power_source), row.name
        assert known == sorted(known), row.name
        assert all(each < (row.power_w or math.inf) for each in known), row.name


def test_where_it_is_not_known_how_long_the_device_works() -> None:
    estimate = step_energy(KNOWN, 100e6, None)

    assert estimate is not None
    assert (estimate.low_j, estimate.high_j) == (pytest.approx(0.1 * 60), pytest.approx(0.1 * 400))


def test_a_device_cannot_work_longer_than_the_step() -> None:
    assert step_energy(KNOWN, 100e6, 500e6) == step_energy(KNOWN, 100e6, 100e6)


@pytest.mark.parametrize("step_ns", [None, float("nan"), float("inf"), -1.0])
def test_a_step_of_unknown_length_has_no_energy(step_ns: float | None) -> None:
    assert step_energy(KNOWN, step_ns, 1.0) is None


def test_a_device_of_unknown_power_has_none() -> None:
    assert step_energy(replace(A100, power_w=None), 100e6, 70e6) is None
    assert power_range(None) is None


def test_the_users_figures_come_first() -> None:
    power = power_range(KNOWN, device_watts=300, idle_watts=50)

    assert power is not None
    assert (power.full_w, power.idle_low_w, power.idle_high_w) == (300, 50, 50)
    assert power.source == "full from the user, idle from the user"


def test_a_device_that_rests_harder_than_it_works() -> None:
    with pytest.raises(UsageError, match=r"500 W.*400 W"):
        power_range(KNOWN, idle_watts=500)
