"""late-first-launch: the device waits for the first launch of each step."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules import late_first_launch as rule
from tests.simulator.programs import PROGRAMS
from tests.unit.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, recorded, the_finding

FIRES: Cases = {
    "preparation": lambda: recorded(PROGRAMS["late_first_launch_fault"]()),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a quick beginning": lambda: recorded(PROGRAMS["late_first_launch_clean"]()),
    "loading data is told elsewhere": lambda: recorded(PROGRAMS["input_bound_training"]()),
    "a host that is late throughout": lambda: recorded(PROGRAMS["launch_bound_training"]()),
}


def test_the_idle_time_before_the_first_launch_is_saved() -> None:
    finding = the_finding(rule, recorded(PROGRAMS["late_first_launch_fault"]()))

    # The step is 773 us long, and 400 us without the fault; nothing was idle before the very first launch.
    assert finding.saving_ns_per_step == 305_833
    assert finding.title == "40% of the step the device waits for its first launch, while the host prepares the step"
    assert figures_of(finding)[1:] == [
        ("steps that begin with waiting", 5, "count", None),
        ("waiting per step", 305_833, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 80, "prepare")]
    assert "prepare(next(batches))" in finding.remedy.code


@pytest.mark.parametrize(("share", "count"), [(0.3, 1), (0.9, 0)])
def test_the_threshold_decides(share: float, count: int) -> None:
    assert len(asked(rule, recorded(PROGRAMS["late_first_launch_fault"]()), share=share).findings) == count
