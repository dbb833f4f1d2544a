"""kernel-variance: the same kernel takes very different times."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.kernel_variance import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

US = 1_000


def repeated(
    durations_us: tuple[int, ...] = (10,) * 10 + (200, 300),
    grids: int = 1,
    shapes: int = 1,
    kind: str = "compute",
    call: str = "launch",
) -> Trace:
    """One kernel again and again in a step of 1000 us, launched ahead, and another; the step's end waits for them."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    start = 100 * US
    for number, duration_us in enumerate(durations_us):
        known = {"input_shapes": f"[[{number % shapes}]]"} if shapes else {}
        recording.operator(number * US, 900, "aten::mm", **known)
        recording.launch(number * US + 100, 2, number, kind=call)
        recording.work(start, duration_us * US, "gemm", number, grid=f"[{number % grids}, 1, 1]", kind=kind)
        start += duration_us * US
    recording.launched(90 * US, start, 1000 * US - start, "end", 100)
    recording.launch(95 * US, 905 * US, 101, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


FIRES: Cases = {
    "two of twelve": repeated,
    "one of many": lambda: repeated((10,) * 20 + (300,)),
    "in a graph": lambda: repeated(shapes=0, call="graph_launch"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "even": lambda: repeated((40,) * 12),
    "few calls": lambda: repeated((10,) * 8 + (200, 300)),
    "other grids": lambda: repeated(grids=12),
    "other shapes": lambda: repeated(shapes=12),
    "unknown shapes": lambda: repeated(shapes=0),
    "communication waits": lambda: repeated(kind="communication"),
    "little": lambda: repeated((1,) * 10 + (10, 15)),
}


def test_what_is_above_the_median_is_saved() -> None:
    finding = the_finding(rule, repeated())

    assert (finding.saving_ns_per_step, finding.confidence) == (190 * US + 290 * US, "low")
    assert finding.saving_from == "replayed"
    assert finding.title == "a kernel that usually takes 10 us takes up to 300 us for the same work"
    assert figures_of(finding) == [
        ("standard deviation over mean", pytest.approx(1.8348479), "", 1.0),
        ("share of the step above the median", pytest.approx(0.48), "share", 0.02),
        ("median time", 10 * US, "ns", None),
        ("longest time", 300 * US, "ns", None),
        ("calls", 12, "count", 10),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert [interval.duration_ns for interval in finding.evidence.intervals] == [300 * US, 200 * US, 10 * US]


def test_the_thresholds_decide() -> None:
    assert asked(rule, repeated(), variation=1.9).findings == ()
    assert asked(rule, repeated(), calls=12).findings == ()
    assert asked(rule, repeated(), time=0.61).findings == ()
    assert asked(rule, repeated(), share=0.49).findings == ()
