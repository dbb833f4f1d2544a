"""Scalars that are handed on later: all of them, in order, with the values they had."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.remedies import deferred_scalars
from stepscope.remedies.deferred_scalars import DeferredScalars


class SimulatedStreams:
    """A device whose copies are finished when the test says so; its tensors are the CPU's."""

    def __init__(self) -> None:
        self.done = 0
        self.recorded = 0
        self.waited_for: list[int] = []
        streams = self

        class Event:
            def record(self, stream: object) -> None:
                streams.recorded += 1
                self.number = streams.recorded

            def query(self) -> bool:
                return self.number <= streams.done

            def synchronize(self) -> None:
                if not self.query():
                    streams.waited_for.append(self.number)
                    streams.done = self.number

        self.Event = Event

    def current_stream(self, device: torch.device) -> None:
        return None


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimulatedStreams:
    """Tensors of the CPU count as a device's, which works behind the host."""
    simulated = SimulatedStreams()
    monkeypatch.setattr(deferred_scalars, "streams_of", lambda device: simulated)
    monkeypatch.setattr(deferred_scalars, "_is_on_host", lambda tensor: False)
    return simulated


class Given:
    """What was handed on."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, float]] = []

    def __call__(self, step: int, name: str, value: float) -> None:
        self.rows.append((step, name, value))


def train_until_it_fails(write: Callable[[int, str, float], object]) -> None:
    """Adds one value, and fails before it is handed on."""
    with DeferredScalars(write) as scalars:
        scalars.add(0, loss=torch.tensor(1.0))
        raise ZeroDivisionError


def test_nothing_was_added() -> None:
    given = Given()
    with DeferredScalars(given):
        pass

    assert given.rows == []


def test_on_the_cpu_values_are_handed_on_at_once() -> None:
    given = Given()
    scalars = DeferredScalars(given)

    scalars.add(0, {"train/loss": torch.tensor([0.5], requires_grad=True)}, rate=3)

    assert given.rows == [(0, "train/loss", 0.5), (0, "rate", 3.0)]
    scalars.close()


def test_no_value_is_read_before_its_copy_is_there(streams: SimulatedStreams) -> None:
    given = Given()
    scalars = DeferredScalars(given, every=2)
    for step in range(4):
        scalars.add(step, loss=torch.tensor(float(step)), rate=0.1)
    assert (given.rows, streams.recorded) == ([], 2)

    streams.done = 1
    scalars.add(4, loss=torch.tensor(4.0))

    assert given.rows == [(0, "loss", 0.0), (0, "rate", 0.1), (1, "loss", 1.0), (1, "rate", 0.1)]
    assert streams.waited_for == []
    assert scalars.latest == {"loss": (1, 1.0), "rate": (1, 0.1)}

    scalars.close()

    assert [row[0] for row in given.rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert streams.waited_for == [2, 3]


def test_what_happens_to_a_tensor_afterwards_changes_nothing(streams: SimulatedStreams) -> None:
    given = Given()
    total = torch.zeros(1)
    with DeferredScalars(given, every=10) as scalars:
        for step in range(3):
            total += 1
            scalars.add(step, total=total)

    assert given.rows == [(0, "total", 1.0), (1, "total", 2.0), (2, "total", 3.0)]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *itertools.product([0.1, -0.0, math.inf, math.nan], [torch.float64, torch.float32, torch.bfloat16]),
        (2**24 + 1, torch.int64),
        (True, torch.bool),
    ],
)
def test_values_are_those_that_item_gives(value: float, dtype: torch.dtype, streams: SimulatedStreams) -> None:
    tensor = torch.tensor(value, dtype=dtype)
    given = Given()
    with DeferredScalars(given) as scalars:
        scalars.add(0, value=tensor)

    assert repr(given.rows[0][2]) == repr(float(tensor.item()))


def test_types_and_numbers_keep_their_order(streams: SimulatedStreams) -> None:
    given = Given()
    with DeferredScalars(given, every=3) as scalars:
        scalars.add(0, a=torch.tensor(1), b=2.0, c=torch.tensor(3.0), d=torch.tensor(4))

    assert [row[1:] for row in given.rows] == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]


def test_memory_is_bounded_however_late_the_device_is(streams: SimulatedStreams) -> None:
    given = Given()
    scalars = DeferredScalars(given, every=10)
    for step in range(1000):
        scalars.add(step, loss=torch.tensor(float(step)))
        assert step - len(given.rows) < 50

    assert streams.waited_for == list(range(1, 97))
    scalars.close()
    assert [row[0] for row in given.rows] == list(range(1000))


def test_many_values_are_copied_sooner(streams: SimulatedStreams) -> None:
    scalars = DeferredScalars(Given(), every=1000, most=3)
    scalars.add(0, {str(number): torch.tensor(number) for number in range(4)})

    assert streams.recorded == 1
    scalars.close()


def test_nothing_is_lost_when_the_training_fails(streams: SimulatedStreams) -> None:
    given = Given()

    with pytest.raises(ZeroDivisionError):
        train_until_it_fails(given)

    assert given.rows == [(0, "loss", 1.0)]


def test_the_first_error_is_not_hidden_by_a_writer_that_fails(streams: SimulatedStreams) -> None:
    def write(step: int, name: str, value: float) -> None:
        raise OSError("the disk is full")

    with warnings.catch_warnings(record=True) as caught, pytest.raises(ZeroDivisionError):
        train_until_it_fails(write)

    assert [str(one.message) for one in caught] == ["the last scalars could not be read: the disk is full"]


def test_a_writer_that_fails_once_gets_the_value_again(streams: SimulatedStreams) -> None:
    rows: list[tuple[int, str, float]] = []
    failures = [OSError("busy")]

    def write(step: int, name: str, value: float) -> None:
        if step == 1 and failures:
            raise failures.pop()
        rows.append((step, name, value))

    scalars = DeferredScalars(write)
    for step in range(3):
        scalars.add(step, loss=torch.tensor(float(step)))
    with pytest.raises(OSError, match="busy"):
        scalars.flush()
    scalars.close()

    assert rows == [(0, "loss", 0.0), (1, "loss", 1.0), (2, "loss", 2.0)]


@pytest.mark.slow
def test_what_is_never_closed_is_handed_on_at_the_end_of_the_program() -> None:
    code = (
        "import torch, stepscope.remedies.deferred_scalars as module\n"
        "module._is_on_host = lambda tensor: False\n"
        "module.DeferredScalars(print).add(7, loss=torch.tensor(0.5))\n"
    )
    sources = str(Path(deferred_scalars.__file__).parents[2])

    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": sources}, capture_output=True, text=True, check=True
    )

    assert done.stdout == "7 loss 0.5\n"


def test_writers_of_tensorboard_and_wandb() -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            calls.append((tag, scalar_value, global_step))

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((values, step))

    with DeferredScalars(SummaryWriter()) as scalars:
        scalars.add(3, loss=0.5)
    with DeferredScalars(Run()) as scalars:
        scalars.add(0, loss=0.5, rate=0.1)
        scalars.add(0, norm=2.0)
        scalars.add(1, loss=0.4)

    assert calls == [("loss", 0.5, 3), ({"loss": 0.5, "rate": 0.1, "norm": 2.0}, 0), ({"loss": 0.4}, 1)]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.ones(3), ValueError, "loss has 3 elements; a scalar is one real number: take its mean or norm first"),
        (torch.tensor(1j), ValueError, "loss is complex"),
        ("high", TypeError, "loss is str; a scalar is a number or a tensor with one element"),
        (None, TypeError, "loss is NoneType"),
    ],
)
def test_what_is_no_scalar_is_refused_and_nothing_of_its_step_is_kept(
    value: Any, error: type[Exception], message: str
) -> None:
    given = Given()
    with DeferredScalars(given) as scalars, pytest.raises(error, match=message):
        scalars.add(0, rate=1.0, loss=value)

    assert given.rows == []


def test_what_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="every is 0; it takes a whole number from 1 on"):
        DeferredScalars(print, every=0)
    with pytest.raises(TypeError, match="str cannot be written to: give a function of step, name and value"):
        DeferredScalars("file.csv")
    scalars = DeferredScalars(print)
    scalars.close()
    scalars.close()
    with pytest.raises(ValueError, match="these scalars are closed"):
        scalars.add(0, loss=1.0)


@pytest.mark.gpu
def test_on_a_device_nothing_waits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    given = Given()
    scalars = DeferredScalars(given, every=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6):
            scalars.add(step, loss=torch.full((), float(step), device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    scalars.close()

    assert given.rows == [(step, "loss", float(step)) for step in range(6)]
