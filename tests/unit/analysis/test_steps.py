"""Where steps begin and end."""

from __future__ import annotations

import pytest

from stepscope.analysis.steps import STEP_SCHEMA, StepSummary, step_summary, step_table
from stepscope.trace import Trace
from tests.unit.recording import Recording

NOTHING = StepSummary("none", 0, 0, 0, 0, 0.0, 0.0)


def steps_of(recording: Recording) -> list[tuple[object, ...]]:
    return step_table(recording.trace()).rows()


def test_no_steps() -> None:
    steps = step_table(Trace.from_tables({}))

    assert dict(steps.schema) == {name: dtype() for name, dtype in STEP_SCHEMA.items()}
    assert steps.height == 0
    assert step_summary(steps) == NOTHING


def test_annotated_steps() -> None:
    recording = Recording()
    recording.step(10, 100, 7)
    recording.step(115, 90, 8)
    recording.annotation(20, 5, "not a step")
    recording.annotation(12, 90, "ProfilerStep#7", lane=recording.queue(), kind="device", step=7)

    assert steps_of(recording) == [(7, 10, 100, True, "annotation"), (8, 115, 90, True, "annotation")]


def test_a_step_that_two_threads_annotate_counts_once() -> None:
    recording = Recording()
    recording.step(10, 100, 7)
    recording.step(12, 80, 7, lane=recording.thread("2"))

    assert steps_of(recording) == [(7, 10, 100, True, "annotation")]


@pytest.mark.parametrize(
    ("durations", "complete"),
    [
        ([100], [True]),
        ([10], [True]),
        ([100, 100], [True, True]),
        ([49, 100], [False, True]),
        ([50, 100], [True, True]),
        ([100, 100, 49], [True, True, False]),
        ([49, 100, 100, 30], [False, True, True, False]),
        ([100, 20, 100], [True, True, True]),
        ([100, 300, 100], [True, True, True]),
    ],
    ids=["one", "one short", "equal", "first cut", "first half", "last cut", "both cut", "short inside", "long inside"],
)
def test_steps_cut_off_by_the_recording_are_not_complete(durations: list[int], complete: list[bool]) -> None:
    recording, now = Recording(), 0
    for number, duration in enumerate(durations):
        recording.step(now, duration, number)
        now += duration

    assert step_table(recording.trace())["complete"].to_list() == complete


def test_steps_from_the_ends_of_the_optimizer() -> None:
    recording = Recording()
    for number in range(4):
        recording.annotation(100 * number, 20, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        recording.annotation(100 * number + 70, 20, "Optimizer.step#SGD.step")

    assert steps_of(recording) == [
        (0, 90, 100, True, "inferred"),
        (1, 190, 100, True, "inferred"),
        (2, 290, 100, True, "inferred"),
    ]


def test_steps_from_the_loading_of_batches() -> None:
    recording = Recording()
    for number in range(3):
        recording.annotation(100 * number, 20, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    recording.annotation(70, 20, "Optimizer.step#SGD.step")

    assert steps_of(recording) == [(0, 0, 100, True, "inferred"), (1, 100, 100, True, "inferred")]


def test_two_marks_are_too_few() -> None:
    recording = Recording()
    recording.annotation(0, 20, "Optimizer.step#SGD.step")
    recording.annotation(100, 20, "Optimizer.step#SGD.step")

    assert steps_of(recording) == []


def test_marks_of_the_busiest_thread_count() -> None:
    recording = Recording()
    other = recording.thread("2")
    for number in range(4):
        recording.annotation(100 * number, 20, "Optimizer.step#SGD.step")
    recording.annotation(50, 20, "Optimizer.step#SGD.step", other)

    assert [row[1] for row in steps_of(recording)] == [20, 120, 220]


def test_steps_from_the_period_of_kernels() -> None:
    # given: four times the same three kernels, with a pause before each "embed"; the recording begins in the middle
    recording, now = Recording(), 0
    for number, name in enumerate(["loss", *["embed", "layer", "loss"] * 4]):
        now += 50 if name == "embed" else 12
        recording.work(now, 10, name, 100 + number)

    # then: steps begin with "embed"
    assert steps_of(recording) == [
        (0, 62, 74, True, "inferred"),
        (1, 136, 74, True, "inferred"),
        (2, 210, 74, True, "inferred"),
    ]


def test_steps_from_the_period_of_operators_without_a_device() -> None:
    recording, now = Recording(), 0
    for _ in range(4):
        for name in ("aten::embedding", "aten::linear", "aten::mse_loss"):
            now += 30 if name == "aten::embedding" else 11
            recording.operator(now, 10, name)
            recording.operator(now + 1, 5, "aten::inner")

    assert [row[1:3] for row in steps_of(recording)] == [(30, 52), (82, 52), (134, 52)]


def test_kernels_that_never_repeat_make_no_steps() -> None:
    recording = Recording()
    for number in range(30):
        recording.work(20 * number, 10, f"kernel {number}", number)

    assert steps_of(recording) == []


def test_one_kernel_over_and_over_makes_no_steps() -> None:
    recording = Recording()
    for number in range(30):
        recording.work(20 * number, 10, "kernel", number)

    assert steps_of(recording) == []


def test_the_summary_is_of_complete_steps() -> None:
    recording, now = Recording(), 0
    for number, duration in enumerate([100, 120, 140, 20]):
        recording.step(now, duration, number)
        now += duration

    summary = step_summary(step_table(recording.trace()))

    assert summary == StepSummary(
        "annotation",
        3,
        120,
        100,
        140,
        120.0,
        pytest.approx((800 / 3) ** 0.5 / 120),  # type: ignore[arg-type]
    )


def test_steps_that_only_devices_show() -> None:
    recording = Recording()
    for number, start in enumerate((0, 110, 220), 4):
        for device in ("0", "1"):
            recording.annotation(start, 100, str(number), recording.queue("Steps", device), kind="device", step=number)

    assert step_table(recording.trace()).select("index", "start_ns", "duration_ns", "source").rows() == [
        (4, 0, 100, "annotation"),
        (5, 110, 100, "annotation"),
        (6, 220, 100, "annotation"),
    ]


def test_steps_from_the_executions_of_the_largest_compiled_program() -> None:
    recording = Recording()
    for start in (0, 100, 210, 330):
        for device in ("0", "1"):
            lane = recording.queue("XLA Modules", device)
            recording.annotation(start, 80, "jit_step(12190760917235803885)", lane, kind="device")
            recording.annotation(start + 85, 5, "jit_add(7)", lane, kind="device")

    assert step_table(recording.trace()).select("index", "start_ns", "duration_ns", "source").rows() == [
        (0, 0, 100, "inferred"),
        (1, 100, 110, "inferred"),
        (2, 210, 120, "inferred"),
    ]
