"""Flame graphs: stacks by the user's code, as a tree, and in the formats of other viewers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stepscope.analysis.flame import FlameFrame, FlameStack, flame_graph, folded, speedscope, user_stacks
from stepscope.analysis.operators import operator_costs
from stepscope.trace import Trace
from tests.property.test_attribution_law import folder, read
from tests.simulator import Machine
from tests.simulator.strategies import programs
from tests.unit.analysis.test_attribution import NODE, training
from tests.unit.analysis.test_place_tables import on_host
from tests.unit.recording import Recording

__all__ = ["folder"]

TRAIN, MODEL = "train.py:20 train", "model.py:30 forward"


def document(trace: Trace) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(b"".join(speedscope(trace)))
    return decoded


def test_nothing() -> None:
    trace = Trace.from_tables({})

    assert user_stacks(trace) == []
    assert flame_graph(trace).frames == ()
    assert b"".join(folded(trace)) == b""
    assert [profile["weights"] for profile in document(trace)["profiles"]] == [[]]


def test_device_time_stands_under_the_users_functions_and_backward_under_the_forward() -> None:
    assert user_stacks(training().trace()) == [
        FlameStack((TRAIN, MODEL, "aten::linear", "aten::mm", "gemm"), 25),
        FlameStack((TRAIN, MODEL, "backward", NODE, "aten::mm", "gemm_backward"), 35),
    ]


def test_without_frames_the_modules_lead_to_the_line_and_without_a_device_operators_own_time_counts() -> None:
    line = "/srv/ada/model.py:3 forward"
    node = "autograd::engine::evaluate_function: AddmmBackward0"

    assert sorted(user_stacks(on_host().trace()), key=lambda stack: stack.frames) == [
        FlameStack(("/srv/ada/train.py:9 main", "other", "aten::rand"), 10),
        FlameStack(("Net", "body", "0", line, "aten::linear"), 20),
        FlameStack(("Net", "body", "0", line, "aten::linear", "aten::addmm"), 40),
        FlameStack(("Net", "body", "0", line, "backward", node), 80),
    ]


def test_stacks_become_a_tree_the_largest_first_and_the_smallest_are_left_out() -> None:
    trace = training().trace()

    whole, part = flame_graph(trace), flame_graph(trace, maximum=3)

    assert (whole.basis, whole.total_ns, whole.dropped) == ("device", 60, 0)
    assert whole.frames[:4] == (
        FlameFrame(TRAIN, -1, 60),
        FlameFrame(MODEL, 0, 60),
        FlameFrame("backward", 1, 35),
        FlameFrame(NODE, 2, 35),
    )
    assert part.frames == whole.frames[:3]
    assert part.dropped == len(whole.frames) - 3


def test_folded_stacks_are_one_line_each_whatever_their_frames_hold() -> None:
    recording = Recording()
    recording.operator(0, 20, "aten::mm;\nx\x1b\u2028y")

    assert b"".join(folded(recording.trace())) == b"(no line of yours);aten::mm, x  y 20\n"


def test_the_speedscope_file() -> None:
    recording = Recording()
    recording.frame(0, 100, "train.py(20): main")
    recording.operator(10, 30, "aten::linear")
    recording.operator(20, 10, "aten::mm")
    recording.operator(50, 0, "aten::empty")

    found = document(recording.trace())

    assert found["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = [frame["name"] for frame in found["shared"]["frames"]]
    sampled, evented = found["profiles"]
    assert (sampled["type"], sampled["unit"], sampled["endValue"], sampled["weights"]) == (
        "sampled", "nanoseconds", 30, [20, 10],
    )  # fmt: skip
    assert (evented["type"], evented["name"], evented["startValue"], evented["endValue"]) == (
        "evented", "thread 1", 0, 100,
    )  # fmt: skip
    assert [(event["type"], frames[event["frame"]], event["at"]) for event in evented["events"]] == [
        ("O", "train.py(20): main", 0),
        ("O", "aten::linear", 10),
        ("O", "aten::mm", 20),
        ("C", "aten::mm", 30),
        ("C", "aten::linear", 40),
        ("C", "train.py(20): main", 100),
    ]


def test_slices_that_partly_overlap_still_open_and_close_inside_each_other() -> None:
    recording = Recording()
    recording.annotation(0, 50, "a")
    recording.annotation(20, 60, "b")
    recording.annotation(60, 10, "c")

    check_events(document(recording.trace()))


@pytest.mark.slow
@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(machine=programs())
def test_of_any_machine_times_add_up_and_events_are_nested(machine: Machine, folder: Any) -> None:
    trace = read(machine, folder)
    device = int(trace.device_work["duration_ns"].sum())
    whole = device if trace.device_work.height else int(operator_costs(trace)["host_self_ns"].sum())

    assert sum(stack.ns for stack in user_stacks(trace)) == whole
    graph = flame_graph(trace)
    assert sum(frame.ns for frame in graph.frames if frame.parent < 0) == whole
    assert all(frame.ns <= graph.frames[frame.parent].ns for frame in graph.frames if frame.parent >= 0)
    check_events(document(trace))


def check_events(found: dict[str, Any]) -> None:
    for profile in found["profiles"][1:]:
        is_open, last = [], profile["startValue"]
        for event in profile["events"]:
            assert event["at"] >= last
            last = event["at"]
            if event["type"] == "O":
                is_open.append(event["frame"])
            else:
                assert is_open.pop() == event["frame"]
        assert is_open == []
        assert last <= profile["endValue"]
