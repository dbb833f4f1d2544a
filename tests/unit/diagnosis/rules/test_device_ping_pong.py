"""device-ping-pong: data is copied to the host and back."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.device_ping_pong import RULE as rule
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

FIRES: Cases = {
    "there and back": lambda: recorded(PROGRAMS["device_ping_pong_fault"]()),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "it stays on the device": lambda: recorded(PROGRAMS["device_ping_pong_clean"]()),
    "the host works on it": lambda: recorded(PROGRAMS["cpu_fallback_fault"]()),
    "results that do not come back": lambda: recorded(PROGRAMS["device_tail_fault"]()),
    "numbers that are read": lambda: recorded(PROGRAMS["item_every_step"]()),
}


def test_the_copies_and_the_idle_time_around_them_are_saved() -> None:
    finding = the_finding(rule, recorded(PROGRAMS["device_ping_pong_fault"]()))

    # The step is 605 us long, and 400 us without the fault.
    assert finding.saving_ns_per_step == 205_000
    assert finding.title == "the same data is copied to the host and back: 34% of the step"
    assert figures_of(finding)[1:] == [
        ("round trips per step", 1.0, "count", None),
        ("bytes there and back per step", 2 << 20, "bytes", None),
    ]
    assert places_of(finding) == [("model.py", 60, "keep")]
    assert len(finding.evidence.intervals) == 3


@pytest.mark.parametrize(("share", "count"), [(0.33, 1), (0.34, 0)])
def test_the_threshold_decides(share: float, count: int) -> None:
    assert len(asked(rule, recorded(PROGRAMS["device_ping_pong_fault"]()), share=share).findings) == count
