"""The command `stepscope devices`: the table, one device, the user's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.commands.plan.devices import devices_frame
from stepscope.machine.devices import KEYS, NUMBER_TYPES, device_table, named_device, read_devices

CARD = '[[device]]\nname = "Card 7"\nbandwidth_gb_s = 600\npeak_tflop_s = { bf16 = 80 }\n'


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of kept devices, in a folder of its own."""
    monkeypatch.setenv("STEPSCOPE_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config" / "devices.toml"


def test_the_table_has_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--format", "json"]) == 0

    rows = json.loads(capsys.readouterr().out)
    assert [row["device"] for row in rows] == [row.name for row in device_table()]
    a100 = next(row for row in rows if row["device"] == "A100-SXM4-80GB")
    assert {key: value for key, value in a100.items() if value is not None} == {
        "device": "A100-SXM4-80GB",
        "memory_gb": 80.0,
        "gb_per_s": 2039.0,
        "fp32_tflops": 19.5,
        "tf32_tflops": 156.0,
        "fp16_tflops": 312.0,
        "bf16_tflops": 312.0,
        "int8_tflops": 624.0,
        "fp64_tflops": 19.5,
        "power_w": 400,
        "measured_bf16_tflops": 271.2,
        "best_bf16_tflops": 271.2,
        "launch_us": 1.3,
        "host_link_gb_per_s": 31.5,
        "peer_link_gb_per_s": 300.0,
        "units": 108,
        "clock_mhz": 1410,
        "cache_mib": 40.0,
        "capability": "8.0",
        "vendor": "NVIDIA",
        "architecture": "Ampere",
        "source": named_device("A100-SXM4-80GB").source,
        "measured_source": named_device("A100-SXM4-80GB").measured_source,
        "idle_w": 59.0,
        "power_source": named_device("A100-SXM4-80GB").power_source,
    }


def test_one_device_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "v100s"]) == 0

    v100s = named_device("V100S")
    assert capsys.readouterr().out == (
        "V100S-PCIe (NVIDIA, Volta)\n"
        "  also called  V100S\n"
        "  memory       32 GB\n"
        "  bandwidth    1,134 GB/s\n"
        "  fp64         8.2 TFLOP/s\n"
        "  fp32         16.4 TFLOP/s; 91% in predictions, as others of the chip reach\n"
        "  fp16         130 TFLOP/s\n"
        "  power        250 W at most\n"
        "  host link    15.75 GB/s each way\n"
        "  peer link    15.75 GB/s each way\n"
        "  units        80\n"
        "  clock        1,597 MHz\n"
        "  cache        6 MiB\n"
        "  capability   7.0\n"
        f"  source       {v100s.source}\n"
    )


def test_measured_figures_stand_beside_the_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "H100-SXM"]) == 0

    text = capsys.readouterr().out
    assert "  bf16          989.4 TFLOP/s; 794.5 TFLOP/s measured (80%)\n" in text
    assert "  bandwidth     3,350 GB/s; 2,903 GB/s measured (87%)\n" in text
    assert "  idle          90 to 145 W\n  memory-bound  520 W at most\n" in text
    measured = "\n                ".join(named_device("H100-SXM").measured_source.split())
    power, *_ = named_device("H100-SXM").power_source.split()
    assert f"\n  measured      {measured}\n  powers        {power}\n" in text


def test_devices_are_kept_replaced_and_removed(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.toml"
    file.write_text(CARD)

    assert main(["devices", "--add", str(file)]) == 0
    assert capsys.readouterr().out == f"Kept Card 7 in {kept}.\n"
    assert named_device("card7").flops_s == {"bf16": 80e12}
    file.write_text(CARD.replace("80", "90").replace("Card 7", "CARD-7") + CARD.replace("Card 7", "Card 8"))
    assert main(["devices", "--add", str(file)]) == 0
    assert capsys.readouterr().out == f"Kept CARD-7, Card 8 in {kept}; CARD-7 replaced an earlier one.\n"
    assert [(row.name, row.flops_s["bf16"]) for row in device_table()[:2]] == [("CARD-7", 90e12), ("Card 8", 80e12)]
    assert kept.read_text().startswith("# Written by stepscope devices --add.\n\n[[device]]\n")

    assert main(["devices", "--remove", "card 7"]) == 0
    assert capsys.readouterr().out == "No longer kept: card 7.\n"
    assert main(["devices", "--remove", "card 7"]) == 2
    assert capsys.readouterr().err == "stepscope: you have no device 'card 7'; you keep Card 8\n"
    assert main(["devices", "--remove", "card 8"]) == 0
    assert not kept.exists()
    assert main(["devices", "--remove", "card 8"]) == 2
    assert capsys.readouterr().err == "stepscope: you have no device 'card 8'; you keep none\n"


def test_a_bad_file_changes_nothing(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.toml"
    file.write_text(CARD)
    main(["devices", "--add", str(file)])
    before = kept.read_bytes()
    file.write_text(CARD.replace("600", "0"))
    capsys.readouterr()

    assert main(["devices", "--add", str(file)]) == 2

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"stepscope: {file}: 'Card 7': 'bandwidth_gb_s' is wrong: expected a number above 0")
    assert kept.read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["L5"], "'L5' is not in the table of devices; did you mean L4"),
        (["L4", "--add", "x"], "name a device, --add a file or --remove a device: one at a time"),
        (["--add", "nothing.toml"], "there is no file 'nothing.toml'"),
        (["--device", "cpu"], "--device needs stepscope devices measure"),
        (["--add", ""], "there is no file ''"),
        (["--quick"], "--quick needs stepscope devices measure"),
        (["L4", "--called", "x"], "--called needs stepscope devices measure"),
        (["measure", "--format", "csv"], "--format does not work with stepscope devices measure"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", *argv]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("device", "message"),
    [("toaster:3", "there is no device 'toaster:3' for torch "), ("meta", "here: it computes nothing")],
)
def test_a_device_that_torch_does_not_have(device: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")

    assert main(["devices", "measure", "--device", device]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_guide_names_every_column_and_key_and_its_example_is_read(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "devices.md").read_text(encoding="utf-8")
    columns = devices_frame(device_table()[:1]).columns
    kinds = {f"{kind}_tflops" for kind in NUMBER_TYPES} | {f"measured_{kind}_tflops" for kind in NUMBER_TYPES}

    assert [name for name in {*columns, *KEYS} - kinds if f"`{name}`" not in guide and f"`{name} =" not in guide] == []
    file = tmp_path / "example.toml"
    file.write_text(guide.partition("```toml\n")[2].partition("```")[0])
    [card] = read_devices(file)
    assert card.flops_s == {"fp32": 26.7e12, "bf16": 82.7e12}


def test_it_runs_as_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "stepscope", "devices", "--format", "csv", "--top", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("P4,8.0,192.0,5.5,")


def test_a_broken_file_of_the_users_is_named(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept.parent.mkdir()
    kept.write_bytes(b"\xff\xfe")

    assert main(["devices"]) == 2

    assert capsys.readouterr().err == f"stepscope: {kept} is not a TOML file: it is not UTF-8 text\n"
