"""device-tail: steps begin or end with copies while the device computes nothing."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.device_tail import RULE as rule
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


def heads(*, early: bool = False, memory: str = "Pinned") -> Trace:
    """Two steps of 1000 us that begin with a copy of 200 us, and end with the device.

    With `early`, the second one's is copied during the computation of the first.
    """
    recording = Recording(unit_ns=US)
    for step in (0, 1):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(12): step")
        start = begin - (100 if early and step else 0)
        recording.launch(begin + 1, 2, 10 * step, kind="copy", name="cudaMemcpyAsync")
        name = f"Memcpy HtoD ({memory} -> Device)"
        recording.work(start + 10, 200, name, 10 * step, kind="copy_in", bytes=64, queue="9")
        recording.launched(begin + 5, begin + 210, 780, "gemm", 10 * step + 1)
        recording.launch(begin + 10, 985, 10 * step + 2, kind="synchronise", name="cudaDeviceSynchronize")
    return recording.trace()


FIRES: Cases = {
    "results to the host": lambda: recorded(PROGRAMS["device_tail_fault"]()),
    "a batch to the device": heads,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "no results": lambda: recorded(PROGRAMS["device_tail_clean"]()),
    "copies in the middle": lambda: recorded(PROGRAMS["device_ping_pong_fault"]()),
    "from pageable memory": lambda: recorded(PROGRAMS["pageable_copy_fault"]()),
    "beside the step before": lambda: heads(early=True),
    "a batch in pageable memory is told elsewhere": lambda: heads(memory="Pageable"),
}


def test_copies_at_the_end_are_saved() -> None:
    finding = the_finding(rule, recorded(PROGRAMS["device_tail_fault"]()))

    # The step is 664 us long, and 400 us without waiting for the copy.
    assert finding.saving_ns_per_step == 264_000
    assert finding.title == "each step ends with copies that nothing overlaps: 38% of the step"
    assert figures_of(finding)[1:] == [
        ("steps with copies there", 6, "count", None),
        ("copies at the beginning per step", 0, "ns", None),
        ("copies at the end per step", 250_000, "ns", None),
        ("bytes copied at the ends per step", 1 << 24, "bytes", None),
    ]
    assert places_of(finding) == [("train.py", 90, "collect")]
    assert "host.copy_(result, non_blocking=True)" in finding.remedy.code


def test_copies_at_the_beginning_are_saved() -> None:
    finding = the_finding(rule, heads())

    # The first step follows nothing whose end is known. In the second the computation begins, where it waited until
    # 210 us for the copy, 9 us after its launch at 5, as the copies do.
    assert finding.saving_ns_per_step == (210 - 5 - 9) * US // 2
    assert finding.title == "each step begins with copies that nothing overlaps: 10% of the step"
    assert "following.to(device, non_blocking=True)" in finding.remedy.code
    assert places_of(finding) == [("train.py", 12, "step")]


@pytest.mark.parametrize(("share", "count"), [(0.37, 1), (0.38, 0)])
def test_the_threshold_decides(share: float, count: int) -> None:
    assert len(asked(rule, recorded(PROGRAMS["device_tail_fault"]()), share=share).findings) == count
