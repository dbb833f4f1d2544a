"""What changes do to the replay of traces written by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.whatif import Change, Experiment
from stepscope.whatif.changes import (
    launch_overhead,
    overlapped,
    scaled,
    scaled_cause,
    scaled_host_time,
    scaled_operators,
    scaled_pieces,
    scaled_slices,
    scaled_stretches,
    scaled_work,
    synchronise_every,
    together,
    without_cause,
    without_waits,
    without_waits_for_work,
    without_waits_in,
)
from tests.unit.recording import Recording

US = 1_000
MAIN = np.zeros(1, np.int32)


def saving_us(trace: Trace, change: Change) -> float:
    """What the change takes off a step, microseconds."""
    experiment = Experiment(trace)
    return experiment.run(change(experiment, experiment.graph)).saving_ns / US


def us(*times: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(times, np.int64) * US


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def waiting() -> Trace:
    """Two steps of 1000 us. Each: 100 of Python, an operator of 100 that launches 500 of work and 200 more, a wait for
    them until 900, and 100 of Python."""
    recording = Recording(unit_ns=US)
    for step in (0, 1):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(3): step")
        recording.module(begin + 90, 115, "net.layer")
        recording.operator(begin + 100, 100, "aten::mm", source_file="train.py", source_line=5, source_function="step")
        recording.launch(begin + 140, 10, 10 * step + 1)
        recording.work(begin + 150, 500, "gemm", 10 * step + 1)
        recording.launch(begin + 160, 10, 10 * step + 2)
        recording.work(begin + 650, 200, "add", 10 * step + 2)
        recording.launch(begin + 210, 690, 10 * step + 3, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_nothing_changed_nothing_saved() -> None:
    assert saving_us(waiting(), together()) == 0


def test_host_time_before_the_work_is_saved_in_each_step() -> None:
    every = np.zeros(2, np.int32)

    assert saving_us(waiting(), scaled_host_time(every, us(20, 1020), us(80, 1080), 0.5)) == 30
    assert saving_us(waiting(), scaled_host_time(MAIN, us(20), us(80), 0.5)) == 15  # in one of the two


def test_host_time_behind_the_device_is_not() -> None:
    # From the last launch to the wait: the device is at work.
    assert saving_us(waiting(), scaled_host_time(MAIN, us(170), us(210), 0.0)) == 0


def test_host_time_may_take_longer() -> None:
    assert saving_us(waiting(), scaled_host_time(MAIN, us(0), us(100), 3.0)) == -100


def test_each_interval_with_a_factor_of_its_own() -> None:
    both, factors = np.zeros(2, np.int32), np.array([0.5, 0.25])

    assert saving_us(waiting(), scaled_host_time(both, us(20, 910), us(80, 990), factors)) == (30 + 60) / 2


def test_intervals_that_overlap_both_count() -> None:
    both = np.zeros(2, np.int32)

    assert saving_us(waiting(), scaled_host_time(both, us(0, 0), us(80, 80), 0.5)) == 60 / 2


def test_a_wait_inside_what_is_gone_goes_too() -> None:
    # The first step's host is done after 310 us; the second one's work follows the first one's at once, at 850.
    assert saving_us(waiting(), scaled_host_time(MAIN, us(210), us(900), 0.0)) == (2000 - (850 + 700 + 50 + 100)) / 2


def test_a_wait_inside_what_is_shorter_stays() -> None:
    # 5 us after the wait become 2.5.
    assert saving_us(waiting(), scaled_host_time(MAIN, us(205), us(905), 0.5)) == 2.5 / 2


def test_pieces_of_threads_change_and_those_of_devices_do_not() -> None:
    pieces = pl.DataFrame(
        {"lane": [0, None], "start_ns": [20 * US, 200 * US], "duration_ns": [60 * US, 500 * US]},
        schema={"lane": pl.Int32, "start_ns": pl.Int64, "duration_ns": pl.Int64},
    )

    assert saving_us(waiting(), scaled_pieces(pieces, 0.5)) == 30 / 2


def test_slices_inside_one_another_count_once_and_their_work_stays() -> None:
    activity = Experiment(waiting()).activity
    slices = np.concatenate([activity.slices_of("operators"), activity.slices_of("launches")[[0, 1]], [-1]])

    # Half of the 40 us from the operator's start to its first launch.
    assert saving_us(waiting(), scaled_slices(slices, 0.5)) == 20


def test_calls_that_do_not_wait_let_the_host_run_ahead() -> None:
    # Only the device's 2 * 700 us remain, the second 700 following the first at once.
    assert saving_us(waiting(), without_waits(rows(2, 5))) == (2000 - 1400) / 2


def test_work_takes_less() -> None:
    assert saving_us(waiting(), scaled_work(rows(0, 2), 0.5)) == 250
    assert saving_us(waiting(), scaled_work(rows(0, 1), 0.5)) == 350 / 2


def test_operators_take_less_on_host_and_device() -> None:
    # 20 us until the launch, and half of 700 us of work.
    assert saving_us(waiting(), scaled_operators(rows(0, 1), 0.5)) == 20 + 350


def test_operators_that_are_gone() -> None:
    # A step is 100 us of Python, 10 of latency, 50 until the wait's end is noticed, and 100 of Python.
    assert saving_us(waiting(), scaled_operators(rows(0, 1), 0.0)) == 1000 - 260


@pytest.mark.parametrize(
    ("cause", "factor", "saving"),
    [
        ("python", 0.0, 200),  # before the operator and after the wait
        ("python", 0.5, 100),
        ("dispatch", 0.5, 20),
        ("synchronisation", 0.0, 300),  # as when the calls do not wait
        ("input", 0.0, 0),
    ],
)
def test_causes_of_host_time(cause: str, factor: float, saving: int) -> None:
    assert saving_us(waiting(), scaled_cause(cause, factor)) == saving


@pytest.mark.parametrize(
    ("cause", "saving"), [("launch_latency", 10), ("unknown", 0), ("dependency", 0), ("communication", 0)]
)
def test_causes_that_are_the_devices(cause: str, saving: int) -> None:
    assert saving_us(waiting(), without_cause(cause)) == saving


def test_there_is_no_such_cause() -> None:
    with pytest.raises(UsageError, match="no cause 'laziness'"):
        without_cause("laziness")
    with pytest.raises(UsageError, match="no cause 'dependency' of host time"):
        scaled_cause("dependency", 0.5)


@pytest.mark.parametrize(
    ("pattern", "saving"),
    [("aten::mm", 370), ("gemm", 250), ("*mm", 370), ("train.py:5", 370), ("net.layer", 370), ("net", 370)],
)
def test_whatever_has_a_name(pattern: str, saving: int) -> None:
    assert saving_us(waiting(), scaled(pattern, 0.5)) == saving


def test_nothing_has_that_name() -> None:
    for pattern in ("aten::MM", "train.py:6", "other.py:5", "net.lay"):
        with pytest.raises(UsageError, match="the trace has no operator, kernel, module or line"):
            saving_us(waiting(), scaled(pattern, 0.5))


def launching() -> Trace:
    """A step of 1000 us on the host: ten launches of 40 us, one every 100."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    for number in range(10):
        recording.launch(100 * number, 40, number + 1)
        recording.work(100 * number + 10, 20, "add", number + 1)
    return recording.trace()


