"""unaligned-dimensions: matrix dimensions do not fit the tensor cores."""

from __future__ import annotations

import json

from stepscope.diagnosis.rules.unaligned_dimensions import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
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


def multiplying(odd: int = 50_257, *, kind: str = "c10::Half", peers: bool = True, device: bool = True) -> Trace:
    """A product of 64 by 64 with 64 by `odd` in 400 us, and another that is four times as fast for its size.

    The step of 1,000 us waits at its end for the device.
    """
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    _product(recording, 10, odd, 400, kind, 101 if device else None)
    if peers:
        _product(recording, 40, 50_264, 100, kind, 102 if device else None)
    if device:
        recording.launch(60 * US, 900 * US, 103, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def _product(recording: Recording, at: int, columns: int, length: int, kind: str, correlation: int | None) -> None:
    """Called at a microsecond; the device begins at ten times as many."""
    more = {"input_shapes": f"[[64, 64], [64, {columns}]]", "input_types": json.dumps([kind, kind])}
    recording.operator(at * US, 20 * US, "aten::mm", **more, **LINE)
    if correlation:
        recording.launched((at + 5) * US, 10 * at * US, length * US, "ampere_fp16_gemm_align1", correlation)


FIRES: Cases = {"a vocabulary": multiplying, "without others": lambda: multiplying(peers=False)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a multiple of 8": lambda: multiplying(50_264),
    "float32": lambda: multiplying(kind="float"),
    "on the host": lambda: multiplying(device=False),
    "close to what the device can do": lambda: near_the_peak(),
}


def near_the_peak() -> Trace:
    """A product of 8,191 columns that takes 1.3 times as long as an A100 needs at its peak."""
    recording = Recording(Metadata(devices=(Device("0", "NVIDIA A100-SXM4-80GB"),)))
    shapes, types = "[[8192, 8192], [8192, 8191]]", '["c10::Half", "c10::Half"]'
    recording.operator(10 * US, 20 * US, "aten::mm", input_shapes=shapes, input_types=types)
    recording.launched(15 * US, 100 * US, 4_580 * US, "ampere_fp16_gemm_align1", 101)
    return recording.trace()


def test_as_fast_as_the_others_but_at_most_twice() -> None:
    finding = the_finding(rule, multiplying())

    assert (finding.saving_ns_per_step, finding.confidence) == (200 * US, "medium")
    assert finding.saving_from == "replayed"
    assert finding.title == "50,257, not a multiple of 8, slows down matrix products: 40% of the step"
    assert figures_of(finding) == [
        ("share of the step that padding the dimensions would save", 0.2, "share", 0.02),
        ("share of the step in such products", 0.4, "share", None),
        ("such products per step", 1.0, "count", None),
        ("dimension", 50_257, "count", 8),
        ("dimension rounded up to a multiple of 64", 50_304, "count", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "50304" in finding.remedy.code


def test_without_others_a_quarter_is_taken() -> None:
    finding = the_finding(rule, multiplying(peers=False))

    assert (finding.saving_ns_per_step, finding.confidence) == (100 * US, "low")


def test_the_thresholds_decide() -> None:
    assert asked(rule, multiplying(), share=0.21).findings == ()
    assert len(asked(rule, multiplying(50_264), multiple=64).findings) == 1
