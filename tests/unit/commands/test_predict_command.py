"""`stepscope predict`: its options, what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.commands.plan.predict import USUAL, devices_named, host_factor
from stepscope.errors import UsageError
from stepscope.machine.devices import device_table
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.unit.predict.test_prediction import US, copying
from tests.unit.recording import Recording, saved
from tests.unit.rendered import golden


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return saved(tmp_path, copying())


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["predict", *arguments]) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json", "-"))
    return report


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["predict", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


def test_on_the_recorded_device(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, trace, "--to", "A100-SXM4-80GB")
    assert text == golden("prediction_of_a_trace.txt", text)


def test_the_fastest_comes_first(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, trace, "--to", "L4,H200-SXM,a100 sxm4 80gb")

    assert [each["device"] for each in report["predictions"]] == ["H200-SXM", "A100-SXM4-80GB", "L4"]
    assert (report["schema"], report["step_ns"], report["device"]) == (1, 1000 * US, "A100-SXM4-80GB")
    measured = report["predictions"][1]
    assert (measured["step_ns"], measured["speed_up"], measured["host_ns"]) == (1000 * US, 1.0, 598 * US)
    assert (measured["bases"], measured["fits"]) == ({"same device": 1.0}, None)


def test_the_usual_devices_and_all() -> None:
    assert [row.name for row in devices_named(None)] == list(USUAL)
    assert devices_named(" ALL ") == device_table()
    assert [row.name for row in devices_named("L4, t4 ,L4,")] == ["L4", "T4"]


@pytest.mark.parametrize("text", ["", " , ", "NoSuchDevice", ",".join(["L4"] * 201)])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        devices_named(text)


def test_nonsense_is_one_sentence(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'H1000'" in refused(capsys, trace, "--to", "H1000")
    assert "bf17" in refused(capsys, trace, "--to", "L4", "--precision", "bf17")
    assert "--host-factor" in refused(capsys, trace, "--host-factor", "0")


@pytest.mark.parametrize("text", ["0", "-1", "1e9", "nan", "fast", "101", ""])
def test_factors_on_the_host_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        host_factor(text)


@pytest.mark.parametrize("text", ["0", "-8", "1.5", "1000000000"])
def test_batch_sizes_that_are_none_are_told_the_range(
    trace: str, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    said = "is not a batch size from 1 to 999999999"
    assert f"'{text}' {said}" in refused(capsys, trace, f"--batch={text}")


def test_only_so_many_devices_are_shown(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, trace, "--to", "L4,T4,A10", "--top", "1")

    assert "showing 1 of 3 devices, --top 0 for all" in text
    assert "T4" not in text


def test_a_step_that_does_not_fit_has_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 GB at once, all told: an L4 has 24."""
    recording = Recording(Metadata(devices=(Device("0", "NVIDIA A100-SXM4-80GB"),), path="trace.json"))
    recording.step(0, 1000 * US, 1)
    recording.launched(10 * US, 20 * US, 500 * US, "Memcpy DtoD", 1, kind="copy_on_device")
    recording.allocation(5 * US, 40_000_000_000, total_allocated=40_000_000_000, total_reserved=40_000_000_000)
    path = saved(tmp_path, recording.trace())

    text = printed(capsys, path, "--to", "L4,H100-SXM")

    [line] = [line for line in text.splitlines() if line.startswith("  L4")]
    assert line.split() == ["L4", "does", "not", "fit", "no"]
    assert "L4: does not fit: it needs 37.25 GiB; of the device's 22.35 GiB a tenth stays free for the runtime." in text
    assert [each["fits"] for each in answer(capsys, path, "--to", "L4,H100-SXM")["predictions"]] == [True, False]


def test_nothing_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to predict" in refused(capsys, saved(tmp_path, Trace.from_tables({})), "--to", "L4")


def test_redacted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording(Metadata(path="/home/alice/secret project/trace.json"))
    recording.step(0, 1000 * US, 1)
    recording.launched(10 * US, 20 * US, 500 * US, "kernel", 1)
    path = saved(tmp_path, recording.trace())

    report = answer(capsys, path, "--to", "L4", "--redact")

    assert report["trace"]["path"] == "trace.json"
    assert "alice" not in json.dumps(report)
