"""low-occupancy: kernels have too few thread blocks to fill the device."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.low_occupancy import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

US = 1_000


def one_kernel(
    grid: str | None = "[10, 1, 1]",
    duration_ns: int = 400 * US,
    units: int | None = 100,
    name: str = "Simulated Device",
    late: bool = False,
) -> Trace:
    """A step of 1000 us with one kernel and other work, for which the host waits before it does something else.

    `late`: the host comes 100 us after the kernel.
    """
    recording = Recording(Metadata(devices=(Device("0", name, multiprocessors=units),)))
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.launched(1 * US, 2 * US, duration_ns, "reduce", 1, grid=grid)
    after = 2 * US + duration_ns
    if late:
        recording.operator(after + 100 * US, 10 * US, "aten::add")
        recording.launched(after + 101 * US, after + 102 * US, 100 * US, "rest", 2, grid="[512, 1, 1]")
    else:
        recording.launched(3 * US, after, 100 * US, "rest", 2, grid="[512, 1, 1]")
        recording.launch(6 * US, after + 100 * US, 3, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


FIRES: Cases = {
    "few blocks": one_kernel,
    "written otherwise": lambda: one_kernel("2,5,1"),
    "the table knows the device": lambda: one_kernel(units=None, name="NVIDIA A100-SXM4-80GB"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "blocks enough": lambda: one_kernel("[50, 1, 1]"),
    "no grid": lambda: one_kernel(None),
    "damaged grid": lambda: one_kernel("[x, 1]"),
    "unknown device": lambda: one_kernel(units=None),
    "short": lambda: one_kernel(duration_ns=9 * US),
    "the host is late": lambda: one_kernel(late=True),
}


def test_half_of_what_an_even_spread_saves() -> None:
    finding = the_finding(rule, one_kernel())

    assert (finding.saving_ns_per_step, finding.confidence) == (180 * US, "low")  # half of 400 us - 10 % of them
    assert finding.saving_from == "replayed"
    assert finding.title == "a kernel that takes 40% of the step keeps 10 of the device's 100 multiprocessors busy"
    assert figures_of(finding) == [
        ("share of the step that kernels of one name lose", pytest.approx(0.18), "share", 0.03),
        ("thread blocks", 10, "count", 50.0),
        ("multiprocessors", 100, "count", None),
        ("share of the step in these kernels", pytest.approx(0.4), "share", None),
        ("such kernels per step", 1.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert [(interval.start_ns, interval.duration_ns) for interval in finding.evidence.intervals] == [
        (2 * US, 400 * US)
    ]
    assert "batch" in finding.remedy.text


def test_the_thresholds_decide() -> None:
    assert asked(rule, one_kernel(), share=0.19).findings == ()
    assert asked(rule, one_kernel(), filled=0.1).findings == ()
    assert asked(rule, one_kernel(), shortest_ns=401 * US).findings == ()
    assert the_finding(rule, one_kernel(), gained=1.0).saving_ns_per_step == 360 * US
