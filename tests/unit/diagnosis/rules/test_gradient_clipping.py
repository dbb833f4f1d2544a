"""gradient-clipping: gradients are clipped one by one."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.gradient_clipping import RULE as rule
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


def clipping(gradients: int = 12, *norm: str, scaled: bool = True) -> Trace:
    """In 1000 ns norms one by one, of operators of 8 ns with 2 ns of Python after each, and products likewise."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): clip")
    now = 0
    for _ in range(gradients):
        for name in norm or ("aten::linalg_vector_norm", "aten::item"):
            recording.operator(now, 8, name)
            now += 10
    recording.operator(now, 5, "aten::sqrt")
    now += 7
    for _ in range(gradients if scaled else 0):
        recording.operator(now, 8, "aten::mul_")
        now += 10
    recording.operator(now, 5, "aten::mean")
    return recording.trace()


def on_a_device() -> Trace:
    """12 norms that each take the device 5 us after 15 us of idling."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    for number in range(12):
        recording.operator(20 * number + 5, 10, "aten::linalg_vector_norm")
        recording.launched(20 * number + 10, 20 * number + 15, 5, "norm", 101 + number)
    return recording.trace()


FIRES: Cases = {
    "norms that are read": clipping,
    "squares": lambda: clipping(12, "aten::pow", "aten::sum", "aten::add"),
    "norms alone": lambda: clipping(scaled=False),
    "on a device": on_a_device,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "few gradients": lambda: clipping(9),
    "all at once": lambda: clipping(1, "aten::_foreach_norm", scaled=False),
    "other loops": lambda: clipping(12, "aten::select", "aten::add"),
}


def test_what_one_call_does_for_each_gradient_remains() -> None:
    finding = the_finding(rule, clipping())

    # 24 operators before the root and 12 after it; 12 norms and 12 products of 8 ns remain, 12 .item() do not.
    pauses = 23 * 2 + 11 * 2
    assert finding.saving_ns_per_step == 12 * 8 + pauses
    assert finding.title == (
        "the norms of 12 gradients are computed one by one in each step, and 12 of them are read with .item()"
    )
    assert figures_of(finding) == [
        ("share of the step that clipping at once would save", 0.164, "share", 0.02),
        ("norms in a row", 12, "count", 10),
        ("norms per step", 12.0, "count", None),
        ("gradients scaled per step", 12.0, "count", None),
        ("norms read by the host per step", 12.0, "count", None),
        ("share of the step that the loops cost", 0.356, "share", None),
    ]
    assert places_of(finding) == [("train.py", 12, "clip")]
    assert "clip_grad_norm_(model.parameters(), max_norm)" in finding.remedy.code


def test_on_a_device_idle_time_before_each_norm_counts() -> None:
    # All work is as short as the shortest.
    finding = the_finding(rule, on_a_device())

    assert figures_of(finding)[0][1] == 12 * (5 + 15) / 1000
    # One operator of twelve stays, and of the 10 us after each; then the device waits for the host.
    assert finding.saving_ns_per_step == round((12 * 10 + 11 * 10) * US * 11 / 12)


@pytest.mark.parametrize(("settings", "count"), [({"gradients": 13}, 0), ({"share": 0.164}, 1), ({"share": 0.165}, 0)])
def test_the_thresholds_decide(settings: dict[str, float], count: int) -> None:
    assert len(asked(rule, clipping(), **settings).findings) == count
