"""buffer-broadcast: DistributedDataParallel sends buffers before each forward pass."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.buffer_broadcast import RULE as rule
from stepscope.diagnosis.rules.loop_in_step import RULE as loop_in_step
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording
from tests.unit.shaped import LINE

FORWARD = "DistributedDataParallel.forward"


def broadcasting(
    *, buffers: int = 40, forward: str = FORWARD, device: bool = False, send: str = "c10d::broadcast_"
) -> Trace:
    """Two steps of 1,000 us: 10 us flatten, 20 send, 10 unflatten, 5 for each buffer's copy; then 300 us of layers."""
    recording = Recording(unit_ns=1_000)
    for begin in (0, 1000):
        recording.step(begin, 1000, begin)
        recording.annotation(begin + 10, 900, forward)
        recording.operator(begin + 20, 5, "aten::copy_", **LINE)
        recording.operator(begin + 30, 10, "aten::flatten_dense_tensors", **LINE)
        recording.operator(begin + 40, 20, send, **LINE)
        recording.operator(begin + 60, 10, "aten::unflatten_dense_tensors", **LINE)
        for number in range(buffers):
            at = begin + 70 + 5 * number
            recording.operator(at, 4, "aten::copy_", **LINE)
            if device:
                recording.launched(at + 1, at + 4, 1, "copy", 1000 * begin + number)
        layers = begin + 70 + 5 * buffers
        recording.operator(layers, 300, "aten::conv2d", **LINE)
        if device:
            recording.launched(layers + 5, layers + 10, 290, "conv", 1000 * begin + buffers)
    return recording.trace()


FIRES: Cases = {
    "on the host": broadcasting,
    "on a device": lambda: broadcasting(device=True),
    "by the backend's name": lambda: broadcasting(send="nccl:broadcast"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a broadcast of the program": lambda: broadcasting(forward="forward"),
    "no broadcast": lambda: broadcasting(send="aten::relu"),
}


def test_the_copies_are_saved_and_the_broadcast_is_not() -> None:
    finding = the_finding(rule, broadcasting())

    # 10 us flatten, 10 unflatten, 39 copies of 5 us and the last of 4; not the 20 us in which it is sent.
    assert finding.saving_ns_per_step == 219_000
    assert finding.saving_from == "replayed"
    assert figures_of(finding) == [
        ("share of the step that flattening and copying buffers costs", 0.219, "share", 0.02),
        ("share of the step in which the host flattens and copies buffers", 0.219, "share", None),
        ("time in which the host flattens and copies buffers per step", 219_000, "ns", None),
        ("such operators per step", 42.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "broadcast_buffers=False" in finding.remedy.code


def test_a_device_waits_for_the_copies() -> None:
    finding = the_finding(rule, broadcasting(device=True))

    assert figures_of(finding)[1][1] == 0.219
    assert finding.saving_ns_per_step == pytest.approx(219_000, abs=10_000)


def test_the_threshold_decides() -> None:
    assert asked(rule, broadcasting(), share=0.23).findings == ()


@pytest.mark.parametrize(("forward", "loops"), [(FORWARD, 0), ("forward", 1)])
def test_the_copies_are_no_loop_of_the_program(forward: str, loops: int) -> None:
    assert len(asked(loop_in_step, broadcasting(forward=forward)).findings) == loops
