"""late-first-launch: the device waits for the first launch of each step."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.late_first_launch import RULE as rule
from stepscope.trace import Trace
from tests.simulator.programs import PROGRAMS
from tests.unit.diagnosis.rules.cases import (
    US,
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


def preparing(*, waited: int) -> Trace:
    """Three steps of 1000 us that prepare 200 us, of 500 us of work, whose last part the host waits for."""
    recording = Recording()
    for step in range(3):
        begin = 1000 * US * step
        recording.step(begin, 1000 * US, step)
        recording.frame(begin, 200 * US, "train.py(80): prepare")
        recording.launched(begin + 200 * US, begin + 200 * US, 500 * US, "gemm", 10 * step + 1)
        recording.launch(
            begin + (700 - waited) * US, waited * US, 10 * step + 2, name="cudaDeviceSynchronize", kind="synchronise"
        )
    return recording.trace()


FIRES: Cases = {
    "a wait explains little": lambda: preparing(waited=50),
    "preparation": lambda: recorded(PROGRAMS["late_first_launch_fault"]()),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a quick beginning": lambda: recorded(PROGRAMS["late_first_launch_clean"]()),
    "loading data is told elsewhere": lambda: recorded(PROGRAMS["input_bound_training"]()),
    "a wait is charged": lambda: preparing(waited=490),
    "a wait after every step is told elsewhere": lambda: recorded(PROGRAMS["item_fault"]()),
    "a host that is late throughout": lambda: recorded(PROGRAMS["launch_bound_training"]()),
}


def test_the_idle_time_before_the_first_launch_is_saved() -> None:
    finding = the_finding(rule, recorded(PROGRAMS["late_first_launch_fault"]()))

    # The step is 773 us long, and 400 us without the fault. The first waits longest: no work before it hides a part.
    assert (finding.saving_ns_per_step, finding.saving_from) == (773 * US - 400 * US, "replayed")
    assert (
        finding.title == "for 55% of the step the device waits for its first launch, while the host prepares the step"
    )
    assert figures_of(finding)[1:] == [
        ("steps that begin with waiting", 6, "count", None),
        ("waiting per step", 423_500, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 80, "prepare")]
    assert "prepare(next(batches))" in finding.remedy.code


def test_what_a_wait_explains_is_left_out() -> None:
    finding = the_finding(rule, preparing(waited=50))

    # Two steps show 200 us each before their launch, and the first counts as much. Of 500 us that the host is late
    # after a wait of 50 us a tenth is the wait's.
    assert figures_of(finding)[2] == ("waiting per step", 180 * US, "ns", None)


def test_while_the_device_works_the_host_has_only_time_that_it_waited() -> None:
    # Of the 500 us that the device works the host waits 50, and 5 of these a wait takes when there is nothing to wait
    # for.
    assert the_finding(rule, preparing(waited=50)).saving_ns_per_step == (50 - 5) * US


@pytest.mark.parametrize(("share", "count"), [(0.3, 1), (0.9, 0)])
def test_the_threshold_decides(share: float, count: int) -> None:
    assert len(asked(rule, recorded(PROGRAMS["late_first_launch_fault"]()), share=share).findings) == count
