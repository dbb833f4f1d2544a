"""slow-transfer: data between ranks moves slowly."""

from __future__ import annotations

from stepscope.diagnosis.rules.slow_transfer import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.recording import Recording

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reducing(length_ns: int = 4_000_000, elements: int = 2**20, steps: int = 4, *, covered: bool = False) -> Trace:
    """A reduction of 4 MiB over two ranks in each step of 10 ms, for which the step waits at its end."""
    recording = Recording()
    for step in range(steps):
        begin = 10_000_000 * step
        recording.step(begin, 10_000_000, step)
        recording.launched(begin + 5, begin + 10, 1_999_990, "gemm", 10 * step + 101)
        recording.launch(
            begin + 50, length_ns + 2_000_000, 10 * step + 104, name="cudaDeviceSynchronize", kind="synchronise"
        )
        recording.launched(
            begin + 20, begin + 2_000_000, length_ns, ALL_REDUCE, 10 * step + 102, queue="24", kind="communication",
            message_elements=elements, message_type="Float", collective="allreduce", group="0", group_size=2,
        )  # fmt: skip
        if covered:
            recording.launched(begin + 30, begin + 2_000_000, length_ns, "backward", 10 * step + 103)
    return recording.trace()


FIRES: Cases = {"one GB/s": reducing}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "fast": lambda: reducing(400_000),
    "small messages": lambda: reducing(elements=1024),
    "too few to tell from waiting": lambda: reducing(steps=3),
    "covered by computation": lambda: reducing(covered=True),
}


def test_what_the_expected_rate_needs_is_taken_off() -> None:
    finding = the_finding(rule, reducing())

    # Each of two ranks' links carries the message once: 4 MiB at 5 GB/s.
    assert (finding.saving_ns_per_step, finding.saving_from) == (4_000_000 - round(4 * 2**20 / 5), "replayed")
    assert finding.title == "data moves at 1.0 GB/s on each rank's link, below the 5.0 GB/s expected"
    assert figures_of(finding)[0] == ("bytes in a second on each link", 4 * 2**20 / 4e-3, "bytes", 5e9)


def test_the_thresholds_decide() -> None:
    assert asked(rule, reducing(), bytes_per_second=1e9).findings == ()
    assert asked(rule, reducing(), share=0.33).findings == ()
    assert asked(rule, reducing(), bytes=2**23).findings == ()
