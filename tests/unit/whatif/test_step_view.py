"""One view of a trace says for diagnosis and for replays alike which device, thread and stretch count."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.host import host_time, main_lane
from stepscope.analysis.step_view import StepView
from stepscope.compare.trace_record import trace_record
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.trace.window import Window
from stepscope.whatif import Experiment
from stepscope.whatif.changes import scaled_work
from tests.unit.recording import Recording

US = 1_000


def two_devices() -> Trace:
    """A step in which device 0 works for 600 us, and then device 1 for 300."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 0)
    recording.launched(0, 10, 600, "first", 1)
    recording.launched(20, 610, 300, "second", 2, device="1")
    recording.launch(30, 880, 3, 0, "cudaDeviceSynchronize", "synchronise")
    return recording.trace()


def test_nothing_recorded() -> None:
    view = StepView(Trace.from_tables({}))

    assert (view.device, view.lane, view.span, view.step_count) == (None, None, Window(0, 1), 1)


@pytest.mark.parametrize(("wanted", "device"), [(None, "0"), ("0", "0"), ("1", "1"), ("7", "0")])
def test_the_wanted_device_is_the_one_that_is_replayed(wanted: str | None, device: str) -> None:
    view = View(two_devices(), device=wanted)

    assert view.device == view.experiment.device == device
    rows = view.work["row"].to_list()
    assert view.experiment.works.tolist() == rows
    assert view.experiment.trace.device_work["device"].gather(rows).to_list() == [device]


def test_comparison_takes_all_its_sums_from_the_wanted_device() -> None:
    record = trace_record(two_devices(), device="1")

    assert record.device == "1"
    busy = record.tables["causes"].filter(kind="busy")["ns"].sum()
    assert busy == record.tables["kernels"]["ns"].sum() == 300 * US


def test_diagnosis_and_replay_share_one_stretch() -> None:
    view = View(two_devices())
    experiment = view.experiment

    assert (experiment.span, experiment.lane, experiment.step_count) == (view.span, view.lane, view.step_count)
    assert experiment.activity is view.activity
    assert experiment.steps is view.complete_steps


def test_a_host_without_steps_counts_until_the_profiler_ends() -> None:
    recording = Recording(unit_ns=US)
    recording.operator(0, 100, "aten::mm")
    recording.annotation(0, 400, "PyTorch Profiler (0)")
    recording.annotation(300, 700, "Optimizer.step#SGD.step")
    trace = recording.trace()
    view = StepView(trace)

    assert view.lane == main_lane(trace, view.activity)
    assert view.span == Window(0, 400 * US)
    assert host_time(trace, activity=view.activity)["duration_ns"].sum() == view.span.duration_ns
    assert Experiment(view).span == view.span


@pytest.mark.parametrize(("wanted", "step_us", "saved_us"), [("1", 1800, 800), ("0", 1000, 0)])
def test_a_change_saves_what_the_wanted_device_gains(wanted: str, step_us: int, saved_us: int) -> None:
    """Device 1 works on after the host's step; device 0 is done before."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 0)
    recording.launched(0, 10, 600, "first", 1)
    recording.launched(20, 100, 1800, "second", 2, device="1")
    view = View(recording.trace(), device=wanted)

    assert view.step_ns == view.experiment.measured_ns == step_us * US
    assert view.saved_ns(scaled_work(np.array([1]), 0.5)) == saved_us * US
