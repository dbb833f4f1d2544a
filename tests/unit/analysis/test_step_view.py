"""Which time and which device work belong to the steps."""

from __future__ import annotations

import polars as pl
import pytest

from stepscope.analysis.step_view import StepView
from stepscope.analysis.steps import typical_run
from stepscope.diagnosis.view import View
from stepscope.whatif import Experiment
from tests.unit.recording import Recording

MS = 1_000_000


def after_a_backlog(*, waits: bool) -> Recording:
    """A step of 60 ms that launches 50 ms of work while the device still works 40 ms on what came before.

    If it waits for that, it does so at its begin, and launches from 40 ms on.
    """
    recording = Recording()
    recording.step(0, 60 * MS, 3)
    recording.work(0, 40 * MS, "gemm", 1)  # its launch was not recorded
    begin = 40 if waits else 1
    if waits:
        recording.launch(0, 40 * MS, 9, kind="synchronise", name="cudaDeviceSynchronize")
    for number in range(10):
        recording.launched((begin + number) * MS, (41 + 5 * number) * MS, 5 * MS, "gemm", 10 + number)
    return recording


def law(view: StepView) -> tuple[int, int]:
    """Window, and busy time and causes together."""
    idle = view.idle_in_steps.filter(pl.col("device") == view.device)
    work = view.trace.device_work.select(start="start_ns", end=pl.col("start_ns") + pl.col("duration_ns"))
    window, busy, until = view.window, 0, 0
    for start, end in work.sort("start").rows():
        start, end = max(start, until, window.start_ns), min(end, window.end_ns)
        busy, until = busy + max(end - start, 0), max(until, end)
    return window.duration_ns, busy + int(idle["duration_ns"].sum())


@pytest.mark.parametrize(("waits", "step_ms"), [(False, 60), (True, 50)])
def test_a_backlog_is_not_part_of_the_step(waits: bool, step_ms: int) -> None:
    view = StepView(after_a_backlog(waits=waits).trace())

    assert (view.work.height, view.window.duration_ns) == (10, step_ms * MS)
    assert law(view)[0] == law(view)[1]
    assert Experiment(view).measured_ns == view.window.duration_ns


def test_a_wait_beyond_the_last_step_is_not_its_initial_wait() -> None:
    recording = Recording()
    recording.step(10 * MS, 20 * MS, 3)
    recording.work(0, 50 * MS, "gemm", 1)  # its launch was not recorded
    recording.launch(15 * MS, 45 * MS, 9, kind="synchronise", name="cudaDeviceSynchronize", lane=1)
    view = StepView(recording.trace())

    assert (view.span.start_ns, view.span.end_ns) == (10 * MS, 30 * MS)
    assert law(view) == (20 * MS, 20 * MS)


def test_a_device_that_takes_longer_sets_the_pace() -> None:
    recording = Recording()
    recording.step(0, 20 * MS, 1)
    recording.work(0, 30 * MS, "before", 1)
    recording.launched(1 * MS, 30 * MS, 25 * MS, "gemm", 2)
    view = StepView(recording.trace())

    assert (view.window.start_ns, view.window.end_ns) == (30 * MS, 55 * MS)
    assert view.backlog("0").is_empty()  # it ran before that


def test_what_precedes_the_first_work_and_follows_the_last_belongs_to_the_step() -> None:
    recording = Recording()
    recording.step(0, 100 * MS, 1)
    recording.frame(0, 60 * MS, "train.py(3): prepare")
    recording.launched(60 * MS, 61 * MS, 10 * MS, "gemm", 1)
    recording.frame(80 * MS, 20 * MS, "train.py(9): report")
    view = StepView(recording.trace())

    causes = dict(view.idle_in_steps.group_by("cause").agg(pl.col("duration_ns").sum()).rows())
    assert view.window.duration_ns == 100 * MS
    assert causes["python"] == (60 + 20) * MS
    assert law(view) == (100 * MS, 100 * MS)
    assert view.idle.is_empty()  # from its first to its last work the device is never idle


