"""The schedule against torch's, and what it says of mistakes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepscope
from stepscope.errors import UsageError
from stepscope.record.schedule import action_of, every_step

torch = pytest.importorskip("torch")

NUMBERS = st.integers(0, 6)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(1, 6), NUMBERS, NUMBERS, st.booleans())
def test_it_means_what_torchs_means(
    wait: int, warmup: int, active: int, repeat: int, skip_first: int, skip_first_wait: bool
) -> None:
    given: dict[str, Any] = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    given |= {"skip_first": skip_first, "skip_first_wait": int(skip_first_wait)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a schedule without warm-up
        theirs = torch.profiler.schedule(**given)

    ours = stepscope.schedule(**given)

    assert [ours(step) for step in range(80)] == [theirs(step).name for step in range(80)]


def test_a_cycle_with_its_defaults() -> None:
    schedule = stepscope.schedule(active=2)

    assert [schedule(step) for step in range(4)] == ["WARMUP", "RECORD", "RECORD_AND_SAVE", "WARMUP"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"active": 0}, "schedule: active must be a number of steps, 1 or more, not 0"),
        ({"active": 1, "wait": -1}, "schedule: wait must be a number of steps, 0 or more, not -1"),
        ({"active": 1, "warmup": 1.5}, "schedule: warmup must be a number of steps, 0 or more, not 1.5"),
        ({"active": True}, "schedule: active must be a number of steps, 1 or more, not True"),
        ({"active": 1, "repeat": "2"}, "schedule: repeat must be a number of steps, 0 or more, not '2'"),
        ({"active": 1, "skip_first": None}, "schedule: skip_first must be a number of steps, 0 or more, not None"),
    ],
)
def test_mistakes_name_the_argument(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        stepscope.schedule(**given)

    assert str(caught.value) == sentence


def test_steps_are_counted_from_zero() -> None:
    with pytest.raises(UsageError, match="must be 0 or more, not -1"):
        stepscope.schedule(active=1)(-1)


def test_actions_by_word_and_by_torchs_object() -> None:
    assert every_step(10**9) == "RECORD"
    assert action_of("WARMUP") == "WARMUP"
    assert action_of(torch.profiler.ProfilerAction.RECORD_AND_SAVE) == "RECORD_AND_SAVE"
    with pytest.raises(UsageError, match="the schedule returned 3"):
        action_of(3)
