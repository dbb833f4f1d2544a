"""Changes of host time's place and of the work that operators give to a device."""

from __future__ import annotations

import numpy as np

from stepscope.trace import Trace
from stepscope.whatif import Change, Experiment
from stepscope.whatif.changes import fewer_works, moved_host_time, scaled_work, scaled_work_of
from tests.unit.recording import Recording

US = 1_000


def saving(trace: Trace, change: Change) -> float:
    experiment = Experiment(trace)
    return experiment.run(change(experiment, experiment.graph)).saving_ns


def preparing() -> Trace:
    """Two steps of 1000 us: 400 of preparation, a launch, 500 of work for which the host then waits."""
    recording = Recording()
    for number, begin in enumerate((0, 1000 * US)):
        recording.step(begin, 1000 * US, number)
        recording.frame(begin, 400 * US, "train.py(3): prepare")
        recording.launch(begin + 400 * US, 10 * US, 2 * number + 1)
        recording.work(begin + 410 * US, 500 * US, "gemm", 2 * number + 1)
        recording.launch(begin + 500 * US, 420 * US, 2 * number + 2, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def moved(moments_us: list[int]) -> Change:
    starts = np.array([0, 1000 * US])
    return moved_host_time(np.zeros(2, np.int32), starts, starts + 400 * US, np.array(moments_us) * US)


def test_moved_host_time_hides_behind_the_device() -> None:
    # 400 us of preparation after the launch, and the 90 that were there: the device takes 500.
    assert saving(preparing(), moved([410, 1410])) == 400 * US


def test_host_time_from_several_places_is_moved_to_one() -> None:
    starts, ends = np.array([0, 200 * US, 1000 * US]), np.array([200 * US, 400 * US, 1400 * US])
    moments = np.array([410 * US, 410 * US, 1410 * US])

    assert saving(preparing(), moved_host_time(np.zeros(3, np.int32), starts, ends, moments)) == 400 * US


def test_moved_host_time_that_no_work_covers_stays() -> None:
    # After the wait nothing is left to hide behind.
    assert saving(preparing(), moved([950, 1950])) == 0


def nested() -> Trace:
    """A step of 1000 us that ends with the device: 300 us of an outer operator's work, 200 of the one inside it."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.operator(10 * US, 80 * US, "aten::outer")
    recording.launched(20 * US, 450 * US, 300 * US, "outer", 101)
    recording.operator(40 * US, 20 * US, "aten::inner")
    recording.launched(50 * US, 750 * US, 200 * US, "inner", 102)
    recording.launch(200 * US, 760 * US, 103, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_work_of_operators_with_those_inside() -> None:
    assert saving(nested(), scaled_work_of(np.array([0]), 0.5)) == 250 * US
    assert saving(nested(), scaled_work_of(np.array([1]), 0.5)) == 100 * US


def test_the_inner_operators_factor_counts() -> None:
    assert saving(nested(), scaled_work_of(np.array([1, 0]), np.array([0.1, 0.5]))) == (150 + 180) * US


def test_works_each_with_a_factor() -> None:
    assert saving(nested(), scaled_work(np.array([1, 0]), np.array([0.1, 0.5]))) == (150 + 180) * US


def test_without_a_device_the_hosts_time_is_the_work() -> None:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.operator(10, 800, "aten::outer")
    recording.operator(40, 200, "aten::inner")
    trace = recording.trace()

    assert saving(trace, scaled_work_of(np.array([0]), 0.5)) == 400
    assert saving(trace, scaled_work_of(np.array([1]), 0.5)) == 100
    assert saving(trace, scaled_work_of(np.array([1, 0]), np.array([0.1, 0.5]))) == 400


def test_no_operators_no_difference() -> None:
    assert saving(nested(), scaled_work_of(np.zeros(0, np.int64), 0.5)) == 0
    assert saving(Recording().trace(), scaled_work_of(np.zeros(0, np.int64), 0.5)) == 0


def queued() -> Trace:
    """Three works of 100 us, the queue's pauses of 1 us between them, for which the step waits at its end."""
    recording = Recording()
    recording.step(0, 350 * US, 1)
    for number in range(3):
        recording.launched((1 + 3 * number) * US, (20 + 101 * number) * US, 100 * US, "gemm", number)
    recording.launch(12 * US, 320 * US, 3, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_work_that_is_gone_leaves_no_pause() -> None:
    assert saving(queued(), scaled_work(np.array([1]), 0.0)) == 101 * US
    assert saving(queued(), scaled_work(np.array([1]), 0.5)) == 50 * US


def test_fewer_works_have_fewer_pauses() -> None:
    assert saving(queued(), fewer_works(np.array([1, 2]), 0.25)) == 2 * 0.75 * 101 * US
