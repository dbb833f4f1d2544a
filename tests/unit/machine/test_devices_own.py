"""The user's own devices: TOML files, checked, before the shipped table."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import (
    device_table,
    devices_toml,
    figures_of,
    find_device,
    forget_devices,
    kept_file,
    named_device,
    read_devices,
    read_tables,
)
from stepscope.trace.metadata import Device

CARD = """\
[[device]]
name = "Card 7"
aliases = ["lab card"]
driver_names = ["ACME Card (7)", "Card 7 PCIe"]
vendor = "ACME"
architecture = "Rocket"
capability = "9.9"
multiprocessors = 12
clock_mhz = 1_500
memory_gb = 24
bandwidth_gb_s = 600.5
cache_mib = 6
power_w = 150
host_link_gb_s = 31.5
peer_link_gb_s = 50
peak_tflop_s = { fp32 = 20, bf16 = 80.5 }
measured_tflop_s = { bf16 = 70 }
measured_bandwidth_gb_s = 540
launch_us = 2.5
idle_w = 11
source = "https://acme.example/card-7"
measured_source = "bench of 2026"
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of kept devices in a folder of its own; what is read from it is forgotten afterwards."""
    monkeypatch.setenv("STEPSCOPE_CONFIG_DIR", str(tmp_path))
    return tmp_path / "devices.toml"


def test_a_device_has_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text(CARD)

    [card] = read_devices(file)

    assert (card.name, card.aliases, card.vendor, card.architecture) == ("Card 7", ("lab card",), "ACME", "Rocket")
    assert (card.capability, card.multiprocessors, card.clock_mhz) == ("9.9", 12, 1500)
    assert (card.memory_bytes, card.bandwidth_bytes_s, card.cache_bytes) == (24 * 10**9, 600_500_000_000, 6 * 2**20)
    assert (card.power_w, card.idle_power_w, card.launch_ns) == (150, 11, 2500)
    assert (card.host_link_bytes_s, card.peer_link_bytes_s) == (31.5e9, 50e9)
    assert card.flops_s == {"fp32": 20e12, "bf16": 80.5e12}
    assert card.sustained_flops_s == {"bf16": 70e12}
    assert card.sustained_bandwidth_bytes_s == 540e9
    assert (card.source, card.measured_source) == ("https://acme.example/card-7", "bench of 2026")


def test_what_was_measured_stands_in_for_peaks(tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text('[[device]]\nname = "C"\nmeasured_bandwidth_gb_s = 20\nmeasured_tflop_s = { fp32 = 0.5 }\n')

    [card] = read_devices(file)

    assert (card.bandwidth_bytes_s, card.flops_s) == (20 * 10**9, {"fp32": 0.5e12})
    assert (card.matches, card.source) == ("", str(file))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file, again = tmp_path / "card.toml", tmp_path / "again.toml"
    file.write_text(CARD)

    again.write_bytes(devices_toml(read_tables(file), comments=["two", "comment\nlines"]))

    assert again.read_text().startswith('# two\n# comment lines\n\n[[device]]\nname = "Card 7"\n')
    assert read_tables(again) == read_tables(file)
    assert read_devices(again) == read_devices(file)
    assert read_tables(tmp_path / "absent.toml") == []


def test_every_shipped_row_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_bytes(devices_toml(map(figures_of, device_table())))

    for row, shipped in zip(read_devices(file), device_table(), strict=True):
        assert (row.name, row.memory_bytes, row.bandwidth_bytes_s) == (
            shipped.name,
            shipped.memory_bytes,
            shipped.bandwidth_bytes_s,
        )
        assert row.flops_s == pytest.approx(shipped.sustained_flops_s | shipped.flops_s)


def test_kept_devices_are_in_the_table_and_replace_shipped_ones(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = device_table()
    kept.write_text(CARD + '[[device]]\nname = "l4"\nbandwidth_gb_s = 1\npeak_tflop_s = { fp32 = 2 }\n')
    forget_devices()

    table = device_table()

    assert kept_file() == kept
    assert [row.name for row in table] == ["Card 7", "l4", *(row.name for row in shipped if row.name != "L4")]
    assert named_device("L4").bandwidth_bytes_s == 10**9
    assert find_device(Device("0", "NVIDIA L4")) == table[1]  # what replaces a row is found by the same names
    assert named_device("lab-card").name == "Card 7"
    assert find_device(Device("0", "acme card (7)")) == table[0]
    assert find_device(Device("0", "ACME Card 7")) == table[0]  # the maker and the name
    assert find_device(Device("0", "ACME Card 7 Ti")) is None
    assert find_device(Device("0", None, 24 * 10**9, "9.9", 12)) == table[0]
    other = tmp_path / "project.toml"
    other.write_text(CARD.replace("Rocket", "Comet"))
    monkeypatch.setenv("STEPSCOPE_DEVICES", str(other))
    assert named_device("card 7").architecture == "Comet"  # what is named for this run goes first
    assert named_device("l4").bandwidth_bytes_s == 10**9


def test_a_file_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPSCOPE_DEVICES", str(tmp_path / "none.toml"))

    with pytest.raises(UsageError, match=r"none.toml cannot be read: No such file or directory$"):
        device_table()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (CARD, "", "contains no device; each is a table [[device]]"),
        (CARD, "device = 3", "contains no device; each is a table [[device]]"),
        (CARD, "device = [3]", "device 1 is not a table [[device]]"),
        (CARD, "[[devices]]\n", "'devices' is not a known key; each device is a table [[device]]"),
        (CARD, "name: x", "is not a TOML file: Expected '=' after a key in a key/value pair (at line 1, column 5)"),
        (CARD, "\x00", "is not a TOML file: Invalid statement (at line 1, column 1)"),
        (CARD, CARD * 2, "the device 'Card 7' appears twice"),
        ('name = "Card 7"\n', "", "device 1: 'name' is missing, or has no letter or digit"),
        ('"Card 7"\n', "7\n", "device 1: 'name' is wrong: expected text, got `int`"),
        ("memory_gb", "memory", "'Card 7': 'memory' is not a key of a device; the keys are name, aliases, "),
        ("= 600.5", '= "600"', "'Card 7': 'bandwidth_gb_s' is wrong: expected a number, got text"),
        ("= 600.5", "= -1", "'Card 7': 'bandwidth_gb_s' is wrong: expected a number above 0"),
        ("= 600.5", "= nan", "'Card 7': 'bandwidth_gb_s' is wrong: expected a number above 0"),
        ("= 600.5", "= true", "'Card 7': 'bandwidth_gb_s' is wrong: expected a number, got `bool`"),
        ("= 12\n", "= 12.5\n", "'Card 7': 'multiprocessors' should be a whole number, not 12.5"),
        ("fp32 =", "fp31 =", "'peak_tflop_s' is wrong: invalid enum value 'fp31'; number types are fp64, fp32, "),
        ("fp32 = 20", "fp32 = 0", "'Card 7': 'peak_tflop_s' is wrong: expected a number above 0"),
        ('["lab card"]', '"lab card"', "'aliases' is wrong: expected a list, got text"),
        ("bandwidth_gb_s", "idle_w", "Cannot overwrite a value"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "card.toml"
    file.write_text(CARD.replace(old, new))

    with pytest.raises(UsageError) as raised:
        read_devices(file)

    assert str(raised.value).startswith(str(file))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text('[[device]]\nname = "C"\npeak_tflop_s = { fp32 = 1 }\n')
    with pytest.raises(UsageError, match="'bandwidth_gb_s' or 'measured_bandwidth_gb_s' is missing, a number of GB/s"):
        read_devices(file)
    file.write_text('[[device]]\nname = "C"\nbandwidth_gb_s = 1\n')
    with pytest.raises(UsageError, match=r"'peak_tflop_s' or 'measured_tflop_s' is missing, such as { bf16 = 312 }"):
        read_devices(file)


def test_large_nested_and_binary_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(UsageError, match="is larger than 1 MiB"):
        read_devices(file)
    file.write_text("a = " + "[" * 100_000)
    with pytest.raises(UsageError, match="is not a TOML file"):
        read_devices(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        read_devices(file)
