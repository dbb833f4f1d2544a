"""cpu-fallback: operators run on the CPU in the middle of the device's work."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.cpu_fallback import RULE as rule
from stepscope.trace import Trace
from tests.simulator.programs import PROGRAMS
from tests.unit.diagnosis.rules.cases import (
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    recorded,
    the_finding,
)
from tests.unit.recording import Recording


def named() -> Trace:
    """In 1000 ns an operator that says that it fell back, and makes the device wait 400 ns."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.launched(5, 10, 90, "gemm", 101)
    recording.operator(50, 440, "aten::_cpu_fallback")
    recording.launched(480, 500, 100, "copy", 102)
    recording.launched(495, 600, 400, "gemm", 103)
    return recording.trace()


FIRES: Cases = {
    "a sort on the CPU": lambda: recorded(PROGRAMS["cpu_fallback_fault"]()),
    "an operator that says so": named,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "on the device": lambda: recorded(PROGRAMS["cpu_fallback_clean"]()),
    "nothing is done on the host": lambda: recorded(PROGRAMS["device_ping_pong_fault"]()),
    "copies in one direction": lambda: recorded(PROGRAMS["host_created_tensor_fault"]()),
}


def test_the_idle_time_and_the_copies_are_saved() -> None:
    finding = the_finding(rule, recorded(PROGRAMS["cpu_fallback_fault"]()))

    # The step is 675 us long, and 420 us with a sort of 20 us on the device, for which a short kernel of 5 us is taken.
    assert finding.saving_ns_per_step == 675_000 - 405_000
    assert finding.title == "aten::sort on the CPU between two copies: the device waits 1 times a step"
    assert figures_of(finding)[1:] == [
        ("round trips per step", 1.0, "count", None),
        ("time of operators on the CPU per step", 200_000, "ns", None),
        ("bytes copied per step", (1 << 18) + (1 << 16), "bytes", None),
    ]
    assert places_of(finding) == [("model.py", 70, "choose")]


def test_a_name_that_says_so_counts_with_its_idle_time() -> None:
    finding = the_finding(rule, named())

    # The device waits 400 ns and copies for 100. Without the operator's 440 ns the host decides the step's length.
    assert figures_of(finding)[0][1] == 0.5
    assert finding.saving_ns_per_step == 440
    assert finding.title == "aten::_cpu_fallback: operators fall back to the CPU"


@pytest.mark.parametrize(("share", "count"), [(0.40, 1), (0.41, 0)])
def test_the_threshold_decides(share: float, count: int) -> None:
    assert len(asked(rule, recorded(PROGRAMS["cpu_fallback_fault"]()), share=share).findings) == count
