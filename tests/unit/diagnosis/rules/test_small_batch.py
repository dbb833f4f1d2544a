"""small-batch: kernels are too short for the device, and a larger batch would fit."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.small_batch import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.unit.diagnosis.rules.cases import US, Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.recording import Recording


def stepping(
    kernel_us: int = 4, *, kernels: int = 20, pause_us: int = 0, held: int | None = 30, late: bool = False
) -> Trace:
    """A step of kernels that one graph launches, on a device of 100 bytes of which some are held."""
    recording = Recording(Metadata(devices=(Device("0", "Simulated Device", memory_bytes=100),)))
    length = kernels * (kernel_us + pause_us) * US
    recording.step(0, length + 20, 1)
    recording.launch(0, 2, 100, kind="graph_launch")
    for number in range(kernels):
        begin = number * (kernel_us + pause_us) * US
        if late:
            recording.operator(max(begin - 900, 0), 800, "aten::mm")
            recording.launch(begin - 500 if begin else 3, 2, 200 + number)
        recording.work(begin + 10, kernel_us * US, "gemm", 200 + number if late else 100)
    if not late:
        recording.launch(10, length, 99, name="cudaDeviceSynchronize", kind="synchronise")
    if held is not None:
        recording.allocation(1, 8, total_reserved=held)
    return recording.trace()


FIRES: Cases = {"short kernels": stepping}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "long kernels": lambda: stepping(20),
    "much memory is held": lambda: stepping(held=60),
    "it is not known what is held": lambda: stepping(held=None),
    "an idle device": lambda: stepping(pause_us=4),
    "late launches are told elsewhere": lambda: stepping(pause_us=1, late=True),
}


def test_half_of_the_short_kernels_time_is_saved() -> None:
    finding = the_finding(rule, stepping())

    assert (finding.saving_ns_per_step, finding.saving_from) == (20 * 4 * US // 2, "replayed")
    assert finding.title == (
        "100% of the step goes to kernels shorter than 10 us, and the device's memory is 30% full at most: a "
        "larger batch would take hardly longer"
    )
    assert (finding.confidence, "assumption" in finding.saving_basis) == ("low", True)
    assert figures_of(finding) == [
        ("share of the step in short kernels", 80_000 / 80_020, "share", 0.3),
        ("share of the step that the device is busy", pytest.approx(1.0, abs=1e-3), "share", 0.7),
        ("share of the device's memory held at the most", 0.3, "share", 0.5),
        ("short kernels per step", 20.0, "count", None),
        ("kernels per step", 20.0, "count", None),
    ]


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"short_ns": 4000}, 0), ({"short_ns": 4001}, 1), ({"memory": 0.3}, 1), ({"memory": 0.29}, 0), ({"busy": 1.1}, 0)],
)
def test_the_thresholds_decide(settings: dict[str, float], count: int) -> None:
    assert len(asked(rule, stepping(), **settings).findings) == count


def test_the_device_may_be_idle_for_a_part() -> None:
    assert len(asked(rule, stepping(pause_us=4), busy=0.49).findings) == 1
