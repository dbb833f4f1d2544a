"""pipeline-bubbles: pipeline stages wait for each other."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.pipeline_bubbles import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.recording import Recording

SEND_RECEIVE = "ncclDevKernel_SendRecv"


def receiving(length_ns: int = 3_000_000, *, covered: bool = False, source: int | None = 0) -> Trace:
    """Steps of 10 ms, in each of which the rank receives once before it computes."""
    recording = Recording()
    for step in range(4):
        begin = 10_000_000 * step
        recording.step(begin, 10_000_000, step)
        recording.launch(begin + 50, 9_000_000, 10 * step + 104, name="cudaDeviceSynchronize", kind="synchronise")
        recording.launched(
            begin + 5, begin + 10, length_ns, SEND_RECEIVE, 10 * step + 102, queue="24", kind="communication",
            message_elements=2**20, message_type="Float", collective="recv", group="pp", group_size=4,
            source_rank=source,
        )  # fmt: skip
        if covered:
            recording.launched(begin + 6, begin + 10, length_ns, "backward", 10 * step + 103)
        recording.launched(begin + 20, begin + length_ns + 10, 9_000_000 - length_ns, "gemm", 10 * step + 101)
    return recording.trace()


FIRES: Cases = {"waits for the stage before": receiving}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "short": lambda: receiving(300_000),
    "no peer is known": lambda: receiving(source=None),
    "covered by computation": lambda: receiving(covered=True),
}


def test_the_wait_is_the_time_of_receives() -> None:
    finding = the_finding(rule, receiving())
    assert finding.saving_ns_per_step == pytest.approx(3_000_000, rel=0.01)
    assert figures_of(finding)[1:3] == [
        ("receives per step", 1.0, "count", None),
        ("their time per step", 3_000_000, "ns", None),
    ]


def test_the_threshold_decides() -> None:
    assert asked(rule, receiving(), share=0.4).findings == ()