@pytest.mark.parametrize(("ns", "saving"), [(10 * US, 300), (0, 400), (50 * US, -100)])
def test_each_launch_lasts_so_long(ns: int, saving: int) -> None:
    assert saving_us(launching(), launch_overhead(ns)) == saving


def test_waits_in_every_other_step() -> None:
    # The second step's wait is gone: the device is done at 1850, and the span began for it at 150.
    assert saving_us(waiting(), synchronise_every(2)) == (2000 - 1700) / 2
    assert saving_us(waiting(), synchronise_every(1)) == 0


def test_waiting_needs_steps() -> None:
    with pytest.raises(UsageError, match="waiting every 0 steps is not possible"):
        synchronise_every(0)
    recording = Recording(unit_ns=US)
    recording.launched(0, 10, 20, "gemm", 1)
    with pytest.raises(UsageError, match="the trace has no steps"):
        saving_us(recording.trace(), synchronise_every(2))


def test_without_waiting_in_an_interval_the_calls_own_time_stays() -> None:
    assert saving_us(waiting(), without_waits_in(MAIN, us(210), us(900))) == (2000 - (850 + 700 + 50 + 100)) / 2
    assert saving_us(waiting(), without_waits_in(MAIN, us(211), us(900))) == 0  # not the whole wait


