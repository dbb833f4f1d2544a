"""layout-conversion: tensors are copied into another order of dimensions and back."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.layout_conversion import RULE as rule
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
from tests.unit.shaped import Shaped

FIRST, LAST = (2, 16, 8, 8), (2, 8, 8, 16)


def copied(step: Shaped, before: tuple[int, ...], after: tuple[int, ...], order: str | None, number: int) -> None:
    """A change of order that a copy of 2,000 ns makes real."""
    step.call("aten::permute", 10, before, (), number=number, values=["", order] if order else None)
    with step.inside("aten::contiguous", 2_000, after, number=number + 1):
        step.call("aten::copy_", 1_900, after, after)


def permuting(
    back: tuple[tuple[int, ...], tuple[int, ...]] | None = (LAST, FIRST),
    orders: tuple[str | None, str | None] = (None, None),
    *,
    backward: bool = False,
) -> Trace:
    """A copy into channels last and one back in a step of 100,000 ns."""
    step = Shaped()
    copied(step, FIRST, LAST, orders[0], 1)
    step.call("aten::relu", 300, LAST, number=5)
    if back:
        copied(step, *back, orders[1], 11)
    if backward:
        step.gradient("PermuteBackward0", 10, 11)
        step.gradient("ReluBackward0", 4_000, 5)
        step.gradient("PermuteBackward0", 10, 1)
        with step.inside("autograd::engine::evaluate_function: ConvolutionBackward0", 9_000, number=0, backward=True):
            step.call("aten::contiguous", 1_000, FIRST)
    return step.trace()


def kernels(name: str, length_us: int = 300) -> Trace:
    """A kernel and a matrix product in a step of 1000 us, whose end waits for the device."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.launched(5 * US, 10 * US, length_us * US, name, 101)
    recording.launched(15 * US, (10 + length_us) * US, 500 * US, "gemm", 102)
    recording.launch(20 * US, (490 + length_us) * US, 103, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


NCHW_TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, true, false, (cudnnKernelDataType_t)0>"

FIRES: Cases = {
    "there and back": permuting,
    "with their gradients": lambda: permuting(backward=True),
    "in a library": lambda: kernels(NCHW_TO_NHWC),
    "in another": lambda: kernels("batched_transpose_16x32_half"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "only there": lambda: permuting(back=None),
    "the same order in the next layer": lambda: permuting(back=(FIRST, LAST)),
    "square, and not back": lambda: permuting(
        back=((2, 8, 8, 16), (2, 16, 8, 8)), orders=("[0, 2, 3, 1]", "[0, 3, 2, 1]")
    ),
    "another kernel": lambda: kernels("void transpose_matrix<float>"),
    "little in a library": lambda: kernels(NCHW_TO_NHWC, 15),
}


def test_the_copies_are_saved() -> None:
    finding = the_finding(rule, permuting())

    assert (finding.saving_ns_per_step, finding.saving_from) == (2 * 2_000, "replayed")
    assert finding.title == "4% of the step goes to copies that only change the order of dimensions, 2 a step"
    assert figures_of(finding) == [
        ("share of the step that such copies cost", 0.04, "share", 0.02),
        ("copies that only change the order per step", 2.0, "count", None),
        ("copies there and back per step", 2.0, "count", None),
        ("copies of gradients per step", 0.0, "count", None),
        ("kernels that convert layouts per step", 0.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "transpose(1, 2)   # a view" in finding.remedy.code


def test_what_the_gradients_go_through_is_saved_too() -> None:
    # The walk through two orders takes 4,000 ns where twice the forward operator's 300 would do; the other is copied.
    finding = the_finding(rule, permuting(backward=True))

    assert finding.saving_ns_per_step == 2 * 2_000 + (4_000 - 2 * 300) + 1_000
    assert figures_of(finding)[3] == ("copies of gradients per step", 1.0, "count", None)


@pytest.mark.parametrize(("order", "findings"), [("[0, 3, 1, 2]", 1), ("[0, 2, 3, 1]", 0)])
def test_the_recorded_order_decides_where_shapes_do_not(order: str, findings: int) -> None:
    step = Shaped()
    copied(step, (2, 8, 8, 8), (2, 8, 8, 8), "[0, 2, 3, 1]", 1)
    copied(step, (2, 8, 8, 8), (2, 8, 8, 8), order, 11)

    assert len(asked(rule, step.trace()).findings) == findings


def test_a_librarys_kernels_are_saved() -> None:
    finding = the_finding(rule, kernels(NCHW_TO_NHWC))

    # The product is launched at 15 us and reaches the device 5 us later, instead of at 310; the call of 2 ns goes too.
    assert (finding.saving_ns_per_step, finding.saving_from) == (290 * US + 2, "replayed")
    assert places_of(finding) == [("train.py", 12, "step")]


def test_the_threshold_decides() -> None:
    assert len(asked(rule, permuting(), share=0.04).findings) == 1
    assert asked(rule, permuting(), share=0.041).findings == ()


def test_a_network_of_images_is_told_of_channels_last() -> None:
    step = Shaped()
    step.call("aten::conv2d", 5_000, FIRST)
    copied(step, FIRST, LAST, None, 1)
    copied(step, LAST, FIRST, None, 11)

    assert "channels_last" in the_finding(rule, step.trace()).remedy.code
