"""inefficient-kernel: kernels run far below what the device allows."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.inefficient_kernel import RULE as rule
from stepscope.diagnosis.view import View
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

A100 = Device("0", "NVIDIA A100-SXM4-80GB", multiprocessors=108)  # 312 TFLOP/s bf16, 2039 GB/s; measured 271.2 TFLOP/s
HALF = '["c10::BFloat16", "c10::BFloat16"]'
LARGE = "[[4096, 4096], [4096, 4096]]"  # 440,509 ns at the peak
MS = 1_000_000


def one_operator(
    name: str = "aten::mm",
    shapes: str | None = LARGE,
    types: str = HALF,
    device_ns: int = 4 * MS,
    grid: str | None = "[512, 1, 1]",
    device: Device | None = A100,
    late: bool = False,
) -> Trace:
    """A step of 10 ms whose device runs one operator and then other work, for which the host waits.

    `late`: the host comes 1 ms after the first.
    """
    recording = Recording(Metadata(devices=(device,) if device else ()))
    recording.step(0, 10 * MS, 1)
    recording.frame(0, 10 * MS, "train.py(12): step")
    recording.operator(1_000, 1_000, name, input_shapes=shapes, input_types=types)
    recording.launched(1_100, 2_000, device_ns, "kernel", 1, grid=grid)
    after = 2_000 + device_ns
    recording.operator(after + MS if late else 3_000, 1_000, "mine::rest")
    recording.launched(after + MS + 100 if late else 3_100, after + MS + 200 if late else after, MS, "rest", 2)
    if not late:
        recording.launch(5_000, after + MS, 3, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def written_out_attention() -> Trace:
    """Two matrix products around a softmax, each of which takes 2 ms of a step of 10 ms."""
    recording = Recording(Metadata(devices=(A100,)))
    recording.step(0, 10 * MS, 1)
    calls = (
        ("aten::bmm", "[[16, 4096, 64], [16, 64, 4096]]", HALF),
        ("aten::_softmax", "[[16, 4096, 4096], [], []]", '["c10::BFloat16", "Scalar", "Scalar"]'),
        ("aten::bmm", "[[16, 4096, 4096], [16, 4096, 64]]", HALF),
    )
    for number, (name, shapes, types) in enumerate(calls):
        start = 1_000 + 2_000 * number
        recording.operator(start, 1_000, name, input_shapes=shapes, input_types=types)
        recording.launched(start + 100, 10_000 + 2 * MS * number, 2 * MS, f"kernel{number}", number)
    return recording.trace()


EXPERTS = "[[{tokens}, 4096], [64, 2048, 4096], [64, 4096, 1024], [{tokens}, {chosen}]]"
EXPERT_TYPES = '["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "float"]'

FIRES: Cases = {
    "matrix product": one_operator,
    "tall and skinny": lambda: one_operator(shapes="[[2000000, 32], [32, 32]]"),
    "few rows": lambda: one_operator(shapes="[[8, 16384], [16384, 16384]]"),
    "small products": lambda: one_operator("aten::bmm", "[[100000, 8, 64], [100000, 64, 8]]"),
    "experts with few tokens": lambda: one_operator(
        "vllm::fused_experts", EXPERTS.format(tokens=16, chosen=2), EXPERT_TYPES
    ),
    "one expert a token": lambda: one_operator(
        "vllm::fused_experts", EXPERTS.format(tokens=4096, chosen=1), EXPERT_TYPES
    ),
    "large capacity": lambda: one_operator(
        "vllm::fused_experts", EXPERTS.format(tokens=16384, chosen=4), EXPERT_TYPES, 60 * MS
    ),
    "softmax": lambda: one_operator(
        "aten::_softmax", "[[16, 4096, 4096], [], []]", '["float", "Scalar", "Scalar"]', 6 * MS
    ),
    "no grid": lambda: one_operator(grid=None),
    "few blocks": lambda: one_operator(grid="[16, 1, 1]"),
    "attention's scores": lambda: one_operator("aten::bmm", "[[16, 4096, 64], [16, 64, 4096]]"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "efficient": lambda: one_operator(device_ns=700_000),
    "element-wise and efficient": lambda: one_operator("aten::add", "[[16384, 32768], [16384, 32768]]", HALF, 2 * MS),
    "unknown device": lambda: one_operator(device=Device("0", "Simulated Device 80GB")),
    "no shapes": lambda: one_operator(shapes=None),
    "unknown operator": lambda: one_operator("mine::mm"),
    "the host is late": lambda: one_operator(late=True),
    "unfused-attention tells": written_out_attention,
    "too fast to be true": lambda: one_operator(device_ns=350_000),
}


def test_the_time_above_what_good_kernels_take_is_saved() -> None:
    finding = the_finding(rule, one_operator())

    # 440,509 ns at the peak, of which 80 % of 271.2 / 312 is attainable: 633,476 ns of 4,000,000.
    assert (finding.saving_ns_per_step, finding.saving_from) == (3_366_524, "replayed")
    assert finding.confidence == "medium"
    assert finding.title == (
        "the matrix product mm of 4096x4096 and 4096x4096 reaches 11% of the device's arithmetic peak and takes 40% "
        "of the step; nothing in its sizes explains it: the kernel itself is slow"
    )
    assert finding.saving_basis == (
        "time above what good kernels take (70% of the arithmetic peak), where the device determines the step's length"
    )
    assert figures_of(finding) == [
        ("time over the attainable time", pytest.approx(6.314367), "count", 1.5),
        ("share of the arithmetic peak", pytest.approx(0.1101274), "share", None),
        ("share of the step that an operator of one shape loses", pytest.approx(0.3366523), "share", 0.03),
        ("share of the arithmetic peak that good kernels reach", pytest.approx(0.6953846), "share", None),
        ("share of the memory bandwidth", pytest.approx(0.01234224), "share", None),
        ("TFLOP/s reached", pytest.approx(34.3597384), "", None),
        ("time on the device per step", 4 * MS, "ns", None),
        ("calls per step", 1.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert "max-autotune" in finding.remedy.code


def test_memory_limits_a_softmax() -> None:
    finding = the_finding(rule, FIRES["softmax"]())

    # 2 * 16 * 4096 * 4096 * 4 bytes at 70 % of 2039 GB/s: 1,504,578 ns of 6,000,000.
    assert finding.saving_ns_per_step == 4_495_422
    assert finding.title.startswith("the softmax _softmax of 16x4096x4096 reaches 18% of the device's memory bandwidth")
    assert "contiguous" in finding.remedy.code


@pytest.mark.parametrize(
    ("name", "width", "kind", "padded"),
    [
        ("aten::_softmax", 3137, "c10::Half", 3144),
        ("aten::native_layer_norm", 1001, "c10::BFloat16", 1008),
        ("aten::_softmax", 3136, "c10::Half", None),
        ("aten::_softmax", 3137, "float", None),
    ],
)
def test_16_bit_rows_that_do_not_fit_are_padded(name: str, width: int, kind: str, padded: int | None) -> None:
    shapes, types = f"[[20000, {width}], [], []]", f'["{kind}", "Scalar", "Scalar"]'
    finding = the_finding(rule, one_operator(name, shapes, types))

    lengths = [value for title, value, *_ in figures_of(finding) if "length" in title]
    assert lengths == ([] if padded is None else [width, padded])
    assert (str(padded - width if padded and "softmax" in name else padded) in finding.remedy.code) == bool(padded)


def test_the_thresholds_decide() -> None:
    assert asked(rule, one_operator(), slower=7).findings == ()
    assert asked(rule, one_operator(), share=0.34).findings == ()
    assert asked(rule, one_operator(), shortest_ns=5 * MS).findings == ()
    assert the_finding(rule, one_operator(), arithmetic=0.4).saving_ns_per_step == 2_733_048


def test_open_questions() -> None:
    [shapes] = asked(rule, one_operator(shapes=None)).not_answered
    assert shapes.why == "the trace holds no shapes"
    [unknown] = asked(rule, one_operator(device=Device("0", "Simulated Device 80GB"))).not_answered
    assert unknown.why == "Simulated Device 80GB is not in the table of peaks"
    [nameless] = asked(rule, one_operator(device=None)).not_answered
    assert nameless.why == "the trace names no device, so no peak is known"
    [wrong] = asked(rule, one_operator(device_ns=350_000)).not_answered
    assert wrong.why.startswith("it ran at 126% of the peak: ")
    assert asked(rule, one_operator("mine::mm")).not_answered == ()
    assert asked(rule, one_operator(shapes=None, device_ns=2 * MS)).not_answered == ()


def test_products_that_a_device_repeats_long_after_their_calls_are_judged() -> None:
    recording = Recording(unit_ns=US)
    for number in range(12):
        recording.operator(
            5 * number, 4, "aten::mm", input_shapes="[[64, 64], [64, 64]]", input_types='["float", "float"]'
        )
        recording.launched(5 * number + 1, 100 + 1000 * number, 990, "ampere_sgemm_128x64_nn", 2 * number + 1)
        recording.launched(5 * number + 2, 1095 + 1000 * number, 4, "splitKreduce_kernel", 2 * number + 2)
    trace = recording.trace()

    assert View(trace).is_on_device
    result = asked(rule, trace)
    assert [each.question for each in result.not_answered] == ["Which device is this?"]
    assert "at most 0.016% of the device's memory bandwidth" in result.findings[0].title


def test_without_a_name_the_least_peaks_of_what_the_device_can_be_are_upper_bounds() -> None:
    recording = Recording()
    recording.operator(1_000, 1_000, "aten::mm", input_shapes=LARGE, input_types=HALF)
    recording.launched(1_100, 2_000, 4 * MS, "Cijk_Ailk_MT128x128x32_ISA942", 1)
    result = asked(rule, recording.trace())

    [finding] = result.findings
    assert "reaches at most 3% of the device's arithmetic peak" in finding.title
    assert finding.confidence == "medium"  # upper bounds of shares make the saving a lower bound
    [question] = result.not_answered
    assert "MI300X or MI325X" in question.why


def test_few_blocks_are_spread_and_nothing_more() -> None:
    finding = the_finding(rule, one_operator(grid="[54, 1, 1]"))

    assert "few tiles: 54 blocks for 108 multiprocessors" in finding.title
    assert finding.saving_ns_per_step == 2 * MS
    assert "tunable" in finding.remedy.code


def test_nothing_is_said_of_kernels_close_to_what_the_device_can_do() -> None:
    near = one_operator(device_ns=633_476)  # 80 % of the best product measured

    assert asked(rule, near, slower=0.5, arithmetic=1.0).findings == ()
