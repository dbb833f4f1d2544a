"""Where the main thread's time went."""

from __future__ import annotations

import pytest

from stepscope.analysis.host import HOST_SCHEMA, host_activity, host_summary, host_time, host_window, main_lane
from stepscope.trace import Trace, Window
from tests.unit.recording import Recording


def small_recording() -> Recording:
    recording = Recording()
    recording.frame(10, 90, "train.py(5): step")
    recording.annotation(20, 30, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.operator(60, 20, "aten::mm")
    recording.operator(120, 30, "aten::mm")
    return recording


def pieces_of(trace: Trace, window: Window | None = None) -> list[tuple[object, ...]]:
    return host_time(trace, window=window).select("start_ns", "duration_ns", "cause").rows()


def driving_lane(recording: Recording) -> int | None:
    trace = recording.trace()
    return main_lane(trace, host_activity(trace))


def test_no_thread() -> None:
    pieces = host_time(Trace.from_tables({}))

    assert dict(pieces.schema) == {name: dtype() for name, dtype in HOST_SCHEMA.items()}
    assert pieces.height == 0
    assert host_summary(pieces).rows() == []


def test_without_a_device_operators_compute() -> None:
    trace = small_recording().trace()

    assert pieces_of(trace) == [
        (10, 10, "python"),
        (20, 30, "input"),
        (50, 10, "python"),
        (60, 20, "compute"),
        (80, 20, "python"),
        (100, 20, "untraced"),
        (120, 30, "compute"),
    ]
    assert host_summary(host_time(trace)).rows() == [
        ("compute", 50, 50 / 140),
        ("python", 40, 40 / 140),
        ("input", 30, 30 / 140),
        ("untraced", 20, 20 / 140),
    ]


def test_what_the_profiler_does_to_end_counts_for_nobody() -> None:
    recording = small_recording()
    recording.annotation(0, 140, "PyTorch Profiler (0)")
    recording.annotation(130, 900, "Optimizer.step#AdamW.step")

    assert sum(row[1] for row in pieces_of(recording.trace())) == 140
    assert sum(row[1] for row in pieces_of(recording.trace(), Window(0, 1030))) == 1030


def test_with_a_device_operators_dispatch() -> None:
    recording = small_recording()
    recording.launched(65, 70, 10, "gemm", 101)

    assert {cause for _, _, cause in pieces_of(recording.trace())} == {"python", "input", "dispatch", "untraced"}


def test_any_window_is_filled() -> None:
    trace = small_recording().trace()

    assert pieces_of(trace, Window(0, 25)) == [(0, 10, "untraced"), (10, 10, "python"), (20, 5, "input")]
    assert pieces_of(trace, Window(140, 200)) == [(140, 10, "compute"), (150, 50, "untraced")]


def test_pieces_name_their_slices() -> None:
    rows = host_time(small_recording().trace(), window=Window(20, 110)).select("slice_table", "slice_row", "lane")

    assert rows.rows() == [
        ("annotations", 0, 0),
        ("frames", 0, 0),
        ("operators", 0, 0),
        ("frames", 0, 0),
        (None, None, 0),
    ]


def test_the_driving_thread() -> None:
    # given: the process's own thread idles while another one computes
    recording = Recording()
    worker = recording.thread("11")
    recording.operator(0, 10, "aten::mm", worker)
    assert driving_lane(recording) == worker

    # when: the process's own thread is seen at all, it is taken
    recording.frame(0, 100, "train.py(5): step")
    assert driving_lane(recording) == 0


def test_of_several_processes_the_one_with_most_operator_time() -> None:
    recording = Recording()
    other = recording.thread("2", process="2")
    recording.operator(0, 10, "aten::mm")
    recording.operator(0, 50, "aten::mm", other)

    assert driving_lane(recording) == other


def test_a_thread_of_frames_only() -> None:
    recording = Recording()
    lane = recording.thread("31", process="3")
    recording.frame(0, 10, "serve.py(3): main", lane)

    assert pieces_of(recording.trace()) == [(0, 10, "python")]


def test_where_only_a_line_is_known_the_host_runs_python() -> None:
    recording = Recording()
    recording.operator(10, 10, "aten::mm")
    recording.line(5, 20, "train.py(7): step")
    recording.line(25, 30, "train.py(8): step")
    recording.operator(40, 5, "aten::add")
    recording.operator(90, 10, "aten::mm")

    trace = recording.trace()

    assert host_time(trace).drop("lane").rows() == [
        (10, 10, "compute", "operators", 0),
        (20, 5, "python", "lines", 0),
        (25, 15, "python", "lines", 1),
        (40, 5, "compute", "operators", 1),
        (45, 10, "python", "lines", 1),
        (55, 35, "untraced", None, None),
        (90, 10, "compute", "operators", 2),
    ]


def test_while_the_host_runs_a_collective_a_silent_thread_waits_for_it() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::mm")
    recording.line(0, 100, "train.py(7): step")
    recording.annotation(30, 40, "gloo:all_reduce", lane=recording.thread("2"))
    recording.operator(60, 5, "aten::add")
    recording.operator(90, 10, "aten::mm")

    assert pieces_of(recording.trace()) == [
        (0, 10, "compute"),
        (10, 20, "python"),
        (30, 30, "communication"),
        (60, 5, "compute"),
        (65, 5, "communication"),
        (70, 20, "python"),
        (90, 10, "compute"),
    ]


def test_waiting_for_what_xla_computes_on_other_threads_of_the_cpu_is_computing() -> None:
    recording = Recording()
    recording.annotation(0, 100, "train", step=1)
    recording.launch(20, 60, 5, name="np.asarray(jax.Array)", kind="synchronise")
    lane = recording.thread("7", name="tf_XLAEigen")
    recording.operator(30, 20, "fusion", lane)
    recording.operator(60, 10, "dot", lane)
    recording.operator(70, 5, "compile", recording.thread("8", name="tf_xla-cpu-codegen"))

    assert pieces_of(recording.trace()) == [
        (0, 20, "untraced"),
        (20, 10, "synchronisation"),
        (30, 20, "compute"),
        (50, 10, "synchronisation"),
        (60, 10, "compute"),
        (70, 10, "synchronisation"),
        (80, 20, "untraced"),
    ]


def test_marks_of_a_program_that_runs_lazily_are_tracing_until_a_step_marker() -> None:
    recording = Recording()
    recording.annotation(0, 100, "train_step", step=1)
    recording.annotation(10, 30, "forward")
    recording.annotation(40, 5, "data")
    recording.operator(60, 30, "StepMarker")
    recording.operator(65, 10, "XLAGraphExecutor::Compile")

    assert pieces_of(recording.trace()) == [
        (0, 10, "graph_tracing"),
        (10, 30, "graph_tracing"),
        (40, 5, "input"),
        (45, 15, "graph_tracing"),
        (60, 5, "step_marker"),
        (65, 10, "compilation"),
        (75, 15, "step_marker"),
        (90, 10, "graph_tracing"),
    ]


@pytest.mark.parametrize("first_operator_ns", [520, 700])
def test_the_window_begins_after_the_profilers_own_start(first_operator_ns: int) -> None:
    recording = Recording()
    recording.frame(0, 1000, "train.py(1): <module>")
    recording.frame(10, 490, "torch/profiler/profiler.py(705): start")
    recording.frame(20, 300, "<built-in function hasattr>")
    recording.operator(first_operator_ns, 100, "aten::mm")
    recording.frame(900, 50, "torch/profiler/profiler.py(780): step")
    trace = recording.trace()

    window = host_window(trace, host_activity(trace))
    assert (window.start_ns, window.end_ns) == (500, 1000)
    assert host_time(trace)["duration_ns"].sum() == 500


def test_overhead_that_was_recorded_before_the_first_operator_is_left_out() -> None:
    recording = Recording()
    recording.frame(0, 1000, "train.py(1): <module>")
    recording.annotation(100, 200, "Overhead: Resource", kind="overhead")
    recording.operator(500, 100, "aten::mm")
    recording.annotation(700, 100, "Overhead: Flush", kind="overhead")
    trace = recording.trace()

    assert host_window(trace, host_activity(trace)).start_ns == 300


def test_without_operators_nothing_is_left_out() -> None:
    recording = Recording()
    recording.frame(0, 1000, "train.py(1): <module>")
    recording.frame(10, 490, "torch/profiler/profiler.py(705): start")
    trace = recording.trace()

    assert host_window(trace, host_activity(trace)).start_ns == 0
