"""zero-grad: gradients are filled with zeros instead of being dropped."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.zero_grad import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    the_finding,
)
from tests.unit.recording import Recording

ACCUMULATING = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def filling(
    fills: int = 10,
    additions: int = 10,
    name: str = "aten::zero_",
    shapes: str | None = None,
    added: str | None = None,
) -> Trace:
    """In 1000 ns fills of 8 ns, and in the backward pass additions of 20 ns."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    for number in range(fills):
        recording.operator(10 * number, 8, name, input_shapes=shapes)
    recording.operator(200, 100, "aten::linear")
    for number in range(additions):
        recording.operator(400 + 40 * number, 30, ACCUMULATING)
        recording.operator(405 + 40 * number, 20, "aten::add_", input_shapes=added)
    return recording.trace()


def on_a_device() -> Trace:
    """5 fills and additions that each take the device 20 us, one after the other without a pause.

    The step of 1,000 us waits for the device at its end.
    """
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.launched(1 * US, 5 * US, 100 * US, "gemm", 100)
    for number in range(5):
        recording.operator((10 + 4 * number) * US, 3 * US, "aten::zero_")
        recording.launched((11 + 4 * number) * US, (105 + 20 * number) * US, 20 * US, "fill", 101 + number)
        recording.operator((50 + 4 * number) * US, 3 * US, ACCUMULATING)
        recording.operator((50 + 4 * number) * US, 3 * US, "aten::add_")
        recording.launched((51 + 4 * number) * US, (205 + 20 * number) * US, 20 * US, "add", 201 + number)
    recording.launched(80 * US, 305 * US, 600 * US, "gemm", 300)
    recording.launch(85 * US, 825 * US, 301, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


FIRES: Cases = {
    "one by one": filling,
    "over a list": lambda: filling(1, 10, "aten::_foreach_zero_", "[[[4], [4], [4]]]"),
    "on a device": on_a_device,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "gradients are dropped": lambda: filling(0),
    "other tensors are cleared": lambda: filling(10, 0),
    "a little": lambda: filling(1, 0),
}


def test_filling_and_adding_are_saved() -> None:
    finding = the_finding(rule, filling())

    # 10 fills of 8 ns, 2 ns of Python after each (more before the layer), and 10 additions of 20 ns.
    assert finding.saving_ns_per_step == 10 * 8 + 9 * 2 + (200 - 98) + 10 * 20
    assert finding.title == "10 gradients are filled with zeros in each step, and the backward pass adds to them"
    assert figures_of(finding) == [
        ("share of the step that filling and adding cost", 0.4, "share", 0.02),
        ("gradients filled per step", 10.0, "count", None),
        ("time to fill them per step", 200, "ns", None),
        ("time to add to them per step", 200, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert "set_to_none=True" in finding.remedy.code


def test_later_passes_of_an_accumulation_remain() -> None:
    finding = the_finding(rule, filling(5, 10))

    assert figures_of(finding)[3] == ("time to add to them per step", 100, "ns", None)


def test_a_list_counts_as_its_tensors() -> None:
    finding = the_finding(rule, filling(1, 10, "aten::_foreach_zero_", "[[[4], [4], [4]]]"))

    assert figures_of(finding)[1] == ("gradients filled per step", 3.0, "count", None)


@pytest.mark.parametrize(
    ("trace", "confidence"),
    [
        (filling(), "low"),  # only names tell
        (filling(shapes="[[64, 3]]", added="[[64, 3], [64, 3], []]"), "medium"),
        (filling(10, 20, shapes="[[64, 3]]", added="[[64, 3], [64, 3], []]"), "medium"),  # two passes are accumulated
        (filling(shapes="[[]]", added="[[], [], []]"), "medium"),
        (filling(shapes="[[64, 3]]"), "low"),
        (filling(shapes="[[64, 3]]", added="[[3], [3], []]"), "low"),
        (filling(1, 3, "aten::_foreach_zero_", "[[[4], [4], [4]]]", "[[4], [4], []]"), "medium"),
        (filling(1, 3, "aten::_foreach_zero_", "[[[4], [5], [6]]]", "[[4], [4], []]"), "low"),
    ],
)
def test_shapes_tell_that_what_is_filled_is_added_to(trace: Trace, confidence: str) -> None:
    assert the_finding(rule, trace).confidence == confidence


def test_on_a_device_its_time_counts() -> None:
    finding = the_finding(rule, on_a_device())

    assert (finding.saving_ns_per_step, finding.saving_from) == ((5 * 20 + 5 * 20) * US, "replayed")


def test_the_threshold_decides() -> None:
    assert len(asked(rule, filling(), share=0.4).findings) == 1
    assert asked(rule, filling(), share=0.41).findings == ()
