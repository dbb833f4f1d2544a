"""The same operations on other numbers."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import named_device
from stepscope.predict.operations import (
    NO_TF32,
    Operations,
    Tf32,
    changes_traffic,
    in_precision,
    is_low,
    tf32_of,
    types_on,
)
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts


def operations(*rows: tuple[str, str, str]) -> Operations:
    """Name, kind and number type of each; 1000 operations for products, 800 bytes."""
    names, kinds, types = (np.array(column, np.str_) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows))
    flops = np.where(np.isin(kinds, ("matrix", "convolution", "attention")), 1000.0, 0.0)
    return Operations(names, kinds, types, flops, 800 * ones, ones, ones, ones, ones, ones < 0)


WIDE = operations(
    ("mm", "matrix", "fp32"),
    ("bmm", "matrix", "fp32"),
    ("conv2d", "convolution", "tf32"),
    ("gelu", "elementwise", "fp32"),
    ("pow", "elementwise", "fp32"),
    ("_softmax", "softmax", "fp32"),
    ("native_layer_norm", "normalisation", "fp32"),
    ("native_batch_norm", "normalisation", "fp32"),
    ("_foreach_add", "optimizer", "fp32"),
    ("embedding", "embedding", "fp32"),
    ("add", "elementwise", "fp64"),
    ("add", "elementwise", ""),
    ("unknown", "", ""),
)
LOW = operations(("mm", "matrix", "bf16"), ("gelu", "elementwise", "bf16"), ("add", "elementwise", "fp32"))


def test_without_a_wish_nothing_changes() -> None:
    cast = in_precision(WIDE, None)

    assert cast.operations is cast.least is cast.most is WIDE
    assert not cast.changed.any()


def test_bf16_as_autocast_would() -> None:
    cast = in_precision(WIDE, "bf16")

    assert cast.operations.number_type.tolist() == [
        "bf16", "bf16", "bf16", "bf16", "fp32", "fp32", "fp32", "bf16", "fp32", "fp32", "fp64", "", "",
    ]  # fmt: skip
    assert cast.operations.bytes.tolist() == [400, 400, 400, 400, 800, 800, 800, 400, 800, 800, 800, 800, 800]
    assert cast.least.bytes.tolist() == cast.operations.bytes.tolist()
    # What runs in its inputs' type may stay in 32 bits.
    assert cast.most.bytes.tolist() == [400, 400, 400, 800, 800, 800, 800, 800, 800, 800, 800, 800, 800]
    assert cast.changed.tolist() == [True] * 4 + [False] * 3 + [True] + [False] * 5


def test_fp8_is_for_products_with_weights() -> None:
    cast = in_precision(WIDE, "fp8")

    assert cast.operations.number_type.tolist()[:4] == ["fp8", "bf16", "bf16", "bf16"]
    assert cast.operations.bytes.tolist()[:4] == [300, 400, 400, 400]


def test_tf32_changes_products_alone() -> None:
    cast = in_precision(WIDE, "tf32")

    assert cast.operations.number_type.tolist()[:4] == ["tf32", "tf32", "tf32", "fp32"]
    assert cast.operations.bytes.tolist() == [800] * 13


def test_fp32_undoes_tf32() -> None:
    assert in_precision(WIDE, "fp32").operations.number_type.tolist()[2] == "fp32"


def test_a_recording_in_16_bits_stays_as_it_is() -> None:
    for precision in ("bf16", "tf32"):
        cast = in_precision(LOW, precision)
        assert not cast.changed.any()
        assert cast.operations.bytes.tolist() == [800, 800, 800]


def test_one_16_bit_type_for_another() -> None:
    assert in_precision(LOW, "fp16").operations.number_type.tolist() == ["fp16", "bf16", "fp32"]


def test_16_bits_widened() -> None:
    cast = in_precision(LOW, "fp32")

    assert cast.operations.number_type.tolist() == ["fp32", "fp32", "fp32"]
    assert cast.operations.bytes.tolist() == [1600, 1600, 800]
    assert cast.least.bytes.tolist() == [1600, 800, 800]


def test_what_is_told_to_stay_stays() -> None:
    stays = np.zeros(len(WIDE), np.bool_)
    stays[3] = True

    assert in_precision(WIDE, "bf16", stays=stays).operations.bytes.tolist()[3] == 800


def test_an_unknown_type() -> None:
    with pytest.raises(UsageError, match="'int4' is not a number type to predict: fp32, tf32, fp16, bf16, fp8"):
        in_precision(WIDE, "int4")


def test_most_of_the_arithmetic_decides() -> None:
    assert is_low(WIDE) is False
    assert is_low(LOW) is True
    assert is_low(operations(("add", "elementwise", "bf16"))) is None


def test_whose_traffic_changes() -> None:
    assert [changes_traffic(one, is_low=False) for one in ("fp32", "tf32", "bf16")] == [False, False, True]
    assert [changes_traffic(one, is_low=True) for one in ("fp32", "tf32", "bf16")] == [True, False, False]


def test_tf32_on_devices_with_and_without_it() -> None:
    assert types_on(WIDE, named_device("T4")).number_type.tolist()[:4] == ["fp32"] * 4
    assert types_on(WIDE, named_device("L4")).number_type.tolist()[:4] == ["fp32", "fp32", "tf32", "fp32"]
    both = types_on(operations(("mm", "matrix", "fp32"), ("conv2d", "convolution", "fp32")), named_device("L4"), Tf32())
    assert both.number_type.tolist() == ["fp32", "tf32"]
    assert types_on(WIDE, named_device("MI300X"), Tf32(products=True)).number_type.tolist()[:2] == ["fp32", "fp32"]


def test_what_the_program_allows() -> None:
    def of(**settings: object) -> Tf32:
        return tf32_of(Trace.from_tables({}, Metadata(program=ProgramFacts(torch=settings))))

    assert tf32_of(Trace.from_tables({})) == Tf32(products=False, convolutions=True)
    assert of(float32_matmul_precision="high") == Tf32(products=True, convolutions=True)
    assert of(cudnn_allow_tf32=False) == NO_TF32
