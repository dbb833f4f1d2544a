"""Devices by the names that users type."""

from __future__ import annotations

import pytest

from stepscope.devices import named_device
from stepscope.errors import UsageError


@pytest.mark.parametrize(
    ("typed", "row"),
    [
        ("H100-SXM", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("l4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("v100s pcie", "V100S-PCIe"),
    ],
)
def test_names(typed: str, row: str) -> None:
    assert named_device(typed).name == row


def test_a_name_of_several_names_them() -> None:
    with pytest.raises(UsageError, match="'H100' could be several devices: H100-SXM, H100-PCIe"):
        named_device("H100")


def test_a_name_of_none_is_refused() -> None:
    with pytest.raises(UsageError, match="'' is no device that the table knows: P4, "):
        named_device("")
