"""Time and memory against batch size."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.batch_size import Measurement, batch_model, batch_size_of, fitted, measurement_of
from stepscope.errors import UsageError
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import LoaderFacts, ProgramFacts
from tests.unit.recording import Recording

GIB = 1 << 30


def measured(*points: tuple[int, float], memory: bool = True, capacity: int | None = 16 * GIB) -> list[Measurement]:
    """Batch sizes with their times in ms; memory takes 1 GiB and 0.5 GiB for each sample."""
    return [
        Measurement(size, ms * 1e6, 5, GIB + size * GIB // 2 if memory else None, capacity, "0") for size, ms in points
    ]


def test_a_straight_line_is_found_again() -> None:
    model = batch_model(measured((8, 26.0), (16, 42.0), (32, 74.0)))

    assert model.time is not None
    assert model.memory is not None
    assert model.time.slope == pytest.approx(2e6)
    assert model.time.constant == pytest.approx(10e6)
    assert model.time.slope_error == pytest.approx(0, abs=1)
    assert model.time.r_squared == pytest.approx(1)
    assert model.throughput_limit == pytest.approx(500)
    assert model.throughput(16) == pytest.approx(16 / 0.042)
    assert model.batch_for(16 / 0.042) == pytest.approx(16)
    assert model.batch_for(500) is None
    # 90 % of 16 GiB, less 1 GiB, at half a GiB a sample.
    assert model.largest_batch == 26
    assert model.problems == ()


def test_errors_are_those_of_least_squares() -> None:
    sizes, values = [8.0, 16.0, 24.0, 32.0], [27.0, 41.0, 59.0, 73.0]

    line = fitted(sizes, values)

    coefficients, covariance = np.polyfit(sizes, values, 1, cov=True)
    assert (line.slope, line.constant) == pytest.approx(tuple(coefficients))
    assert line.slope_error is not None
    assert line.constant_error is not None
    assert (line.slope_error**2, line.constant_error**2) == pytest.approx(tuple(np.diag(covariance)))


def test_two_sizes_have_no_error() -> None:
    line = fitted([1, 2], [10, 14])

    assert (line.slope, line.constant, line.slope_error, line.constant_error) == (4, 6, None, None)


def test_the_memory_there_is_can_be_given() -> None:
    points = ((8, 26.0), (16, 42.0))

    assert batch_model(measured(*points), capacity_bytes=5 * GIB, kept_free=0).largest_batch == 8
    assert batch_model(measured(*points), capacity_bytes=GIB // 2).largest_batch == 0


@pytest.mark.parametrize(
    ("measurements", "problem"),
    [
        (measured((8, 30.0), (16, 30.0)), "a step takes no longer with a larger batch"),
        (measured((8, 5.0), (16, 30.0), (24, 55.0)), "more than the line through the sizes allows"),
        (measured((8, 30.0), (16, 90.0), (24, 20.0), (32, 70.0)), "the times vary too much"),
        (measured((8, 26.0), (16, 42.0), memory=False), "memory was not recorded for two sizes"),
        (measured((8, 26.0), (16, 42.0), capacity=None), "the size of the memory is unknown"),
        (
            [Measurement(8, 26e6, 5, 10, None, "cpu"), Measurement(16, 42e6, 5, 20, None, "0")],
            "memory was recorded on different devices",
        ),
        (
            [Measurement(8, 26e6, 5, 20, GIB, "0"), Measurement(16, 42e6, 5, 20, GIB, "0")],
            "memory does not grow with the batch",
        ),
    ],
)
def test_what_a_line_cannot_answer(measurements: list[Measurement], problem: str) -> None:
    model = batch_model(measurements)

    assert any(problem in sentence for sentence in model.problems)
    assert model.time is None or model.largest_batch is None


def test_one_size_is_too_few() -> None:
    with pytest.raises(UsageError, match="at least two different batch sizes"):
        batch_model(measured((8, 1.0), (8, 2.0)))


def recorded(program: ProgramFacts | None = None) -> Trace:
    recording = Recording(Metadata(path="trace.json", program=program, devices=(Device("0", memory_bytes=1000),)))
    for step, length in enumerate((200, 210, 300)):
        recording.step(1000 * step, length, step)
    recording.block(10, 20, 500, total_reserved=800, total_allocated=500)
    return recording.trace()


def test_what_a_trace_tells() -> None:
    assert measurement_of(recorded(), 4) == Measurement(4, 210.0, 3, 800, 1000, "0")


def test_a_trace_without_steps() -> None:
    with pytest.raises(UsageError, match=r"trace\.json has no complete step"):
        measurement_of(Trace.from_tables({}, Metadata(path="trace.json")), 4)


@pytest.mark.parametrize(("sizes", "found"), [((), None), ((16,), 16), ((16, 16, None), 16), ((16, 32), None)])
def test_the_batch_size_of_a_recording(sizes: tuple[int | None, ...], found: int | None) -> None:
    loaders = tuple(LoaderFacts(batch_size=size) for size in sizes)

    assert batch_size_of(recorded(ProgramFacts(loaders=loaders))) == found
    assert batch_size_of(recorded()) is None
