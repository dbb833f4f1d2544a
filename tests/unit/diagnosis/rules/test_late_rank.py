"""late-rank: ranks wait for one that comes late."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.diagnosis.rules.late_rank import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import US, Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.recording import Recording

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reducing(lengths: Sequence[int] = (100, 400, 100, 400), elements: int | None = 1024) -> Trace:
    """A reduction in each step of 1,000 us, which nothing covers and for which the step's end waits."""
    recording = Recording()
    for step, length in enumerate(lengths):
        begin = 1000 * US * step
        recording.step(begin, 1000 * US, step)
        recording.launched(begin + 5 * US, begin + 10 * US, 200 * US, "gemm", 10 * step + 101)
        recording.launch(begin + 30 * US, (190 + length) * US, 10 * step + 103, name="cudaDeviceSynchronize",
                         kind="synchronise")  # fmt: skip
        recording.launched(
            begin + 20 * US, begin + 210 * US, length * US, ALL_REDUCE, 10 * step + 102, kind="communication",
            message_elements=elements, message_type="Float", collective="allreduce", group="0", group_size=2,
        )  # fmt: skip
    return recording.trace()


FIRES: Cases = {"every other step": reducing}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "always as long": lambda: reducing((400, 400, 400, 400)),
    "of unknown size": lambda: reducing(elements=None),
    "too few to compare": lambda: reducing((100, 400, 400)),
}


def test_what_is_longer_than_the_fastest_is_waiting() -> None:
    finding = the_finding(rule, reducing())

    assert (finding.saving_ns_per_step, finding.confidence) == (150 * US, "low")
    assert finding.saving_from == "replayed"
    assert finding.title == "for 15% of the step this rank waits in collectives for others that come later"
    assert figures_of(finding) == [
        ("share of the step that ranks wait for the last one", 0.15, "share", 0.05),
        ("collectives that were compared per step", 1.0, "count", None),
        ("their time per step", 250 * US, "ns", None),
        ("the same if each took as long as the fastest", 100 * US, "ns", None),
    ]


def test_the_threshold_decides() -> None:
    assert asked(rule, reducing(), share=0.16).findings == ()
