"""data-parallel: one process drives several devices with DataParallel."""

from __future__ import annotations

from stepscope.diagnosis.rules.data_parallel import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    the_finding,
)
from tests.unit.recording import Recording
from tests.unit.shaped import LINE


def replicating(copy_us: int = 100, *, model: str = "Broadcast") -> Trace:
    """A step of 1,000 us on two devices: the model is copied, results are collected and waited for."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.operator(5, 30, model, **LINE)
    recording.launched(10, 20, copy_us, "ncclDevKernel_Broadcast", 101, kind="communication")
    recording.operator(50, 10, "aten::mm")
    recording.launched(52, 20 + copy_us, 400, "gemm", 102)
    recording.launched(54, 64, 300, "gemm", 103, device="1")
    recording.operator(70, 20, "Gather", **LINE)
    recording.launched(75, 420 + copy_us, 50, "Memcpy PtoP", 104, kind="copy_on_device")
    recording.launch(100, 380 + copy_us, 105, kind="synchronise", name="cudaDeviceSynchronize")
    return recording.trace()


FIRES: Cases = {"two devices": replicating}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "no model is copied": lambda: replicating(model="c10d::broadcast_"),
}


def test_copying_and_collecting_is_saved() -> None:
    finding = the_finding(rule, replicating())

    # Without the 100 and 50 us, but the product on the busiest device, which began when the model was copied at 120 us,
    # then begins 10 us after its launch, which comes 30 us earlier at 22 us.
    assert finding.saving_ns_per_step == (120 - 32 + 50) * US
    assert "to 2 devices" in finding.title
    assert "17%" in finding.title
    assert figures_of(finding) == [
        ("share of the step that copying and collecting costs", 0.17, "share", 0.02),
        ("devices", 2, "count", None),
        ("copies and collections per step", 2.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "torchrun --nproc-per-node=2" in finding.remedy.code


def test_the_threshold_decides() -> None:
    assert asked(rule, replicating(), share=0.18).findings == ()
