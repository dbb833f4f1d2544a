"""Devices by the names that users type."""

from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import named_device


@pytest.mark.parametrize(
    ("typed", "row"),
    [
        ("H100-SXM", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("l4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("v100s pcie", "V100S-PCIe"),
        ("V100S", "V100S-PCIe"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("A100-40", "A100-SXM4-40GB"),
        ("A100-40GB", "A100-SXM4-40GB"),
        ("a100-pcie-40", "A100-PCIe-40GB"),
        ("A100 80GB PCIe", "A100-PCIe-80GB"),
        ("V100-PCIe 32GB", "V100-PCIe-32GB"),
        ("Gaudi 3", "Gaudi3"),
        ("tpu-v5e", "TPU v5e"),
        ("trillium", "TPU v6e"),
        ("B200", "B200-SXM"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("L40", "L40"),
        ("MI250", "MI250 (one of two dies)"),
        ("Instinct MI300X", "MI300X"),
        ("RTX-4090", "RTX 4090"),
    ],
)
def test_names(typed: str, row: str) -> None:
    assert named_device(typed).name == row


@pytest.mark.parametrize(
    ("typed", "rows"),
    [
        ("A100-SXM", "A100-SXM4-40GB, A100-SXM4-80GB"),
        ("A100 80GB", "A100-PCIe-80GB, A100-SXM4-80GB"),
        ("V100-PCIe", "V100-PCIe-16GB, V100-PCIe-32GB"),
        ("H100", "H100-SXM, H100-PCIe, H100-NVL"),
        ("P100", "P100-PCIe-16GB, P100-SXM2"),
        ("TPU", "TPU v4, TPU v5e, TPU v5p, TPU v6e"),
    ],
)
def test_a_name_of_several_names_them(typed: str, rows: str) -> None:
    with pytest.raises(UsageError) as raised:
        named_device(typed)
    assert str(raised.value) == f"{typed!r} could be several devices: {rows}"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "the device's name is empty (stepscope devices lists the names)"),
        ("???", "the device's name is empty (stepscope devices lists the names)"),
        (
            "H10O-SXM",
            "'H10O-SXM' is not in the table of devices; did you mean H100-SXM, H200-SXM or P100-SXM2? "
            "(stepscope devices lists them)",
        ),
        ("toaster", "'toaster' is not in the table of devices (stepscope devices lists them)"),
    ],
)
def test_a_name_of_none_is_refused(typed: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        named_device(typed)
    assert str(raised.value) == message


def test_many_candidates_are_cut() -> None:
    with pytest.raises(UsageError, match=r"could be several devices: (\S+( \S+)*?, ){7}[^,]+ and \d+ more$"):
        named_device("0")
