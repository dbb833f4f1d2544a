"""Doing something every n steps or every few seconds."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tqdm import tqdm

from stepscope.remedies import deferred_scalars
from stepscope.remedies.deferred_scalars import every


class Bar:
    """A progress bar that keeps what it was told."""

    def __init__(self, items: Any = ()) -> None:
        self.items = items
        self.told: list[Any] = []
        self.colour = "green"

    def __iter__(self) -> Any:
        return iter(self.items)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        self.told.append(n)

    def set_postfix(self, values: dict[str, Any], refresh: bool) -> None:
        self.told.append((values, refresh))

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as the test sets it."""
    now = [100.0]
    monkeypatch.setattr(deferred_scalars.time, "monotonic", lambda: now[0])
    return now


def test_steps() -> None:
    log_now = every(10)

    assert [step for step in range(35) if log_now(step)] == [0, 10, 20, 30]


def test_the_same_step_has_the_same_answer() -> None:
    log_now = every(10)

    assert [log_now(step) for step in (0, 0, 1, 1, 10, 10, 11)] == [True, True, False, False, True, True, False]


def test_steps_that_begin_late_or_leave_some_out() -> None:
    log_now = every(10)

    assert [step for step in range(1007, 1050, 4) if log_now(step)] == [1007, 1011, 1023, 1031, 1043]


def test_a_new_epoch_begins_anew() -> None:
    log_now = every(10)

    assert [step for step in (0, 5, 12, 0, 5, 12) if log_now(step)] == [0, 12, 0, 12]


def test_counted_calls() -> None:
    log_now = every(3)

    assert [log_now() for _ in range(8)] == [True, False, False, True, False, False, True, False]


def test_seconds(clock: list[float]) -> None:
    log_now = every(seconds=10)
    answers = []
    for clock[0] in (100.0, 105.0, 109.9, 110.0, 119.0, 121.0):
        answers.append(log_now())

    assert answers == [True, False, False, True, False, True]


def test_a_function() -> None:
    said: list[Any] = []

    def say(*what: Any, end: str = "") -> int:
        """Says it."""
        said.append((*what, end))
        return len(said)

    sparse = every(2)(say)

    assert [sparse(number, end="!") for number in range(5)] == [1, None, 2, None, 3]
    assert said == [(0, "!"), (2, "!"), (4, "!")]
    assert (sparse.__name__, sparse.__doc__) == ("say", "Says it.")


def test_each_wrapped_thing_has_its_own_count() -> None:
    said: list[str] = []
    rule = every(2)
    first, second = rule(lambda: said.append("first")), rule(lambda: said.append("second"))
    for _ in range(2):
        first()
        second()

    assert said == ["first", "second"]


def test_a_bar_gets_sums_and_the_last_postfix() -> None:
    inner = Bar()
    bar = every(3)(inner)
    for number in range(5):
        bar.update(2)
        bar.set_postfix(loss=torch.tensor(float(number)), rate="low")
    bar.close()

    assert inner.told == [
        2,
        ({"loss": 0.0, "rate": "low"}, True),
        6,
        ({"loss": 3.0, "rate": "low"}, True),
        ({"loss": 4.0, "rate": "low"}, True),
        2,
        "closed",
    ]
    assert bar.colour == "green"


def test_a_tensor_is_read_only_when_the_bar_is_drawn() -> None:
    class Loss(torch.Tensor):
        reads = 0

        def item(self) -> float:
            type(self).reads += 1
            return super().item()

    bar = every(10)(Bar())
    for _ in range(25):
        bar.set_postfix(loss=torch.ones(1).as_subclass(Loss))
    bar.close()

    assert Loss.reads == 4


def test_a_bar_that_is_iterated_over_shows_the_last_postfix() -> None:
    inner = Bar(range(4))
    bar = every(3)(inner)
    for number in bar:
        bar.set_postfix({"number": number})

    assert inner.told == [({"number": 0}, True), ({"number": 3}, True)]
    with every(5)(Bar()) as other:
        other.update()
        other.update()
    assert other.told == [1, 1, "closed"]


def test_a_real_bar_counts_to_its_end() -> None:
    out = io.StringIO()
    bar = every(7)(tqdm(total=50, file=out, mininterval=0))
    for number in range(50):
        bar.update()
        bar.set_postfix(loss=torch.tensor(number / 2))
    bar.close()

    assert "50/50" in out.getvalue()
    assert "loss=24.5" in out.getvalue()
    assert out.getvalue().count("loss=") < 40


def test_a_real_bar_that_is_iterated_over_is_drawn_as_rarely() -> None:
    out = io.StringIO()
    bar = every(10)(tqdm(range(25), file=out, mininterval=0))
    for number in bar:
        bar.set_postfix(number=number)

    shown = [part.split("|")[-1].split("[")[0].strip() for part in out.getvalue().split("\r") if "|" in part]
    assert list(dict.fromkeys(shown)) == ["0/25", "1/25", "11/25", "21/25", "25/25"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"every takes a number of steps or of seconds: every\(50\) or every\(seconds=10\)"),
        ({"steps": 1, "seconds": 1}, "every takes a number of steps or of seconds"),
        ({"steps": 0}, r"every\(0\) takes a whole number of steps from 1 on"),
        ({"steps": 1.5}, r"every\(1.5\) takes"),
        ({"steps": True}, r"every\(True\) takes"),
        ({"seconds": 0}, r"every\(seconds=0\) takes a number above 0"),
        ({"seconds": float("nan")}, r"every\(seconds=nan\)"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        every(**arguments)


def test_something_that_is_neither_step_nor_function_nor_bar() -> None:
    with pytest.raises(TypeError, match="every takes a step, a function or a progress bar, not str"):
        every(5)("loss")
