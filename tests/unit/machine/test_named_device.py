"""Devices by the names that users type: a whole name or a question, never a similar device."""

from __future__ import annotations

import pytest

from stepscope.commands import main
from stepscope.errors import UsageError
from stepscope.machine.devices import device_table, named_device


@pytest.mark.parametrize(
    ("typed", "row"),
    [
        ("H100-SXM", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("l4", "L4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("v100s pcie", "V100S-PCIe"),
        ("V100S", "V100S-PCIe"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("A100-40", "A100-SXM4-40GB"),
        ("A100-40GB", "A100-SXM4-40GB"),
        ("A100 80GB PCIe", "A100-PCIe-80GB"),
        ("V100-PCIe 32GB", "V100-PCIe-32GB"),
        ("Gaudi 3", "Gaudi3"),
        ("HL-325L", "Gaudi3"),
        ("tpu-v5e", "TPU v5e"),
        ("trillium", "TPU v6e"),
        ("Ironwood", "TPU7x (one of two chiplets)"),
        ("B200", "B200-SXM"),
        ("H20-96GB", "H20-96GB"),
        ("NVIDIA H20", "H20-96GB"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("L40", "L40"),
        ("MI250", "MI250 (one of two dies)"),
        ("Instinct MI300X", "MI300X"),
        ("RTX-4090", "RTX 4090"),
        ("Trn2", "Trainium2"),
        ("H100\u2011SXM", "H100-SXM"),  # a hyphen that does not break
        ("Ｌ４０Ｓ", "L40S"),
    ],
)
def test_names(typed: str, row: str) -> None:
    assert named_device(typed).name == row


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("H20", "H20-96GB, H20-141GB, H200-SXM"),
        ("H200", "H200-SXM, H200-NVL, GH200-96GB or GH200-144GB"),
        ("H100", "H100-SXM, H100-PCIe or H100-NVL"),
        ("H800", "H800-SXM"),
        ("RTX 4000", "RTX A4000"),
        ("RTX 6000", "RTX 6000 Ada, RTX A6000, RTX PRO 6000 Server or RTX PRO 6000 Workstation"),
        ("B2", "B200-SXM or GB200"),
        ("A100-SXM", "A100-SXM4-40GB or A100-SXM4-80GB"),
        ("A100 80GB", "A100-PCIe-80GB or A100-SXM4-80GB"),
        ("a100-pcie-40", "A100-PCIe-40GB"),
        ("MI300", "MI300X"),
        ("TPU", "TPU v4, TPU v5e, TPU v5p, TPU v6e or TPU7x (one of two chiplets)"),
        ("NVIDIA H200 SXM5", "H200-SXM"),
        ("A100-SXM4", "A100-SXM4-40GB or A100-SXM4-80GB"),  # a driver's name, too
        ("TPU v5", "TPU v5e or TPU v5p"),
        ("Ｈ100-SXM5", "H100-SXM"),
        ("H10O-SXM", "H100-SXM"),
    ],
)
def test_a_part_of_a_name_is_a_question(typed: str, asked: str) -> None:
    with pytest.raises(UsageError) as raised:
        named_device(typed)
    assert str(raised.value).startswith(f"{typed!r} is not in the table of devices; did you mean {asked}")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "the device's name is empty (stepscope devices lists the names)"),
        ("???", "the device's name is empty (stepscope devices lists the names)"),
        ("kettle", "'kettle' is not in the table of devices (stepscope devices lists them)"),
        ("第二", "'第二' is not in the table of devices (stepscope devices lists them)"),
        ("x" * 300, f"'{'x' * 200}...' is not in the table of devices (stepscope devices lists them)"),
    ],
)
def test_a_name_of_none_is_refused(typed: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        named_device(typed)
    assert str(raised.value) == message


def test_a_longer_name_is_another_device() -> None:
    for row in device_table():
        for name in (f"{row.name}9", f"{row.name} Ultra", f"Т{row.name}", f"{row.name}{' ' * 300}9"):
            with pytest.raises(UsageError):
                named_device(name)


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "{}", "--to", "H20"),
        ("predict", "{}", "--to", "L4", "--from", "RTX 4000"),
        ("plan", "{}", "--iterations", "9", "--from", "B2"),
        ("roofline", "{}", "--device", "H100"),
        ("devices", "RTX 6000"),
    ],
)
def test_every_use_asks_back(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    sample = "examples/gpt2_per_token_loss_cpu.json.gz"

    assert main([word.format(sample) for word in words]) == 2

    said = capsys.readouterr().err.strip()
    assert "did you mean" in said
    assert said.count("\n") == 0
