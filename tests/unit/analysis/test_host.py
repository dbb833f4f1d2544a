"""What host threads did, and whose doing it was."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.host import CAUSES, TABLES, HostActivity, host_activity
from stepscope.trace import Trace
from tests.unit.recording import Recording

WORDS = list(CAUSES)
SEEN = "ProfilerStep#1"


def causes_of(recording: Recording) -> dict[str, str]:
    """Name of each slice -> its cause."""
    trace = recording.trace()
    activity = host_activity(trace)
    return {name_of(trace, activity, index): WORDS[cause] for index, cause in enumerate(activity.cause.tolist())}


def name_of(trace: Trace, activity: HostActivity, index: int) -> str:
    return str(trace.table(TABLES[activity.table[index]])["name"][int(activity.row[index])])


def timeline_of(recording: Recording, lane: int = 0) -> list[tuple[int, str | None]]:
    """Each time at which a lane's innermost slice changes, with that slice's name."""
    trace = recording.trace()
    activity = host_activity(trace)
    timeline = activity.timelines[lane]
    names = [None if index < 0 else name_of(trace, activity, index) for index in timeline.slices.tolist()]
    return list(zip(timeline.times.tolist(), names, strict=True))[1:]


def test_no_threads() -> None:
    activity = host_activity(Trace.from_tables({}))

    assert activity.lane.size == 0
    assert activity.timelines == {}
    assert activity.main_lanes == {}
    assert activity.user_frame.size == 0
    assert activity.slices_of("launches").tolist() == []
    assert activity.cause_of(np.array([-1])).tolist() == [WORDS.index("untraced")]


def test_a_name_gives_the_cause_and_what_is_inside_inherits_it() -> None:
    recording = Recording()
    recording.frame(0, 100, "train.py(5): step")
    recording.annotation(10, 30, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.frame(15, 10, "dataset.py(9): __getitem__")
    recording.operator(18, 5, "aten::stack")

    assert causes_of(recording) == {
        "train.py(5): step": "python",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "input",
        "dataset.py(9): __getitem__": "input",
        "aten::stack": "input",
    }


def test_the_innermost_name_decides() -> None:
    recording = Recording()
    recording.annotation(0, 50, "Optimizer.step#SGD.step")
    recording.operator(5, 10, "aten::item")
    recording.operator(20, 10, "aten::add_")

    assert causes_of(recording) == {
        "Optimizer.step#SGD.step": "optimizer",
        "aten::item": "synchronisation",
        "aten::add_": "optimizer",
    }


def test_without_a_name_that_tells_operators_dispatch_and_frames_are_python() -> None:
    recording = Recording()
    recording.annotation(0, 100, "my phase")
    recording.frame(10, 80, "train.py(5): step")
    recording.operator(20, 30, "aten::mm")
    recording.frame(25, 20, "train.py(9): custom_backward")
    recording.launch(30, 5, 101)
    recording.launch(95, 2, 102, name="cudaEventRecord", kind="event")

    assert causes_of(recording) == {
        "my phase": "untraced",
        "train.py(5): step": "python",
        "aten::mm": "dispatch",
        "train.py(9): custom_backward": "dispatch",
        "cudaLaunchKernel": "dispatch",
        "cudaEventRecord": "dispatch",
    }


@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [
        ("cudaDeviceSynchronize", "synchronise", "synchronisation"),
        ("cudaMalloc", "allocate", "allocation"),
        ("cuModuleLoadData", "compile", "compilation"),
        ("cudaStreamWaitEvent", "queue_wait", "dispatch"),
        ("cudaEventRecord", "event", "dispatch"),
        ("cudaLaunchKernel", "launch", "dispatch"),
        ("cudaMemsetAsync", "set", "dispatch"),
    ],
)
def test_causes_of_launches(name: str, kind: str, cause: str) -> None:
    recording = Recording()
    recording.launch(0, 5, 101, name=name, kind=kind)

    assert causes_of(recording) == {name: cause}


@pytest.mark.parametrize(
    ("direction", "cause", "wait"),
    [
        ("copy_in", "host_to_device_copy", "host_to_device_copy"),
        ("copy_out", "synchronisation", "synchronisation"),
        ("copy_on_device", "dispatch", "synchronisation"),
    ],
)
def test_copies_and_the_waits_beside_them(direction: str, cause: str, wait: str) -> None:
    recording = Recording()
    recording.operator(0, 50, "aten::copy_")
    recording.launch(5, 5, 101, name="cudaMemcpyAsync", kind="copy")
    recording.launch(12, 20, 102, name="cudaStreamSynchronize", kind="synchronise")
    recording.work(8, 20, "Memcpy", 101, kind=direction)
    recording.launch(60, 5, 103, name="cudaDeviceSynchronize", kind="synchronise")

    assert causes_of(recording) == {
        "aten::copy_": "dispatch",
        "cudaMemcpyAsync": cause,
        "cudaStreamSynchronize": wait,
        "cudaDeviceSynchronize": "synchronisation",
    }


def test_only_host_annotations_of_host_threads_are_slices() -> None:
    recording = Recording()
    recording.annotation(0, 10, "flush", kind="overhead")
    recording.annotation(0, 10, "on the device", lane=recording.queue(), kind="device")
    recording.annotation(0, 10, "on the host")

    assert list(causes_of(recording)) == ["on the host"]


def test_the_time_line_of_a_thread() -> None:
    recording = Recording()
    recording.frame(0, 50, "train.py(5): step")
    recording.operator(10, 20, "aten::linear")
    recording.operator(15, 15, "aten::addmm")
    recording.operator(70, 5, "aten::relu")
    recording.operator(40, 0, "aten::point")

    assert timeline_of(recording) == [
        (0, "train.py(5): step"),
        (10, "aten::linear"),
        (15, "aten::addmm"),
        (30, "train.py(5): step"),
        (40, "train.py(5): step"),
        (50, None),
        (70, "aten::relu"),
        (75, None),
    ]


def test_a_slice_that_outlives_its_parent_is_open_to_its_own_end() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::first")
    recording.operator(5, 20, "aten::second")

    assert timeline_of(recording) == [(0, "aten::first"), (5, "aten::second"), (10, "aten::second"), (25, None)]


def test_cutting_intervals_at_the_changes() -> None:
    recording = Recording()
    recording.operator(10, 10, "aten::mm")
    timeline = host_activity(recording.trace()).timelines[0]

    pieces = timeline.cut(np.array([0, 15, 18, 40]), np.array([15, 30, 18, 50]))

    assert [column.tolist() for column in pieces] == [
        [0, 0, 1, 1, 3],
        [0, 10, 15, 20, 40],
        [10, 15, 20, 30, 50],
        [-1, 0, 0, -1, -1],
    ]


def test_the_users_frame_around_each_slice() -> None:
    recording = Recording()
    recording.frame(0, 100, "train.py(5): step")
    recording.frame(10, 80, "torch/nn/modules/module.py(1500): _call_impl")
    recording.operator(20, 10, "aten::mm")
    recording.operator(120, 10, "aten::alone")
    trace = recording.trace()
    activity = host_activity(trace)

    found = {name_of(trace, activity, index): frame for index, frame in enumerate(activity.user_frame.tolist())}

    assert found == {
        "train.py(5): step": 0,
        "torch/nn/modules/module.py(1500): _call_impl": 0,
        "aten::mm": 0,
        "aten::alone": -1,
    }


def test_the_main_thread_is_the_one_with_steps_else_with_marks_else_the_process_itself() -> None:
    recording = Recording()
    marked, stepped = recording.thread("11"), recording.thread("12")
    own = recording.thread("2", process="2")
    recording.thread("21", process="2")
    recording.thread("31", process="3")
    recording.annotation(0, 10, "Optimizer.step#SGD.step", marked)

    assert host_activity(recording.trace()).main_lanes == {"1": marked, "2": own}

    recording.step(0, 10, 1, stepped)

    assert host_activity(recording.trace()).main_lanes == {"1": stepped, "2": own}


def test_the_slices_of_a_table_are_worked_out_once() -> None:
    """Rules ask for them thousands of times: each time anew would be quadratic."""
    activity = host_activity(Recording().trace())

    assert activity.slices_of("operators") is activity.slices_of("operators")
