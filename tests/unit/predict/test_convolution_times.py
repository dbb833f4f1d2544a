"""Times of convolutions: the roofline over the learned utilization, and what is outside of the timings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripts.predictor.model_arrays import arrays_of
from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_times import matrix_times
from stepscope.predict.operation_times import ConvolutionModel, convolution_times, shipped_convolution_model
from stepscope.predict.operations import Operations

DEVICE = DevicePeaks(
    name="sixteen teraflops",
    matches="-",
    capability="7.0",
    multiprocessors=80,
    clock_mhz=1500,
    memory_bytes=None,
    bandwidth_bytes_s=1_000_000_000_000,
    cache_bytes=6 * 2**20,
    flops_s={"fp32": 16e12, "fp16": 100e12},
    vendor="NVIDIA",
    architecture="Volta",
    sustained_flops_s={"fp32": 16e12},
)
TWICE = ConvolutionModel(
    trees=BoostedTrees(
        baseline=float(np.log(2)),
        roots=np.empty(0, np.int32),
        features=np.empty(0, np.int16),
        thresholds=np.empty(0),
        left=np.empty(0, np.int32),
        values=np.empty(0),
        depth=0,
        width=9,
    ),
    lowest=np.full(9, -100.0),
    highest=np.full(9, 100.0),
    band=np.array([0.5, 2.0]),
)
"""Everything takes twice its roofline."""


def convolution(
    batch: int, size: int, read: int, written: int, *, number_type: str = "fp32", gradients: int = 0
) -> Operations:
    """3 x 3 weights, of a padded image: forward, or so many gradients."""
    rows, inner, products = batch * size * size, 9 * read, max(gradients, 1)
    return Operations(
        name=np.array(["convolution_backward" if gradients else "convolution"]),
        kind=np.array(["convolution"]),
        number_type=np.array([number_type]),
        flops=np.array([2.0 * rows * inner * written * products]),
        bytes=np.array([4.0 * (rows * read + inner * written + rows * written) * products]),
        batch=np.array([float(products)]),
        rows=np.array([float(rows)]),
        columns=np.array([float(written)]),
        inner=np.array([float(inner)]),
        is_backward=np.array([gradients > 0]),
    )


def test_no_convolutions_take_no_time() -> None:
    nothing = convolution(1, 8, 64, 64).select(np.array([], np.int64))

    assert convolution_times(nothing, DEVICE, TWICE).ns.tolist() == []


def test_a_convolution_takes_its_arithmetic_over_the_learned_utilization() -> None:
    times = convolution_times(convolution(32, 56, 64, 64), DEVICE, TWICE)

    assert times.ns.tolist() == pytest.approx([2 * 2 * 32 * 56**2 * 576 * 64 / 16e12 * 1e9])
    assert times.low_ns.tolist() == pytest.approx([0.4 * times.ns[0]])
    assert times.high_ns.tolist() == pytest.approx([2.0 * times.ns[0]])
    assert times.basis.tolist() == ["learned"]


def test_two_gradients_take_twice_as_long_in_a_wider_band() -> None:
    forward = convolution_times(convolution(32, 56, 64, 64), DEVICE, TWICE)
    backward = convolution_times(convolution(32, 56, 64, 64, gradients=2), DEVICE, TWICE)

    assert backward.ns[0] == pytest.approx(2 * forward.ns[0])
    assert backward.high_ns[0] == pytest.approx(3.0 * backward.ns[0])


def test_outside_of_the_timings_the_band_is_wider() -> None:
    narrow = replace(TWICE, highest=np.full(9, 5.0))

    assert convolution_times(convolution(32, 56, 64, 64), DEVICE, narrow).high_ns[0] == pytest.approx(
        3.0 * convolution_times(convolution(32, 56, 64, 64), DEVICE, narrow).ns[0]
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(convolution(32, 56, 64, 64), inner=np.array([64.0])),
        replace(convolution(32, 56, 64, 64), bytes=4 * convolution(32, 56, 64, 64).bytes),
    ],
    ids=["1 x 1", "every other point"],
)
def test_what_was_not_timed_is_the_product_that_it_is_alike_in_a_wider_band(other: Operations) -> None:
    times, product = convolution_times(other, DEVICE, TWICE), matrix_times(as_product(other), DEVICE)

    assert times.ns.tolist() == pytest.approx((product.ns * 12.25).tolist())
    assert times.high_ns.tolist() == pytest.approx((1.5 * product.high_ns * 12.25).tolist())


def test_in_16_bits_a_convolution_lays_tensors_out_before_its_product_in_the_widest_band() -> None:
    other = convolution(32, 56, 64, 64, number_type="fp16")
    times = convolution_times(other, DEVICE, TWICE)
    product = 12.25 * matrix_times(as_product(other), DEVICE).ns

    assert 0.5 * product[0] < times.ns[0] < 2 * product[0] + 100_000
    assert times.high_ns[0] / times.low_ns[0] >= 25
    assert times.basis.tolist() == ["roofline"]


def test_few_channels_in_16_bits_are_padded_to_whole_16_bytes() -> None:
    """An image's three channels count as eight, and run far below what larger layers reach."""
    image = replace(convolution(32, 56, 8, 64, number_type="fp16"))
    few = replace(image, flops=image.flops * 3 / 8)

    assert convolution_times(few, DEVICE, TWICE).ns[0] > 2 * convolution_times(image, DEVICE, TWICE).ns[0]


def as_product(convolution: Operations) -> Operations:
    """A 12.25th of the rows of 32 x 56 x 56 points, which the timings of products do not exceed, the input unfolded."""
    rows, inner, columns = convolution.rows / 12.25, convolution.inner, convolution.columns
    size = 2 if convolution.number_type[0] == "fp16" else 4
    return replace(
        convolution,
        rows=rows,
        flops=convolution.flops / 12.25,
        bytes=size * (rows * inner + inner * columns + rows * columns),
    )


def test_without_a_peak_nothing_is_known() -> None:
    times = convolution_times(convolution(32, 56, 64, 64, number_type="bf16"), DEVICE, TWICE)

    assert np.isnan(times.ns[0])
    assert times.basis.tolist() == ["unknown"]


def test_a_device_of_another_maker_has_the_roofline() -> None:
    times = convolution_times(convolution(32, 56, 64, 64), named_device("MI300X"), TWICE)

    assert times.basis.tolist() == ["roofline"]


def test_the_model_is_the_same_after_it_was_kept() -> None:
    again = ConvolutionModel.from_arrays(arrays_of(TWICE))

    assert again.band.tolist() == [0.5, 2.0]
    assert again.lowest.tolist() == TWICE.lowest.tolist()
    assert again.trees.baseline == TWICE.trees.baseline


def test_the_shipped_model_says_what_a_v100_took() -> None:
    """3 x 3 weights over 64 channels of 32 x 56 x 56 points took 352 us in a public trace (v100_resnet50)."""
    times = convolution_times(convolution(32, 56, 64, 64), named_device("V100-SXM2-32GB"), shipped_convolution_model())

    assert times.low_ns[0] < 352_000 < times.high_ns[0]