def test_nobody_waits_for_this_work() -> None:
    assert saving_us(waiting(), without_waits_for_work(rows(1, 3))) == (2000 - 1400) / 2
    assert saving_us(waiting(), without_waits_for_work(rows(0, 2))) == 0  # the waits are for what comes last


def test_stretches_of_a_thread_with_the_work_launched_there() -> None:
    both = np.zeros(2, np.int32)

    assert saving_us(waiting(), scaled_stretches(both, us(100, 1100), us(200, 1200), 0.5)) == 20 + 350
    assert saving_us(waiting(), scaled_stretches(both, us(100, 120), us(200, 200), 0.5)) == (20 + 350) / 2
    assert saving_us(waiting(), scaled_stretches(both, us(100, 1100), us(200, 1200), 0.0)) == 1000 - 260
    # From behind the first launch on, only the second one's work is launched there.
    assert saving_us(waiting(), scaled_stretches(both, us(141, 1141), us(200, 1200), 0.5)) == 100


def reducing() -> Trace:
    """A step of 1000 us: 400 of computation, 400 of communication, 200 of it beside that, waited for until 750."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.launched(90, 100, 400, "gemm", 101)
    recording.launched(290, 300, 400, "ncclDevKernel_AllReduce", 102, queue="9", kind="communication")
    recording.launched(295, 450, 200, "elsewhere", 103, device="1")
    recording.launch(300, 450, 104, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_what_nothing_overlapped_is_gone() -> None:
    assert saving_us(reducing(), overlapped(rows(1))) == 200
    assert saving_us(reducing(), overlapped(rows())) == 0


def pageable() -> Trace:
    """A step of 1000 us: 500 of work until 520, and a copy from pageable memory whose call waits for it.

    The call is over at 800, 30 us before the copy's last part.
    """
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.launched(10, 20, 500, "gemm", 101)
    recording.launch(30, 770, 102, name="cudaMemcpyAsync", kind="copy")
    recording.work(560, 270, "Memcpy HtoD (Pageable -> Device)", 102, kind="copy_in")
    recording.launched(820, 830, 50, "gemm", 103)
    return recording.trace()


def test_a_copy_from_pageable_memory_waits_for_the_work_before_it() -> None:
    assert saving_us(pageable(), scaled_work(rows(0), 0.5)) == 250
    # Without the wait the call still copies, from 30 us on for 280; then the device's 860 us decide.
    experiment = Experiment(pageable())
    alone = experiment.run(without_waits_in(MAIN, us(30), us(800))(experiment, experiment.graph))
    assert alone.saving_ns == 1000 * US - (880 - 20) * US
    assert experiment.host_ends(alone.replay) == (0, (30 + 280 + 200) * US)


def test_on_a_machine_without_a_device() -> None:
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(3): step")
    recording.operator(100, 600, "aten::mm")
    trace = recording.trace()

    assert saving_us(trace, scaled_operators(rows(0), 0.5)) == 300
    assert saving_us(trace, scaled_cause("compute", 0.0)) == 600
    assert saving_us(trace, scaled_cause("python", 0.0)) == 400
    assert saving_us(trace, overlapped(rows())) == 0