def test_without_steps_all_that_was_recorded_counts() -> None:
    recording = Recording()
    recording.frame(0, 60 * MS, "train.py(3): prepare")
    recording.launched(60 * MS, 61 * MS, 10 * MS, "gemm", 1)
    view = StepView(recording.trace())

    assert (view.window.start_ns, view.window.end_ns) == (0, 71 * MS)
    assert Experiment(view).measured_ns == 71 * MS
    assert law(view) == (71 * MS, 71 * MS)


def test_work_without_launches_is_measured_on_the_device() -> None:
    recording = Recording()
    for number in range(3):
        recording.work(10 * number * MS, 5 * MS, "gemm", number)
    view = StepView(recording.trace())

    assert view.is_on_device
    assert view.window.duration_ns == 25 * MS


def of_durations(*durations: int) -> pl.DataFrame:
    starts = [sum(durations[:number]) for number in range(len(durations))]
    return pl.DataFrame({"index": range(len(durations)), "start_ns": starts, "duration_ns": durations})


@pytest.mark.parametrize(
    ("durations", "indexes"),
    [
        ([500] + [10] * 10, range(1, 11)),
        ([10] * 3 + [500] + [10] * 8, range(4, 12)),
        ([10] * 8 + [500, 40] + [10] * 3, range(8)),
        ([10] * 4 + [500] + [10] * 4 + [500] + [10] * 4, range(14)),  # twice: perhaps regularly
        ([10] * 8 + [500], range(9)),  # too few steps to tell
        ([10] * 12 + [35], range(13)),  # it hardly changes the mean
    ],
)
def test_a_step_that_is_nothing_like_the_others_is_set_apart(durations: list[int], indexes: range) -> None:
    assert typical_run(of_durations(*durations))["index"].to_list() == list(indexes)


def first_launch(steps: int, slow: tuple[int, ...] = (0,)) -> Recording:
    """Steps of 10 launches, of which the first of some takes 50 ms, and the device waits for it."""
    recording = Recording()
    now = 0
    for step in range(steps):
        begin = now
        for number in range(10):
            takes = 50 * MS if number == 0 and step in slow else 10_000
            recording.launch(now, takes, 100 * step + number + 1)
            now += takes
            recording.work(now, 1 * MS, "gemm", 100 * step + number + 1)
            now += 1 * MS
        recording.step(begin, now - begin, step)
    return recording


def test_a_first_launch_happens_once_and_is_left_out() -> None:
    view = View(first_launch(3).trace())

    assert view.once_ns == pytest.approx(50 * MS, rel=0.01)
    assert view.step_ns == pytest.approx(10 * (MS + 10_000), rel=0.02)
    assert law(view)[0] == law(view)[1]


def test_what_happens_in_two_steps_is_not_once() -> None:
    assert View(first_launch(3, slow=(0, 2)).trace()).once_ns == 0


def test_the_capture_of_a_graph_happens_once() -> None:
    recording = Recording()
    recording.launched(0, 1 * MS, 1 * MS, "warm up", 1)
    recording.launch(2 * MS, 10_000, 2, kind="other", name="cudaStreamBeginCapture")
    recording.launch(10 * MS, 10_000, 3, kind="other", name="cudaStreamEndCapture")
    recording.launched(11 * MS, 12 * MS, 1 * MS, "gemm", 4)

    assert View(recording.trace()).once_ns == 8 * MS + 10_000


def compiling(*, frame: bool) -> Recording:
    recording = Recording()
    recording.operator(0, 100 * MS, "fused")
    if frame:
        recording.frame(10 * MS, 50 * MS, "train.py(3): prepare")
    recording.launched(90 * MS, 91 * MS, 1 * MS, "gemm", 1)
    return recording


def test_an_operator_that_calls_nothing_before_its_launch_may_compile() -> None:
    assert View(compiling(frame=False).trace()).once_ns == pytest.approx(90 * MS, rel=0.01)
    assert View(compiling(frame=True).trace()).once_ns == 0  # Python code runs as long as it likes
