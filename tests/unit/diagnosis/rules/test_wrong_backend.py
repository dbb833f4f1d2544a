"""wrong-backend: devices exchange data through the host."""

from __future__ import annotations

from stepscope.diagnosis.rules.wrong_backend import RULE as rule
from stepscope.trace import Metadata, Trace
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


def exchanging(
    backend: str | None = "gloo", *, length_us: int = 400, elements: int = 250_000, device: bool = True
) -> Trace:
    """In a step of 1,000 us the host reduces a device's gradients, which it copies first; then it waits."""
    recording = Recording(metadata=Metadata(backend=backend))
    recording.step(0, 1000 * US, 1)
    if device:
        recording.launched(5 * US, 10 * US, 190 * US, "gemm", 101)
    recording.operator(150 * US, length_us * US, "c10d::allreduce_", input_shapes=f"[[[{elements}]]]", **LINE)
    if device:
        recording.launched(210 * US, 220 * US, 80 * US, "Memcpy DtoH", 102, kind="copy_out")
        recording.operator(320 * US, (length_us - 200) * US, "gloo:all_reduce")
        recording.launched((160 + length_us) * US, (170 + length_us) * US, 200 * US, "optimizer", 103)
        recording.launch((180 + length_us) * US, 200 * US, 104, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def by_the_device() -> Trace:
    recording = Recording(metadata=Metadata(backend="nccl"))
    recording.step(0, 1000, 1)
    recording.operator(150, 400, "c10d::allreduce_")
    recording.launched(160, 170, 600, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 101, kind="communication")
    return recording.trace()


FIRES: Cases = {"gloo": exchanging, "by its operators alone": lambda: exchanging(None)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "without a device": lambda: exchanging(device=False),
    "the device's own": by_the_device,
    "much, which its own would take too": lambda: exchanging(elements=2_500_000_000),
}


def test_what_the_devices_own_backend_would_take_is_taken_off() -> None:
    finding = the_finding(rule, exchanging())

    # The copy takes 80 us after 20 idle ones; from 320 on the device waits for the ranks until gloo ends at 520; 1 MB
    # takes 100 us at 10 GB/s.
    assert figures_of(finding)[0][1] == (80 + 20 + 200 - 100) / 1000
    # The optimizer comes 100 us, and two pauses of the queue, after the product instead of 370.
    assert (finding.saving_ns_per_step, finding.saving_from) == ((370 - 102) * US, "replayed")
    assert places_of(finding) == [("train.py", 20, "step")]
    assert figures_of(finding)[2:4] == [
        ("collectives on the host per step", 1.0, "count", None),
        ("bytes per step", 1_000_000, "bytes", None),
    ]
    assert '"nccl"' in finding.remedy.code


def test_the_thresholds_decide() -> None:
    assert asked(rule, exchanging(), share=0.21).findings == ()
    assert the_finding(rule, exchanging(), bytes_per_second=20e9).saving_ns_per_step == (370 - 52) * US
